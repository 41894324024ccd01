// The gateway's API. The key is kept for this tab only and travels in a header, never in an address.

const KEY = "harnessrl.key";

export class Refused extends Error {}

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

function request(path, signal) {
  return fetch(path, { signal, headers: key() ? { authorization: `Bearer ${key()}` } : {}, cache: "no-store" });
}

async function check(response) {
  if (response.ok) return response;
  let detail = response.statusText;
  try {
    detail = (await response.json()).detail;
  } catch {
    // not JSON: the status says enough
  }
  if (response.status === 401 || response.status === 403) throw new Refused(String(detail));
  throw new Error(typeof detail === "string" ? detail : JSON.stringify(detail));
}

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const response = await check(await request(query.size ? `${path}?${query}` : path, signal));
  return response.json();
}

// Items of a stream of server-sent events, until `signal`; a lost connection is made again from `resume()` on.
// While the page is hidden there is none: a browser allows few at once.
export async function follow(resume, take, signal, connected = () => {}) {
  for (let wait = 1; !signal.aborted; wait = Math.min(wait * 2, 15)) {
    if (document.hidden) await until(document, "visibilitychange", signal, () => !document.hidden);
    const hidden = new AbortController();
    const hide = () => document.hidden && hidden.abort();
    document.addEventListener("visibilitychange", hide, { signal });
    try {
      const response = await check(await request(resume(), AbortSignal.any([signal, hidden.signal])));
      connected(true);
      wait = 0.5;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let buffer = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (buffer + value).split("\n\n");
        buffer = events.pop();
        for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
      }
    } catch (error) {
      if (error instanceof Refused) throw error;
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (signal.aborted) return;
    connected(false);
    if (!document.hidden) await sleep(wait, signal);
  }
}

function until(target, event, signal, holds) {
  return new Promise((resolve) => {
    const seen = () => holds() && done();
    const done = () => {
      target.removeEventListener(event, seen);
      resolve();
    };
    target.addEventListener(event, seen);
    signal.addEventListener("abort", done, { once: true });
  });
}

export function sleep(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

// Do `work` now and every few seconds while the page is seen; a lost gateway is told to `failed`.
export async function every(period, work, signal, failed) {
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        await work();
        failed(null);
      } catch (error) {
        if (signal.aborted) return;
        failed(error);
      }
    }
    await sleep(period, signal);
  }
}
