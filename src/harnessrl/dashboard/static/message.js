// Messages of a conversation in the gateway's canonical form.
import { h } from "./dom.js";

const LONG = 900; // characters, or
const TALL = 14; // lines, beyond which a text is folded

export function message(one, { answer = "", open = false } = {}) {
  const content = typeof one.content === "string" ? one.content : JSON.stringify(one.content, null, 2);
  const names = { system: "system", user: "user", assistant: answer || "assistant", tool: "tool result", prompt: "prompt" };
  return h("article", { class: `message ${one.role} ${answer ? "answer" : ""}` },
    h("div", { class: "who" }, names[one.role] ?? one.role, one.name && h("span", { class: "faint" }, one.name), one.tool_call_id && h("span", { class: "faint mono" }, one.tool_call_id)),
    one.reasoning_content && h("details", { open: one.reasoning_content.length < LONG }, h("summary", {}, "reasoning"), h("pre", { class: "reasoning" }, one.reasoning_content)),
    content && folded(content, open, one.role === "tool" ? "tool" : ""),
    (one.tool_calls ?? []).map((call) => h("div", { class: "tool" }, h("div", { class: "row" }, h("strong", { class: "mono" }, call.function.name), h("span", { class: "faint mono clip" }, call.id)), folded(pretty(call.function.arguments), open))),
    !content && !one.tool_calls && !one.reasoning_content && h("span", { class: "faint" }, "(empty)"),
  );
}

export function tools(list) {
  return list.length > 0 && h("details", { class: "message" }, h("summary", {}, `${list.length} tool${list.length > 1 ? "s" : ""} offered: ${list.map((t) => t.function.name).join(", ")}`), list.map((t) => h("div", { class: "tool" }, h("strong", { class: "mono" }, t.function.name), t.function.description && h("p", { class: "soft" }, t.function.description), folded(JSON.stringify(t.function.parameters, null, 2) ?? "", false))));
}

export function folded(text, open, kind = "") {
  const pre = h("pre", {}, text);
  const box = kind ? h("div", { class: kind }, pre) : pre;
  if (open || (text.length <= LONG && text.split("\n").length <= TALL)) return box;
  const outer = h("div", { class: "fold" }, box);
  const button = h("button", { class: "plain", "aria-expanded": "false", onclick: () => {
    const shut = outer.classList.toggle("fold");
    button.textContent = shut ? label : "Show less";
    button.setAttribute("aria-expanded", String(!shut));
  } });
  const label = `Show all ${text.length.toLocaleString("en")} characters`;
  button.textContent = label;
  return h("div", {}, outer, button);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
