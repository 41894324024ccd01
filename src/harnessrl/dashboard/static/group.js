// The rollouts of one task side by side: what the reward compares.
import { address } from "./app.js";
import { get } from "./api.js";
import { card, empty, h, number, pill, seconds, statePill, taskText } from "./dom.js";
import { message } from "./message.js";

const MOST = 16;

export async function showGroup(main, { id, signal }) {
  const { items } = await get("/api/dashboard/groups", { group: id }, signal);
  if (!items.length) {
    main.replaceChildren(empty("No such group", "It may have been removed, or never started.", h("a", { href: "#/rollouts?view=groups" }, "All groups")));
    return;
  }
  const { rollouts } = items[0];
  const shown = rollouts.slice(0, MOST);
  const traces = await Promise.all(shown.map((r) => get(`/api/dashboard/rollouts/${encodeURIComponent(r.rollout_id)}`, {}, signal)));
  const rewards = rollouts.map((r) => r.reward).filter((r) => r !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const run = traces[0].run_id;
  main.replaceChildren(
    h("header", { class: "card stack" },
      h("h1", {}, taskText(rollouts[0].input)),
      h("div", { class: "row" }, pill(`${rollouts.length} rollouts`), rewards.length > 0 && pill(`mean reward ${number(mean)}`, "accent"), rewards.length > 0 && pill(`spread ${number(Math.max(...rewards) - Math.min(...rewards))}`), !rollouts[0].is_train && pill("held-out"), h("span", { class: "faint mono" }, id)),
      traces[0].skipped && h("p", { class: "notice" }, "All rewards are equal, so all advantages are zero: the update leaves this group out."),
      rollouts.length > MOST && h("p", { class: "faint" }, `The first ${MOST} of ${rollouts.length}.`)),
    h("div", { class: "columns", tabindex: 0, role: "region", "aria-label": "Rollouts of the group" }, traces.map((trace, i) => column(trace, shown[i], run))),
  );
}

function column(trace, rollout, run) {
  const { calls, pool } = trace;
  const advantages = [...new Set(calls.map((call) => call.advantage).filter((a) => a !== null))];
  const said = calls.flatMap((call) => [
    ...call.messages.filter((place) => pool[place].role === "tool" || pool[place].role === "user").slice(-1).map((place) => message(pool[place])),
    ...call.answer.map((place) => message(pool[place], { answer: "assistant" })),
  ]);
  return card(
    null, null,
    h("div", { class: "row spread" }, h("a", { href: address("rollout", { run }, rollout.rollout_id) }, `Rollout ${rollout.rollout_id.split("-").at(-1)}`), statePill(rollout.state)),
    h("div", { class: "tiles-line row" }, h("strong", {}, `reward ${number(rollout.reward)}`), advantages.length > 0 && h("span", { class: advantages[0] < 0 ? "bad" : "good" }, `advantage ${advantages.map((a) => number(a)).join(", ")}`), h("span", { class: "faint" }, `${calls.length} calls, ${seconds(rollout.updated_at - rollout.created_at)}`)),
    trace.failure && h("p", { class: "notice bad" }, trace.failure),
    h("div", {}, said.length ? said : h("p", { class: "soft" }, "No model call.")),
  );
}
