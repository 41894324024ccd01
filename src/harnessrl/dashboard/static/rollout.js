// One rollout: what its harness saw, beside what the trainer takes from it.
import { address, go } from "./app.js";
import { every, get } from "./api.js";
import { card, clock, copy, date, h, number, pill, redraw, seconds, short, statePill, taskText, version } from "./dom.js";
import { message, tools } from "./message.js";
import { COLOURS, Tokens, contextOf } from "./tokens.js";

export async function showRollout(main, { id, query, signal, background }) {
  const path = `/api/dashboard/rollouts/${encodeURIComponent(id)}`;
  const page = new RolloutPage(await get(path, { attempt: query.attempt }, signal), query);
  main.replaceChildren(page.element);
  const ended = () => ["succeeded", "failed"].includes(page.data.rollout.status.state);
  if (ended()) return;
  const refresh = async () => {
    const data = ended() ? page.data : await get(path, { attempt: query.attempt }, signal);
    if (data.calls.length !== page.data.calls.length || data.rollout.status.version !== page.data.rollout.status.version) page.renew(data);
  };
  background(every(2, refresh, signal, () => {}));
}

class RolloutPage {
  constructor(data, query) {
    this.query = query;
    this.element = h("div", { class: "stack", vars: { gap: "var(--gap)" } });
    this.tokens = new Tokens();
    this.colour = "mask";
    this.renew(data);
  }

  renew(data) {
    const following = this.call === undefined || this.call === this.data.calls.length - 1;
    this.data = data;
    if (following) this.call = data.calls.length - 1;
    this.tree = h("ul", { class: "tree" });
    this.conversation = h("div");
    this.rowChoice = h("div", { class: "row" });
    this.colours = h("div", { class: "segments", role: "group", "aria-label": "Colour tokens by" });
    const { calls } = data;
    this.element.replaceChildren(
      this.header(),
      calls.length ? h("div", { class: "rollout" },
        h("section", { class: "card stick" }, h("header", {}, h("h2", {}, "Calls"), h("span", { class: "faint" }, `${calls.length}`)), this.tree),
        h("section", { class: "card" }, h("header", {}, h("h2", {}, "As the harness saw it"), h("button", { onclick: (event) => copy(this.curl(), event.target) }, "Copy as cURL")), this.conversation),
        h("section", { class: "card stick" }, h("header", {}, h("h2", {}, "As the trainer takes it"), this.rowChoice), this.colours, this.tokens.element),
      ) : h("div", { class: "card empty" }, h("h2", {}, "No model call was captured"), h("p", {}, data.rollout.status.state === "queuing" ? "It waits for a controller to start its agent: is `harnessrl controller` running, and free?" : "The harness has not called the model. Does it use the base URL that it is given in OPENAI_BASE_URL or ANTHROPIC_BASE_URL? Its log, below, may say more.")),
      this.rows(), this.happened(), this.log(),
    );
    if (calls.length) this.choose(this.call);
  }

  header() {
    const { rollout, reward, failure, attempts, attempt_id, run_id } = this.data;
    const { status, metadata, input } = rollout;
    const attempt = attempts.length > 1 && h("label", { class: "row faint" }, "attempt", h("select", { onchange: (event) => go("rollout", { ...this.query, attempt: event.target.value }, rollout.rollout_id) }, attempts.map((a) => h("option", { value: a, selected: a === attempt_id }, a))));
    const group = metadata.group_id && h("a", { href: address("group", { run: run_id }, metadata.group_id) }, "its group, side by side");
    return h("header", { class: "card stack" },
      h("div", { class: "title" }, h("h1", {}, taskText(input)), h("div", { class: "row" }, attempt, h("button", { onclick: () => this.download() }, "Download JSON"))),
      h("div", { class: "row" }, statePill(status.state), !rollout.is_train && pill("held-out"), reward !== null && pill(`reward ${number(reward)}`, "accent"), h("span", { class: "faint mono" }, short(rollout.rollout_id)), h("span", { class: "faint" }, date(status.created_at), status.state !== "queuing" && `, took ${seconds(status.updated_at - status.created_at)}`, status.held_seconds && `, of which held ${seconds(status.held_seconds)}`), group),
      failure && h("p", { class: "notice bad" }, h("strong", {}, status.failure_kind === "infra" ? "The infrastructure failed: " : "Failed: "), failure),
      h("details", {}, h("summary", {}, "Task and configuration"), h("pre", {}, JSON.stringify({ input, metadata, config: rollout.config }, null, 2))),
    );
  }

  // Depth grows only where a context has several continuations, so a long conversation stays a straight line.
  drawTree() {
    const { calls } = this.data;
    const children = calls.map((_, i) => calls.flatMap((call, j) => (call.parent === i ? [j] : [])));
    const roots = calls.flatMap((call, i) => (call.parent < 0 ? [i] : []));
    const items = [];
    const walk = (i, depth) => {
      const call = calls[i], forked = /^rendered\((.*)\)$/.exec(call.continuity)?.[1];
      if (forked || (call.parent < 0 && i !== roots[0])) {
        const [other, shared] = call.common;
        items.push(h("li", { class: "fork", vars: { "padding-left": `${8 + depth * 14}px` } }, `Fork: ${forked ? call.continuity : "a context of its own"}`, other >= 0 && h("div", { class: "faint" }, `shares ${shared} tokens with call ${other + 1}`)));
      }
      const sampled = call.sampled.ids.length, flags = [!call.delivered && "not delivered", call.error && "error", call.finish_reason === "length" && "cut by its limit"].filter(Boolean);
      items.push(h("li", { class: call.row === null ? "off" : "", vars: { "padding-left": `${depth * 14}px` } },
        h("button", { "aria-current": i === this.call && "true", onclick: () => this.choose(i), title: call.why_not ? `not trained: ${call.why_not}` : `trained in row ${call.row + 1}` },
          h("span", {}, `Call ${call.index + 1}${call.agent ? ` · ${call.agent}` : ""}`), h("span", { class: "faint" }, `${call.continuity === "exact" ? "continues, " : ""}${sampled} tokens, ${seconds(call.latency_ms / 1000)}`), flags.length > 0 && h("span", { class: "warn" }, flags.join(", ")))));
      children[i].forEach((child, k) => walk(child, depth + (k < children[i].length - 1 ? 1 : 0)));
    };
    for (const root of roots) walk(root, 0);
    redraw(this.tree, items);
  }

  choose(i) {
    this.call = i;
    const { calls, rows } = this.data, call = calls[i];
    this.row = call.row;
    this.drawTree();
    this.drawConversation(call);
    redraw(this.rowChoice, rows.length > 0 ? h("select", { "aria-label": "Row", onchange: (event) => this.chooseRow(event.target.value) },
      call.row === null && h("option", { value: "", selected: true }, `call ${i + 1}, not trained`),
      rows.map((row, r) => h("option", { value: r, selected: r === call.row }, `row ${r + 1} of ${rows.length}`))) : h("span", { class: "faint" }, call.why_not));
    redraw(this.colours, COLOURS.map(([name, text]) => h("button", { "aria-pressed": `${name === this.colour}`, onclick: () => ((this.colour = name), this.choose(this.call)) }, text)));
    this.drawTokens();
  }

  chooseRow(value) {
    if (value !== "") this.choose(this.data.rows[Number(value)].leaf);
  }

  drawTokens() {
    const { calls, rows } = this.data, row = this.row === null ? null : rows[this.row];
    const tokens = contextOf(calls, row ? row.leaf : this.call);
    const known = calls.flatMap((call) => call.versions.map(([v]) => v));
    this.tokens.show(calls, tokens, new Set(row?.calls ?? []), this.colour, known.length ? [Math.min(...known), Math.max(...known)] : [0, 0]);
  }

  drawConversation(call) {
    const { pool } = this.data, of = (places) => places.map((place) => pool[place]);
    const facts = [call.dialect, call.model, call.agent && `agent ${call.agent}`, `temperature ${number(call.temperature)}`, call.finish_reason && `ended by ${call.finish_reason}`, call.held_ms > 0 && `held ${seconds(call.held_ms / 1000)}`, call.http_status !== 200 && `status ${call.http_status}`];
    const before = of(call.messages);
    this.conversation.replaceChildren(
      h("p", { class: "faint", vars: { "margin-bottom": "10px" } }, facts.filter(Boolean).join(" · ")),
      call.notes.length > 0 ? h("p", { class: "faint" }, `Overridden: ${call.notes.join("; ")}`) : "",
      tools(of(call.tools)) || "",
      ...before.map((one) => message(one)),
      ...of(call.answer).map((one) => message(one, { answer: "assistant · the answer of this call" })),
      call.response !== null ? h("details", { class: "message", open: !call.error }, h("summary", {}, "The response as it is"), h("pre", { class: "mono" }, JSON.stringify(pool[call.response], null, 2))) : "",
      call.error ? h("p", { class: "notice bad" }, call.error.message ?? JSON.stringify(call.error)) : "",
    );
    this.conversation.querySelectorAll(":scope > p + .message").forEach((one) => one.style.setProperty("border-top", "0"));
  }

  rows() {
    const { rows, calls, dropped, unusable, skipped } = this.data;
    if (!calls.length) return "";
    const notes = Object.entries(dropped).map(([reason, n]) => `${n} sampled tokens are not trained: ${reason.replaceAll("_", " ")}`);
    return card("Rows that come of it", h("span", { class: "faint" }, `${rows.length}`),
      unusable && h("p", { class: "notice" }, `Nothing of this rollout is trained: ${unusable}`),
      skipped && h("p", { class: "notice" }, "All rewards of its group are equal, so its advantages are zero: the update leaves it out."),
      rows.length > 0 && h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, ["Row", "Trains calls", "Tokens", "Trained", "Advantage"].map((name, i) => h("th", { class: i > 1 && "n", scope: "col" }, name)))),
        h("tbody", {}, rows.map((row, r) => {
          const values = [...new Set(row.calls.map((i) => calls[i].advantage))].filter((a) => a !== null);
          return h("tr", {}, h("td", {}, h("button", { class: "plain", onclick: () => this.chooseRow(r) }, `row ${r + 1}`)), h("td", {}, row.calls.map((i) => i + 1).join(", ")), h("td", { class: "n" }, number(row.tokens)), h("td", { class: "n" }, number(row.trained_tokens)), h("td", { class: "n" }, values.map((a) => number(a)).join(", ") || "–"));
        })))),
      notes.map((note) => h("p", { class: "soft" }, note)));
  }

  happened() {
    const { events } = this.data;
    if (!events.length) return "";
    return card("Events", null, h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, events.map((event) => h("tr", {}, h("td", { class: "faint" }, clock(event.timestamp)), h("td", {}, event.event_type), h("td", {}, h("pre", {}, JSON.stringify(event.data)))))))));
  }

  log() {
    const { logs, rollout } = this.data, state = rollout.status.state;
    const running = ["queuing", "running"].includes(state);
    return card("The harness's log", logs[0]?.data.path && h("span", { class: "faint mono clip" }, `${logs[0].data.host}: ${logs[0].data.path}`),
      logs.length ? logs.map((event) => h("pre", { class: "log mono", tabindex: 0 }, String(event.data.text ?? ""))) : h("p", { class: "soft" }, running ? "It comes when the harness ends." : "It wrote nothing."));
  }

  curl() {
    const { calls, pool } = this.data, call = calls[this.call];
    const body = Object.fromEntries(Object.entries(call.request).map(([name, at]) => [name, Array.isArray(at) ? at.map((place) => pool[place]) : pool[at]]));
    const paths = { openai_chat: "/chat/completions", openai_completions: "/completions", openai_responses: "/responses" };
    const [url, auth] = call.dialect === "anthropic_messages" ? ["$ANTHROPIC_BASE_URL/v1/messages", "x-api-key: $ANTHROPIC_API_KEY"] : [`$OPENAI_BASE_URL${paths[call.dialect]}`, "authorization: Bearer $OPENAI_API_KEY"];
    return `curl "${url}" -H "${auth}" -H "content-type: application/json" -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  }

  async download() {
    const id = this.data.rollout.rollout_id, path = `/api/rollouts/${encodeURIComponent(id)}`;
    const [detail, events, calls] = await Promise.all([get(path), get(`${path}/events`), get(`${path}/calls`)]);
    const link = h("a", { href: URL.createObjectURL(new Blob([JSON.stringify({ ...detail, events, calls }, null, 1)], { type: "application/json" })), download: `${id}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}
