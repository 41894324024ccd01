// The run: is it learning, where does the time go, what is wrong.
import { address, live } from "./app.js";
import { every, follow, get } from "./api.js";
import { Chart } from "./charts.js";
import { ago, card, clock, command, date, empty, h, number, pill, seconds, short, taskText } from "./dom.js";

const PHASES = {
  evaluate: "evaluating", collect: "collecting rollouts", rest: "holding calls", update: "updating", publish: "publishing weights", checkpoint: "writing a checkpoint", start: "starting",
};
const SILENT_SECONDS = 45;
const CYCLES = 8;
const WINDOW = 5; // updates that a speed is taken over

export async function showRun(main, { run, signal, background }) {
  if (!run) {
    main.replaceChildren(
      empty("No run yet", "This gateway has not heard of a training run. Start one:", command("make quickstart"), command("harnessrl train CONFIG.yaml"), h("p", { class: "soft" }, "It appears here by itself."), ),
    );
    background(every(3, async () => (await get("/api/runs")).length && dispatchEvent(new Event("hashchange")), signal, () => {}));
    return;
  }
  const page = new RunPage(run);
  page.take(await get(`/api/runs/${encodeURIComponent(run.run_id)}/records`, {}, signal));
  main.replaceChildren(...page.elements);
  page.draw();
  const stream = () => `/api/runs/${encodeURIComponent(run.run_id)}/stream?after=${page.last}`;
  background(follow(stream, (record) => page.later([record]), signal, (on) => live(on, on ? "live" : "reconnecting")));
  background(every(2, () => page.poll(signal), signal, () => {}));
}

class RunPage {
  constructor(run) {
    this.run = run;
    this.last = 0;
    this.heard = null;
    this.train = new Map();
    this.held = new Map();
    this.phases = [];
    this.alarms = [];
    this.start = this.end = null;
    this.header = h("div");
    this.tiles = h("div", { class: "card tiles" });
    this.alarmList = h("div");
    this.flight = h("div");
    this.flying = null;
    this.time = h("div");
    this.table = h("details", { class: "card" }, h("summary", {}, "All values as a table"));
    this.table.addEventListener("toggle", () => this.drawTable());
    const charts = (this.charts = {
      reward: new Chart("Reward", { note: "Mean over rollouts; bands and whiskers are 95 % confidence intervals over tasks." }),
      entropy: new Chart("Entropy", { unit: "nats", zero: true }),
      gap: new Chart("Log-probability gap, sampler to trainer", { unit: "nats", log: true }),
      staleness: new Chart("Staleness of trained groups", { unit: "updates", zero: true }),
      speed: new Chart("Sampling speed", { unit: "tokens/s", zero: true, note: `Over the last ${WINDOW} updates, all waiting included.` }),
    });
    const w4 = (chart) => (chart.element.classList.add("w4"), chart.element);
    charts.reward.element.classList.add("w8");
    this.elements = [
      this.header, this.tiles, this.alarmList,
      h("div", { class: "grid" }, charts.reward.element, w4(charts.entropy), w4(charts.gap), w4(charts.staleness), w4(charts.speed)),
      this.time, this.flight, this.table,
    ];
  }

  take(records) {
    for (const record of records) {
      this.last = Math.max(this.last, record.id);
      const { kind, at, data } = record;
      if (kind === "start") [this.start, this.end, this.startedAt, this.seen] = [data, null, at, []];
      if (kind === "phase") this.phases.push({ name: data.name, rollouts: data.rollouts, at, done: this.done() });
      if (kind === "alarm") this.alarms.unshift({ at, message: data.message, update: this.done() });
      if (kind === "end") [this.end, this.endedAt] = [data, at];
      if (kind === "metrics") {
        if ("reward/train" in data) {
          this.train.set(data.update, { ...data, at });
          this.seen?.push(at);
        } else this.held.set(data.update, data);
      }
    }
  }

  later(records) {
    this.take(records);
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  done() {
    return this.train.size ? [...this.train.keys()].at(-1) : 0;
  }

  async poll(signal) {
    const [runs, gate] = await Promise.all([get("/api/runs", {}, signal), get("/proxy/state", {}, signal)]);
    this.heard = runs.find((run) => run.run_id === this.run.run_id)?.heard_seconds_ago ?? null;
    const groups = await get("/api/dashboard/groups", { run: this.run.run_id, state: "unfinished", limit: 60, descending: false }, signal);
    this.drawHeader();
    this.drawFlight(groups, gate);
    this.drawTime();
  }

  rows() {
    return [...this.train.values()].sort((a, b) => a.update - b.update);
  }

  draw() {
    const rows = this.rows();
    const of = (name, half) => rows.map((row) => [row.update, row[name], half && row[half]]);
    const held = [...this.held.values()].sort((a, b) => a.update - b.update).map((row) => [row.update, row["reward/eval"], row["reward/eval_ci95"]]);
    const { reward, entropy, gap, staleness, speed } = this.charts;
    reward.set([{ name: "training", points: of("reward/train", "reward/train_ci95") }, ...(held.length ? [{ name: "held-out", second: true, whiskers: true, points: held }] : [])]);
    entropy.set([{ name: "entropy", points: of("policy/entropy") }]);
    gap.set([{ name: "all", points: of("policy/gap") }, { name: "fresh tokens", second: true, points: of("policy/gap_fresh") }]);
    staleness.set([{ name: "mean", points: of("staleness/mean") }, { name: "max", second: true, points: of("staleness/max") }]);
    speed.set([{ name: "tokens/s", points: rows.map((row, i) => [row.update, tokensPerSecond(rows, i)]) }]);
    this.drawHeader();
    this.drawTiles(rows, held);
    this.drawAlarms();
    this.drawTime();
    this.drawTable();
  }

  state() {
    if (this.end) return this.end.state;
    if (this.heard === null || this.heard > SILENT_SECONDS) return "silent";
    return "running";
  }

  drawHeader() {
    const config = this.start?.config ?? {}, planned = config.train?.updates ?? 0, done = this.done();
    const phase = this.phases.at(-1), state = this.state();
    const pills = {
      running: () => pill(PHASES[phase?.name ?? "start"] ?? phase.name, "accent", true),
      finished: () => pill("finished", "good"),
      stopped: () => pill("stopped", "warn"),
      failed: () => pill("failed", "bad"),
      silent: () => pill("no trainer is reporting", "warn"),
    };
    const facts = [
      config.model?.path, config.algorithm?.advantage?.toUpperCase(),
      config.collect && `${config.collect.groups_per_update} groups × ${config.collect.group_size} rollouts an update`,
      this.startedAt && `started ${date(this.startedAt)}`,
    ];
    const ended = this.endedAt ?? this.phases.at(-1)?.at ?? this.startedAt;
    const right = state === "running" ? this.eta(planned, done) : this.end ? `took ${seconds(ended - this.startedAt)}` : "";
    this.header.replaceChildren(
      h("div", { class: "row spread" }, h("div", { class: "row" }, h("h1", {}, config.name ?? this.run.run_id), pills[state]()), h("span", { class: "soft" }, right)),
      h("p", { class: "soft clip" }, facts.filter(Boolean).join(" · ")),
      h("div", { class: "row" }, h("div", { class: "bar", vars: { flex: "1" }, role: "progressbar", "aria-label": "Updates", "aria-valuenow": done, "aria-valuemin": 0, "aria-valuemax": planned }, h("div", { vars: { width: `${planned ? (100 * done) / planned : 0}%` } })), h("span", { class: "soft" }, `${done} of ${planned} updates`)),
    );
    if (state === "failed") this.header.append(h("p", { class: "notice bad", role: "alert" }, this.end.message || "It ended with an error; its terminal says more."));
    if (state === "silent" || state === "stopped" || state === "failed")
      this.header.append(h("p", { class: "soft" }, state === "silent" && `Last heard ${ago(this.phases.at(-1)?.at ?? this.startedAt)}. `, "To go on from its last checkpoint: ", command("harnessrl train --resume runs/NAME")));
    this.header.className = "stack";
  }

  eta(planned, done) {
    const ends = (this.seen ?? []).slice(-9);
    const from = ends.length > 1 ? ends : [this.phases.find((p) => p.name === "collect" && p.at >= this.startedAt)?.at, ...ends].filter(Boolean);
    if (from.length < 2) return "";
    const each = (from.at(-1) - from[0]) / (from.length - 1), left = Math.max(0, each * (planned - done) - (Date.now() / 1000 - from.at(-1)));
    const time = left < 90 ? "about a minute" : left < 5400 ? `about ${Math.round(left / 60)} min` : `about ${number(left / 3600, 1)} h`;
    return `${time} left, until ${clock(Date.now() / 1000 + left).slice(0, 5)}`;
  }

  drawTiles(rows, held) {
    // An update without tokens to train on has no entropy and no gap: the newest that is known stands.
    const last = Object.assign({}, ...rows.slice(-50)), first = rows[0] ?? {};
    const before = held[0]?.[1], after = held.at(-1)?.[1];
    const tile = (label, value, more) => h("div", {}, h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "more" }, more || "\u00a0"));
    const rollouts = rows.reduce((sum, row) => sum + (row["batch/rollouts"] ?? 0), 0);
    const trained = rows.reduce((sum, row) => sum + (row["batch/tokens_trained"] ?? 0), 0);
    this.tiles.replaceChildren(
      tile("held-out reward", held.length > 1 ? `${before.toFixed(2)} → ${after.toFixed(2)}` : number(after), held.length > 1 ? `after update ${held.at(-1)[0]}` : held.length ? "before training" : "no held-out tasks yet"),
      tile("training reward", number(last["reward/train"]), rows.length > 1 && `from ${number(first["reward/train"])}`),
      tile("entropy", number(last["policy/entropy"]), rows.length > 1 && `from ${number(first["policy/entropy"])} nats`),
      tile("log-probability gap", number(last["policy/gap"]), "nats, mean"),
      tile("sampled", number(tokensPerSecond(rows, rows.length - 1), 0), `tokens/s, last ${WINDOW} updates`),
      tile("trained on", rollouts.toLocaleString("en"), `rollouts, ${number(trained)} tokens`),
    );
  }

  drawAlarms() {
    this.alarmList.hidden = !this.alarms.length;
    const shown = this.alarms.slice(0, 5), more = this.alarms.slice(5);
    const item = ({ at, message, update }) => {
      const [what, ...advice] = message.split(/(?<=[^\d]): |; /);
      return h("li", {}, h("span", { class: "warn", "aria-hidden": "true" }, "▲"), h("div", {}, what, advice.length > 0 && h("div", { class: "advice" }, advice.join("; "))), h("span", { class: "faint" }, `update ${update}, ${clock(at)}`));
    };
    this.alarmList.replaceChildren(
      card(`Alarms (${this.alarms.length})`, h("span", { class: "faint" }, "newest first"), h("ul", { class: "alarms" }, shown.map(item)), more.length > 0 && h("details", {}, h("summary", {}, `${more.length} earlier`), h("ul", { class: "alarms" }, more.map(item)))),
    );
  }

  drawTime() {
    const end = this.end ? this.endedAt : this.state() === "running" ? Date.now() / 1000 : (this.phases.at(-1)?.at ?? 0);
    const own = this.phases.filter((phase) => phase.at >= (this.startedAt ?? 0));
    const spans = own.map((phase, i) => ({ ...phase, length: Math.max(0, (own[i + 1]?.at ?? end) - phase.at) }));
    const total = spans.reduce((sum, span) => sum + span.length, 0);
    if (!total) return this.time.replaceChildren();
    const sums = Object.keys(PHASES).map((name) => [name, spans.filter((span) => span.name === name).reduce((sum, span) => sum + span.length, 0)]).filter(([, length]) => length > 0);
    const cycles = [];
    for (const span of spans) {
      if (span.name === "collect" || !cycles.length) cycles.push({ label: span.name === "collect" ? `update ${span.done + 1}` : "before", spans: [] });
      cycles.at(-1).spans.push(span);
    }
    const newest = cycles.slice(-CYCLES), length = (cycle) => cycle.spans.reduce((sum, span) => sum + span.length, 0);
    const longest = Math.max(...newest.map(length));
    const strip = (parts, whole, label) => h("div", { class: "strip", role: "img", "aria-label": label }, parts.filter(([, l]) => l > 0).map(([name, l]) => h("span", { class: `phase-${name}`, title: `${PHASES[name]}: ${seconds(l)}`, vars: { width: `${(100 * l) / whole}%` } })));
    const told = sums.map(([name, l]) => `${PHASES[name]} ${Math.round((100 * l) / total)} %`).join(", ");
    this.time.replaceChildren(
      card(
        "Where the time goes", h("span", { class: "soft" }, `${seconds(total)} in all`),
        strip(sums, total, told),
        h("div", { class: "legend", vars: { margin: "8px 0 16px" } }, sums.map(([name, l]) => h("span", {}, h("i", { class: `swatch phase-${name}` }), `${PHASES[name]} ${l / total < 0.005 ? "<1" : Math.round((100 * l) / total)} %`))),
        h("div", { class: "cycles" }, newest.reverse().map((cycle) => {
          const parts = cycle.spans.map((span) => [span.name, span.length]);
          return [h("span", { class: "faint" }, cycle.label), strip(parts, longest, parts.map(([name, l]) => `${PHASES[name]} ${seconds(l)}`).join(", ")), h("span", { class: "soft n" }, seconds(length(cycle)))];
        })),
      ),
    );
  }

  drawFlight(groups, gate) {
    const said = JSON.stringify([groups, gate, this.end]);
    if (said === this.flying) return;
    this.flying = said;
    const run = this.run.run_id;
    const waits = gate.paused && `Calls are held: ${gate.reason ?? "paused"}. `;
    const none = this.end ? "The run has ended: nothing is in flight." : "No rollout is queued or running right now.";
    this.flight.replaceChildren(
      card(
        "Groups in flight", h("a", { href: address("rollouts", { run, view: "groups" }) }, "all groups"),
        waits && h("p", { class: "soft" }, waits),
        groups.total === 0 && h("p", { class: "soft" }, none),
        h("div", { class: "flight" }, groups.items.map((group) =>
          h("div", {}, h("a", { class: "clip", href: address("group", { run }, group.group_id), title: group.group_id }, taskText(group.rollouts[0].input)), cells(group.rollouts, run)))),
        groups.total > groups.items.length && h("p", { class: "faint" }, `and ${groups.total - groups.items.length} more`),
      ),
    );
  }

  drawTable() {
    if (!this.table.open) return;
    const rows = this.rows();
    const names = ["reward/train", "reward/train_ci95", "policy/entropy", "policy/gap", "policy/gap_fresh", "optim/grad_norm", "staleness/mean", "staleness/max", "time/collect", "time/rest", "time/update"];
    this.table.replaceChildren(
      this.table.firstElementChild,
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Metrics" }, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { class: "n" }, "update"), names.map((name) => h("th", { class: "n" }, name)), h("th", { class: "n" }, "reward/eval"))),
        h("tbody", {}, rows.slice(-200).reverse().map((row) => h("tr", {}, h("td", { class: "n" }, `${row.update}`), names.map((name) => h("td", { class: "n" }, number(row[name]))), h("td", { class: "n" }, number(this.held.get(row.update)?.["reward/eval"]))))))),
    );
  }
}

// Sampled tokens of the updates up to the i-th over all the time since the one before them.
function tokensPerSecond(rows, i) {
  if (i < 0) return NaN;
  const from = Math.max(0, i - WINDOW + 1), own = (row) => (row["time/collect"] ?? 0) + (row["time/rest"] ?? 0) + (row["time/update"] ?? 0);
  const began = from > 0 ? rows[from - 1].at : rows[0].at - own(rows[0]);
  const sampled = rows.slice(from, i + 1).reduce((sum, row) => sum + (row["batch/tokens_per_call"] ?? 0) * (row["batch/calls"] ?? 0), 0);
  return rows[i].at > began ? sampled / (rows[i].at - began) : NaN;
}

// A group's rollouts as small squares with their rewards.
export function cells(rollouts, run) {
  const rewards = rollouts.map((r) => r.reward).filter((r) => r !== null);
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  return h("div", { class: "cells" }, rollouts.map((r) => {
    const shown = r.state === "failed" ? "×" : r.reward === null ? "" : number(r.reward, 2);
    const label = `${r.state}${r.reward === null ? "" : `, reward ${number(r.reward)}`}${r.error_message ? `, ${r.error_message}` : ""}`;
    return h("a", { class: `cell ${r.state}`, href: address("rollout", { run }, r.rollout_id), title: `${short(r.rollout_id)}: ${label}`, "aria-label": label, vars: { "--share": r.reward === null ? 0 : (100 * (r.reward - low)) / (high - low) } }, shown);
  }));
}
