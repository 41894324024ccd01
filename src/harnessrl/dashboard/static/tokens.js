// A row of tokens as the trainer takes it, coloured by what is asked.
import { h, number, version } from "./dom.js";

const BLOCK = 300; // tokens, after which a new line begins a block that is laid out only when it is seen

export const COLOURS = [["mask", "Loss mask"], ["logprob", "Log-probability"], ["version", "Policy version"], ["advantage", "Advantage"]];

// Tokens of the whole context of call `i`: {text, id, by: call that sampled it or null, at: its place there}.
export function contextOf(calls, i) {
  const call = calls[i];
  const before = call.noted_parent < 0 ? [] : contextOf(calls, call.noted_parent).slice(0, call.shared);
  const part = ({ ids, texts }, by) => ids.map((id, at) => ({ id, text: texts?.[at] ?? null, by, at }));
  return [...before, ...part(call.prompt, null), ...part(call.sampled, i)];
}

export class Tokens {
  constructor() {
    this.box = h("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": "Tokens of the row. Arrow keys move from token to token." });
    this.detail = h("p", { class: "soft", "aria-live": "polite" });
    this.legend = h("div", { class: "legend" });
    this.element = h("div", { class: "stack" }, this.legend, this.box, this.detail);
    this.box.addEventListener("click", (event) => event.target.dataset.at && this.pick(Number(event.target.dataset.at)));
    this.box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.pick(Math.max(0, Math.min(this.tokens.length - 1, (this.picked ?? -1) + step)));
    });
  }

  // trained: calls (by index) whose tokens this row trains
  show(calls, tokens, trained, colour, versions) {
    Object.assign(this, { calls, tokens, trained, colour, versions, picked: null });
    const largest = Math.max(1e-9, ...calls.map((call) => Math.abs(call.advantage ?? 0)));
    this.runs = calls.map((call) => call.versions.flatMap(([v, n]) => Array(n).fill(v)));
    const spans = tokens.map((token, at) => this.span(token, at, largest));
    const blocks = [[]];
    spans.forEach((span, i) => {
      blocks.at(-1).push(span);
      if (blocks.at(-1).length >= BLOCK && tokens[i].text?.endsWith("\n")) blocks.push([]);
    });
    this.box.replaceChildren(...blocks.map((block) => h("div", {}, block)));
    this.legend.replaceChildren(...this.explain(largest));
    this.detail.textContent = tokens.some((token) => token.text === null)
      ? "Only ids: the tokenizer that this gateway rendered with is not here."
      : "Choose a token to see what is known of it.";
  }

  span(token, at, largest) {
    const call = token.by === null ? null : this.calls[token.by];
    const classes = [call ? "" : "context"], vars = {};
    const scaled = (hue, share) => (classes.push("scaled"), Object.assign(vars, { "--hue": `var(--${hue})`, "--share": Math.round(share) }));
    if (call && this.colour === "mask") classes.push(this.trained.has(token.by) ? "trained" : "untrained");
    if (call && this.colour === "logprob" && call.logprobs) scaled("bad", 70 * (1 - Math.exp(call.logprobs[token.at])));
    if (call && this.colour === "version") {
      const [low, high] = this.versions;
      scaled("accent", 15 + (55 * (this.runs[token.by][token.at] - low)) / Math.max(1, high - low));
    }
    if (call && this.colour === "advantage" && this.trained.has(token.by) && call.advantage !== null) scaled(call.advantage < 0 ? "bad" : "good", (8 + 52 * Math.abs(call.advantage)) / largest);
    return h("span", { class: classes.join(" "), "data-at": at, vars }, token.text === null ? `${token.id} ` : visible(token.text));
  }

  explain(largest) {
    const box = (name, text, vars) => h("span", {}, h("i", { class: `swatch ${name}`, vars }), text);
    const mix = (hue, share) => ({ background: `color-mix(in srgb, var(--${hue}) ${share}%, var(--card))` });
    const scale = (hue, low, high, from, to) => h("span", {}, from, h("i", { class: "scale", vars: { background: `linear-gradient(90deg, color-mix(in srgb, var(--${hue}) ${low}%, var(--card)), color-mix(in srgb, var(--${hue}) ${high}%, var(--card)))` } }), to);
    const [low, high] = this.versions;
    switch (this.colour) {
      case "mask": return [box("", "trained in this row", mix("accent", 34)), box("", "sampled, not trained here", { background: "repeating-linear-gradient(135deg, var(--line-strong) 0 3px, transparent 3px 6px)" }), h("span", { class: "faint" }, "grey text: context")];
      case "logprob": return this.calls.some((call) => call.logprobs) ? [scale("bad", 0, 70, "likely", "unlikely when sampled")] : [h("span", {}, "The engine gave no log-probabilities for these calls.")];
      case "version": return low === high ? [box("", `all sampled by version ${version(low)}`, mix("accent", 15))] : [scale("accent", 15, 70, `version ${version(low)}`, version(high))];
      default: return this.calls.some((call) => call.advantage !== null) ? [box("", `good, up to ${number(largest)}`, mix("good", 60)), box("", `bad, down to ${number(-largest)}`, mix("bad", 60))] : [h("span", {}, "No advantage: the group is not complete, is held-out, or a critic decides.")];
    }
  }

  pick(at) {
    this.box.querySelector(".picked")?.classList.remove("picked");
    const span = this.box.querySelector(`[data-at="${at}"]`);
    this.picked = at;
    span.classList.add("picked");
    span.scrollIntoView({ block: "nearest" });
    const token = this.tokens[at], call = token.by === null ? null : this.calls[token.by];
    const logprob = call?.logprobs?.[token.at];
    const facts = [`token ${at + 1} of ${this.tokens.length}`, `id ${token.id}`, token.text !== null && JSON.stringify(token.text)];
    if (call) {
      facts.push(`sampled in call ${call.index + 1}`, logprob !== undefined && `log-probability ${number(logprob)} (${number(100 * Math.exp(logprob), 1)} %)`, `version ${version(this.runs[token.by][token.at])}`);
      facts.push(this.trained.has(token.by) ? "trained in this row" : "not trained here", this.trained.has(token.by) && call.advantage !== null && `advantage ${number(call.advantage)}`);
    } else facts.push("context");
    this.detail.textContent = facts.filter(Boolean).join(" · ");
  }
}

function visible(text) {
  if (text === "") return h("i", { class: "white" }, "·");
  if (!text.includes("\n")) return text;
  return text.split("\n").flatMap((part, i) => (i ? [h("i", { class: "white", "aria-hidden": "true" }, "↵"), "\n", part] : [part]));
}
