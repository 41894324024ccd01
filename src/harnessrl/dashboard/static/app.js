// The frame: which page, which run, which theme, and who is asking.
import { Refused, get, key, setKey } from "./api.js";
import { card, command, empty, h, say } from "./dom.js";
import { showGroup } from "./group.js";
import { showRollout } from "./rollout.js";
import { showRollouts } from "./rollouts.js";
import { showRun } from "./run.js";
import { showSystem } from "./system.js";

const PAGES = [
  ["run", "Run", showRun],
  ["rollouts", "Rollouts", showRollouts],
  ["system", "System", showSystem],
  ["rollout", null, showRollout],
  ["group", null, showGroup],
];
const main = document.getElementById("main");
const parts = {
  run: h("select", { "aria-label": "Run", onchange: (event) => go(here().page, { ...here().query, run: event.target.value, offset: null }) }),
  live: h("span", { class: "pill", hidden: true }),
  theme: h("button", { class: "plain", onclick: toggleTheme }),
  leave: h("button", { class: "plain", onclick: () => (setKey(""), show()) }, "Sign out"),
};
let runs = [];
let leaving = new AbortController();

// #/page?name=value
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/");
  return { page: page || "run", id: rest.map(decodeURIComponent).join("/"), query: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(page, query = {}, id = "") {
  const kept = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return `#/${page}${id && `/${encodeURIComponent(id)}`}${kept.size ? `?${kept}` : ""}`;
}

export function go(page, query, id) {
  location.hash = address(page, query, id);
}

// Without moving the focus or reading the page anew: for filters that the page has applied itself.
export function remember(page, query) {
  history.replaceState(null, "", address(page, query));
  drawNav();
}

function theme() {
  return localStorage.getItem("harnessrl.theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  parts.theme.textContent = theme() === "dark" ? "Light" : "Dark";
  parts.theme.setAttribute("aria-label", `Switch to ${theme() === "dark" ? "light" : "dark"} colours`);
}

function toggleTheme() {
  localStorage.setItem("harnessrl.theme", theme() === "dark" ? "light" : "dark");
  applyTheme();
}

function drawNav() {
  const { page, query } = here();
  const run = query.run;
  document.getElementById("nav").replaceChildren(
    ...PAGES.filter(([, title]) => title).map(([name, title]) => {
      const current = name === page || (name === "rollouts" && ["rollout", "group"].includes(page));
      return h("a", { href: address(name, { run }), "aria-current": current && "page" }, title);
    }),
  );
  const chosen = runs.some((r) => r.run_id === run) ? run : runs[0]?.run_id;
  parts.run.replaceChildren(...runs.map((r) => h("option", { value: r.run_id, selected: r.run_id === chosen }, r.run_id)));
  parts.run.hidden = !runs.length || page === "system";
  parts.leave.hidden = !key();
}

export function live(state, text) {
  parts.live.hidden = state === null;
  parts.live.className = `pill ${state ? "good" : "warn"}`;
  parts.live.replaceChildren(h("span", { class: `dot ${state ? "live" : ""}` }), text);
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const { page, id, query } = here();
  const found = PAGES.find(([name]) => name === page);
  live(null, "");
  try {
    runs = await get("/api/runs", {}, signal);
    drawNav();
    if (!found) {
      main.replaceChildren(empty("There is no such page", h("a", { href: "#/run" }, "To the run")));
      return;
    }
    const run = runs.find((r) => r.run_id === query.run) ?? runs[0] ?? null;
    document.title = `${found[1] ?? id} · HarnessRL`;
    const background = (work) => work.catch((error) => signal.aborted || failed(error));
    await found[2](main, { id, query, run, runs, signal, background });
  } catch (error) {
    if (!signal.aborted) failed(error);
  }
}

function failed(error) {
  if (error instanceof Refused) return signIn(error.message);
  main.replaceChildren(
    empty(
      error instanceof TypeError ? "The gateway does not answer" : "That did not work",
      h("p", {}, error instanceof TypeError ? "It may have ended, or is starting again. A finished run is opened with" : error.message),
      error instanceof TypeError && command("harnessrl gateway --store runs/NAME/rollouts.db"),
      h("button", { onclick: show }, "Try again"),
    ),
  );
  say("That did not work");
}

function signIn(reason) {
  drawNav();
  const input = h("input", { type: "password", autocomplete: "current-password", required: true, id: "key" });
  const submit = (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    show();
  };
  main.replaceChildren(
    h(
      "form", { class: "card signin", onsubmit: submit },
      h("h1", {}, "Sign in"),
      key() && h("p", { class: "notice bad", role: "alert" }, reason),
      h("label", { for: "key" }, "Key of this gateway", input),
      h("p", { class: "soft" }, "The admin key, or one that may only look: ", command("harnessrl key viewer")),
      h("p", { class: "soft" }, "A run's own gateway keeps its key in runs/NAME/gateway.key; others in STORE.key, beside the store."),
      h("button", { class: "primary" }, "Sign in"),
    ),
  );
  input.focus();
}

// An address that `harnessrl train` printed carries a key behind the #, which no browser sends to a server.
function takeKey() {
  const given = /^#key=([^&]+)/.exec(location.hash);
  if (!given) return;
  setKey(decodeURIComponent(given[1]));
  history.replaceState(null, "", "#/run");
}

document.getElementById("tools").replaceChildren(parts.live, parts.run, parts.theme, parts.leave);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
takeKey();
applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
addEventListener("hashchange", () => {
  takeKey();
  show().then(() => {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  });
});
show();
