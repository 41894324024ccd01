// Elements and formats. Text only ever becomes a text node, so nothing that a model wrote can become markup.

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const pill = (text, kind = "", live = false) =>
  h("span", { class: `pill ${kind}` }, live && h("span", { class: "dot live" }), text);

export const card = (title, right, ...children) =>
  h("section", { class: "card" }, title && h("header", {}, h("h2", {}, title), right), ...children);

export const empty = (title, ...lines) =>
  h("div", { class: "card empty" }, h("h2", {}, title), ...lines.map((line) => (line instanceof Node ? line : h("p", {}, line))));

export const command = (text) => h("code", { class: "command" }, text);

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(1);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : digits });
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${number(value, 1)} ${unit}`;
    value /= 1000;
  }
  return `${number(value, 1)} TB`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const date = (at) => new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const ago = (at) => {
  const past = Date.now() / 1000 - at;
  return past < 2 ? "now" : `${seconds(Math.round(past)).replace(".0 s", " s")} ago`;
};

// A task in a line: the field that is most likely what a person would call it.
export function taskText(input) {
  if (typeof input === "string") return input;
  if (input && typeof input === "object") {
    for (const name of ["question", "prompt", "problem", "instruction", "task", "title", "input", "instance_id", "data_id"])
      if (typeof input[name] === "string") return input[name];
  }
  return JSON.stringify(input);
}

export const short = (id) => (id.length > 34 ? `…${id.slice(-33)}` : id);

const STATES = { queuing: ["queued", ""], running: ["running", "accent"], succeeded: ["succeeded", "good"], failed: ["failed", "bad"] };
export const statePill = (state) => pill(STATES[state]?.[0] ?? state, STATES[state]?.[1], state === "running");

// Policy versions count updates; each resumption starts another million.
export function version(value) {
  if (value === null || value === undefined) return "–";
  return value < 1e6 ? `${value}` : `${value % 1e6} (resumption ${Math.floor(value / 1e6)})`;
}
export const versions = (low, high) => (low === high ? version(low) : `${version(low)}–${version(high)}`);

// Draw `container` anew; what had the focus in it, by its place among what can have it, has it again.
export function redraw(container, ...children) {
  const all = () => [...container.querySelectorAll("a, button, select, input, summary")];
  const at = all().indexOf(document.activeElement);
  container.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (at >= 0) all()[at]?.focus();
}

export function say(text) {
  document.getElementById("status").textContent = text;
}

export async function copy(text, button) {
  await navigator.clipboard.writeText(text);
  const before = button.textContent;
  button.textContent = "copied";
  say("copied");
  setTimeout(() => (button.textContent = before), 1500);
}
