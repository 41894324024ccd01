// Many rollouts: filtered, sorted and paged by the gateway, singly or by group.
import { address, live, remember } from "./app.js";
import { follow, get } from "./api.js";
import { card, date, empty, command, h, number, redraw, say, seconds, short, statePill, taskText, versions } from "./dom.js";
import { cells } from "./run.js";

const PAGE = 50;
const TYPING = 150; // milliseconds without a key before text is searched
const FRESH = 1000; // milliseconds between readings while rollouts change
const SORTS = [["created", "newest"], ["updated", "last changed"], ["reward", "reward"], ["seconds", "duration"], ["calls", "calls"], ["sampled", "tokens"], ["version", "policy version"]];
const GROUP_SORTS = [["created", "newest"], ["reward", "mean reward"], ["spread", "spread of rewards"]];

export async function showRollouts(main, { query, run, runs, signal, background }) {
  const page = new RolloutsPage(query, run, signal);
  page.facets = await get("/api/dashboard/facets", { run: run?.run_id }, signal);
  await page.read();
  main.replaceChildren(...page.elements);
  page.drawFilters();
  let due = null;
  const changed = () => (due ??= setTimeout(() => ((due = null), page.read().catch(() => {})), FRESH));
  background(follow(() => "/api/rollouts/stream", changed, signal, (on) => live(on, on ? "live" : "reconnecting")));
}

class RolloutsPage {
  constructor(query, run, signal) {
    this.query = { ...query };
    this.run = run;
    this.signal = signal;
    this.filters = h("div", { class: "card" });
    this.count = h("span", { class: "soft", role: "status" });
    this.list = h("div");
    this.elements = [h("div", { class: "row spread" }, h("h1", {}, "Rollouts"), this.count), this.filters, this.list];
  }

  get groups() {
    return this.query.view === "groups";
  }

  async set(changes) {
    Object.assign(this.query, { offset: null }, changes);
    remember("rollouts", this.query);
    await this.read();
  }

  async read() {
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    const { view, run, ...wanted } = this.query;
    const path = this.groups ? "/api/dashboard/groups" : "/api/dashboard/rollouts";
    const size = this.groups ? 25 : PAGE;
    const began = performance.now();
    let found;
    try {
      found = await get(path, { ...wanted, run: this.run?.run_id, limit: size }, AbortSignal.any([reading.signal, this.signal]));
    } catch (error) {
      if (reading.signal.aborted) return;
      throw error;
    }
    const said = JSON.stringify(found);
    if (said !== this.said) this.draw(found, size);
    this.said = said;
    this.list.dataset.milliseconds = Math.round(performance.now() - began);
  }

  drawFilters() {
    const { states, reasons, agents, dialects, versions: known } = this.facets;
    const all = Object.values(states).reduce((a, b) => a + b, 0);
    const query = this.query;
    const select = (label, name, options) =>
      h("label", {}, label, h("select", { onchange: (event) => this.set({ [name]: event.target.value }) }, h("option", { value: "" }, "all"), options.map(([value, text]) => h("option", { value, selected: `${query[name] ?? ""}` === `${value}` }, text))));
    const typed = (name, attributes) => {
      let due = null;
      const input = (event) => {
        clearTimeout(due);
        due = setTimeout(() => this.set({ [name]: event.target.value }), TYPING);
      };
      return h("input", { value: query[name] ?? "", oninput: input, ...attributes });
    };
    const view = (name, text) => h("button", { "aria-pressed": `${(query.view ?? "") === name}`, onclick: () => this.set({ view: name, sort: "", descending: "" }).then(() => this.drawFilters()) }, text);
    const sort = h("select", { onchange: (event) => this.set({ sort: event.target.value }) }, (this.groups ? GROUP_SORTS : SORTS).map(([value, text]) => h("option", { value, selected: (query.sort || "created") === value }, text)));
    const direction = h("select", { "aria-label": "Direction", onchange: (event) => this.set({ descending: event.target.value }) }, h("option", { value: "true" }, "descending"), h("option", { value: "false", selected: query.descending === "false" }, "ascending"));
    const [low, high] = known;
    const range = low === null ? [] : Array.from({ length: Math.min(high - low + 1, 200) }, (_, i) => [high - i, versions(high - i, high - i)]);
    const active = ["state", "is_train", "task", "reward_min", "reward_max", "agent", "dialect", "version", "failure", "reason"].filter((name) => query[name]);
    const clear = () => this.set(Object.fromEntries(active.map((name) => [name, null]))).then(() => this.drawFilters());
    redraw(this.filters,
      h("div", { class: "filters" },
        h("label", { class: "wide" }, "Task or id contains", typed("task", { type: "search", placeholder: "text" })),
        select("State", "state", [["unfinished", "queued or running"], ...Object.entries(states).map(([state, n]) => [state, `${state} (${n.toLocaleString("en")})`])]),
        select("Kind", "is_train", [["true", "training"], ["false", "held-out"]]),
        h("label", {}, "Reward", h("span", { class: "pair" }, typed("reward_min", { type: "number", step: "any", placeholder: "from", "aria-label": "Reward from" }), typed("reward_max", { type: "number", step: "any", placeholder: "to", "aria-label": "Reward to" }))),
        agents.length > 0 && select("Agent", "agent", agents.map((a) => [a, a])),
        dialects.length > 0 && select("Dialect", "dialect", dialects.map((d) => [d, d])),
        range.length > 0 && select("Policy version", "version", range),
        reasons.length > 0 && select("Whose failure", "failure", [["agent", "the agent's"], ["infra", "the infrastructure's"]]),
        reasons.length > 0 && select("Reason of failure", "reason", reasons.map(([kind, reason, n]) => [reason ?? "", `${reason ?? "unknown"} (${n})`])),
        h("label", { class: "wide" }, "Sort by", h("span", { class: "pair" }, sort, direction)),
        h("div", { class: "row wide" }, h("div", { class: "segments", vars: { flex: "none" }, role: "group", "aria-label": "View" }, view("", "List"), view("groups", "Groups")), active.length > 0 && h("button", { class: "plain", onclick: clear }, "Clear")),
      ),
    );
    this.all = all;
  }

  draw({ total, items }, size) {
    const offset = Number(this.query.offset ?? 0);
    const what = this.groups ? "groups" : "rollouts";
    this.count.textContent = total ? `${(offset + 1).toLocaleString("en")}–${(offset + items.length).toLocaleString("en")} of ${total.toLocaleString("en")} ${what}` : "";
    if (!total) {
      say(`no ${what}`);
      const filtered = Object.entries(this.query).some(([name, value]) => value && !["run", "view", "sort", "descending", "offset"].includes(name));
      this.list.replaceChildren(filtered ? empty(`No ${what} like that`, "Loosen the filters, or clear them.") : empty(`No ${what} yet`, "They appear as soon as a trainer, or you, create them:", command("harnessrl train CONFIG.yaml")));
      return;
    }
    const turn = (to) => () => this.set({ offset: to || null }).then(() => (scrollTo(0, 0), this.list.querySelector("a")?.focus()));
    const pages = total > size && h("nav", { class: "row spread", "aria-label": "More rollouts" }, h("button", { disabled: offset === 0, onclick: turn(Math.max(0, offset - size)) }, "← Previous"), h("span", { class: "faint" }, `page ${Math.floor(offset / size) + 1} of ${Math.ceil(total / size)}`), h("button", { disabled: offset + size >= total, onclick: turn(offset + size) }, "Next →"));
    this.list.className = "stack";
    this.list.replaceChildren(card(null, null, this.groups ? this.groupTable(items) : this.table(items)), pages || "");
  }

  table(items) {
    const run = this.run?.run_id;
    const names = ["Task", "State", "Reward", "Calls", "Tokens", "Version", "Agent", "Took", "Started"];
    const numeric = new Set(["Reward", "Calls", "Tokens", "Version", "Took", "Started"]);
    const anyAgent = items.some((r) => r.agents.length);
    return h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, names.filter((n) => anyAgent || n !== "Agent").map((name) => h("th", { class: numeric.has(name) && "n", scope: "col" }, name)))),
      h("tbody", {}, items.map((r) => h("tr", {},
        h("td", { class: "text" }, h("a", { class: "clip", href: address("rollout", { run }, r.rollout_id) }, taskText(r.input)), h("span", { class: "faint clip mono", title: r.rollout_id }, r.error_message ? h("span", { class: "bad" }, r.error_message) : short(r.rollout_id))),
        h("td", {}, h("span", { class: "row" }, statePill(r.state), !r.is_train && h("span", { class: "pill" }, "held-out"))),
        h("td", { class: "n" }, rewardBar(r.reward)),
        h("td", { class: "n" }, number(r.calls)),
        h("td", { class: "n" }, number(r.sampled)),
        h("td", { class: "n" }, versions(r.version_min, r.version_max)),
        anyAgent && h("td", {}, r.agents.join(", ") || "–"),
        h("td", { class: "n" }, r.state === "queuing" ? "–" : seconds((r.state === "running" ? Date.now() / 1000 : r.updated_at) - r.created_at)),
        h("td", { class: "n faint" }, date(r.created_at)),
      )))));
  }

  groupTable(items) {
    const run = this.run?.run_id;
    return h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Task", "Rewards", "Mean", "Spread", "Started"].map((name, i) => h("th", { class: i > 1 && "n", scope: "col" }, name)))),
      h("tbody", {}, items.map(({ group_id, rollouts }) => {
        const rewards = rollouts.map((r) => r.reward).filter((r) => r !== null);
        const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
        return h("tr", {},
          h("td", { class: "text" }, h("a", { class: "clip", href: address("group", { run }, group_id) }, taskText(rollouts[0].input)), h("span", { class: "faint clip mono" }, short(group_id))),
          h("td", {}, cells(rollouts, run)),
          h("td", { class: "n" }, rewardBar(mean)),
          h("td", { class: "n" }, rewards.length ? number(Math.max(...rewards) - Math.min(...rewards)) : "–"),
          h("td", { class: "n faint" }, date(rollouts[0].created_at)));
      }))));
  }
}

export function rewardBar(reward) {
  if (reward === null || reward === undefined) return h("span", { class: "faint" }, "–");
  const share = Math.max(0, Math.min(1, reward));
  return h("span", { class: "reward" }, number(reward), h("span", { class: "bar", "aria-hidden": "true" }, h("div", { vars: { width: `${share * 100}%` } })));
}
