// What runs: engines, controllers, the queue, the gate, the store, the gateway's metrics.
import { every, get } from "./api.js";
import { live } from "./app.js";
import { ago, bytes, card, command, h, number, pill, seconds, version } from "./dom.js";

const PERIOD = 2;
const QUIET_SECONDS = 45;

export async function showSystem(main, { signal, background }) {
  let last = null;
  const draw = async () => {
    const now = await get("/api/dashboard/system", {}, signal);
    main.replaceChildren(...page(now, last));
    last = now;
  };
  await draw();
  background(every(PERIOD, draw, signal, (error) => live(error ? false : true, error ? "no answer" : "live")));
}

function page(now, last) {
  const states = now.states, total = Object.values(states).reduce((a, b) => a + b, 0);
  const tile = (label, value, more) => h("div", {}, h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "more" }, more || "\u00a0"));
  const gate = now.gate;
  return [
    h("h1", {}, "System"),
    h("div", { class: "card tiles" },
      tile("queued", number(states.queuing ?? 0), now.oldest_queuing_at && `oldest ${ago(now.oldest_queuing_at)}`),
      tile("running", number(states.running ?? 0), `on ${now.controllers.length} controller${now.controllers.length === 1 ? "" : "s"}`),
      tile("ended", number((states.succeeded ?? 0) + (states.failed ?? 0)), `${number(states.failed ?? 0)} failed`),
      tile("calls at engines", number(gate.inflight)),
      tile("held calls", number(gate.held), gate.paused ? `paused: ${gate.reason ?? "no reason given"}` : "the gate is open"),
      tile("store", bytes(now.store.bytes), `${number(total)} rollouts, ${now.store.backlog} writes waiting`)),
    h("div", { class: "grid" }, h("div", { class: "w6" }, engines(now)), h("div", { class: "w6" }, workers(now))),
    metrics(now, last),
    h("p", { class: "faint" }, `HarnessRL ${now.version} · store ${now.store.path}`),
  ];
}

function engines({ endpoints }) {
  return card("Engines", h("span", { class: "faint" }, `${endpoints.length}`), endpoints.length ? h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Model", "Address", "Kind", "Version", ""].map((name, i) => h("th", { class: i === 3 && "n", scope: "col" }, name || h("span", { class: "sr-only" }, "State"))))),
    h("tbody", {}, endpoints.map((e) => h("tr", {}, h("td", {}, e.model), h("td", { class: "mono" }, e.endpoint), h("td", {}, e.kind === "token" ? "tokens" : "chat"), h("td", { class: "n" }, version(e.version)), h("td", {}, e.answers ? e.trainable === false ? pill("helper") : pill("answers", "good") : pill("no answer", "bad"))))))
  ) : h("p", { class: "soft" }, "No engine is registered, so every model call is answered 503. A trainer registers its own; another one with ", command("POST /api/models")));
}

function workers({ controllers, heard, time }) {
  const rows = heard.map(({ kind, name, seconds_ago }) => ({ kind, name, seconds_ago, running: controllers.find((c) => kind === "controller" && c.name === name)?.running }));
  for (const c of controllers) if (!rows.some((row) => row.name === c.name)) rows.push({ kind: "controller", name: c.name, running: c.running, seconds_ago: null });
  return card("Trainers and controllers", h("span", { class: "faint" }, "heard since this gateway began"), rows.length ? h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Who", "Name", "Running", "Last heard"].map((name, i) => h("th", { class: i > 1 && "n", scope: "col" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, row.kind), h("td", { class: "mono" }, row.name), h("td", { class: "n" }, row.kind === "controller" ? number(row.running ?? 0) : "–"), h("td", { class: "n" }, row.seconds_ago === null ? "not yet" : h("span", { class: row.seconds_ago > QUIET_SECONDS ? "warn" : "" }, ago(time - row.seconds_ago))))))
  )) : h("p", { class: "soft" }, "Nobody has reported yet. Queued rollouts wait until a controller runs: ", command("harnessrl controller --gateway URL")));
}

// Of a histogram its mean, instead of its sum.
function means(family) {
  const [count, sum] = ["count", "sum"].map((name) => family.samples.find((s) => s.name === name));
  return count && sum ? [count, { ...sum, name: "mean", value: count.value ? sum.value / count.value : NaN }] : family.samples;
}

function metrics(now, last) {
  const value = (system, family, sample) => system?.metrics.find((f) => f.name === family.name)?.samples.find((s) => s.name === sample.name && JSON.stringify(s.labels) === JSON.stringify(sample.labels))?.value;
  const rows = now.metrics.flatMap((family) => means(family).map((sample) => {
    const before = value(last, family, sample), counts = ["total", "count"].includes(sample.name);
    const rate = counts && before !== undefined ? (sample.value - before) / (now.time - last.time) : null;
    const labels = Object.entries(sample.labels).map(([k, v]) => `${k}=${v}`).join(", ");
    return h("tr", {}, h("td", {}, h("div", {}, family.help), h("span", { class: "faint mono" }, `${family.name}${sample.name && `_${sample.name}`}`)), h("td", { class: "mono" }, labels), h("td", { class: "n" }, family.name.endsWith("_bytes") ? bytes(sample.value) : sample.name === "mean" ? seconds(sample.value) : number(sample.value)), h("td", { class: "n" }, rate === null ? "" : `${number(rate, 1)} /s`));
  }));
  return card("Metrics of the gateway", h("a", { href: "/metrics" }, "for Prometheus"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Metrics" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Metric", "Labels", "Value", "Rate"].map((name, i) => h("th", { class: i > 1 && "n", scope: "col" }, name)))), h("tbody", {}, rows))));
}
