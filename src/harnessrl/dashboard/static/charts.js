// Line charts in SVG: values by update, with confidence bands; read by pointer, by arrow keys, or as a table.
import { h, number, svg } from "./dom.js";

const HEIGHT = 190, LEFT = 44, RIGHT = 10, TOP = 10, BOTTOM = 24;

export class Chart {
  // series: [{name, second, whiskers, points: [[x, y, half]]}]; half: of the interval around y, if any
  constructor(title, { unit = "", log = false, zero = false, note = "" } = {}) {
    Object.assign(this, { title, unit, log, zero });
    this.now = h("span", { class: "now" });
    this.svg = svg("svg", { role: "img", tabindex: 0, height: HEIGHT });
    this.legend = h("div", { class: "legend" });
    this.element = h(
      "figure", { class: "card chart" },
      h("header", {}, h("h2", {}, title), h("span", { class: "soft", "aria-live": "polite" }, this.now)),
      h("div", { class: "plot" }, this.svg),
      this.legend, note && h("figcaption", { class: "faint" }, note),
    );
    this.element.style.margin = 0;
    this.series = [];
    this.picked = null;
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.pick(null));
    this.svg.addEventListener("blur", () => this.pick(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  set(series) {
    this.series = series.map((one) => ({ ...one, points: thin(one.points.filter(([, y]) => Number.isFinite(y) && (!this.log || y > 0))) }));
    this.xs = [...new Set(this.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
    if (this.picked !== null && !this.xs.includes(this.picked)) this.picked = null;
    this.legend.replaceChildren(
      ...(this.series.length > 1 ? this.series : []).map((one) =>
        h("span", {}, h("i", { class: `swatch line ${one.second ? "second" : ""}` }), one.name)),
    );
    this.svg.setAttribute("aria-label", `${this.title}: ${this.summary()}. Arrow keys read the values.`);
    this.draw();
  }

  summary() {
    const told = this.series.filter((one) => one.points.length).map((one) => {
      const first = one.points[0], last = one.points.at(-1);
      return `${one.name} ${number(last[1])} at update ${last[0]}, ${number(first[1])} at update ${first[0]}`;
    });
    return told.join("; ") || "nothing yet";
  }

  readout() {
    const at = this.picked;
    const parts = this.series.filter((one) => one.points.length).map((one) => {
      const point = at === null ? one.points.at(-1) : one.points.find(([x]) => x === at);
      if (!point) return null;
      const half = point[2] ? ` ± ${number(point[2], 2)}` : "";
      return `${this.series.length > 1 ? `${one.name} ` : ""}${number(point[1])}${half}${this.unit && ` ${this.unit}`}`;
    });
    return (at === null ? "" : `update ${at}: `) + parts.filter(Boolean).join(" · ");
  }

  pick(x) {
    if (x === this.picked) return;
    this.picked = x;
    this.draw();
  }

  point(event) {
    if (!this.xs?.length) return;
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const wanted = this.low + share * (this.high - this.low);
    this.pick(this.xs.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.pick(null);
    if (!step || !this.xs?.length) return;
    event.preventDefault();
    const at = this.picked === null ? (step > 0 ? -1 : this.xs.length) : this.xs.indexOf(this.picked);
    this.pick(this.xs[Math.max(0, Math.min(this.xs.length - 1, at + step))]);
  }

  draw() {
    this.now.textContent = this.readout();
    const width = this.svg.clientWidth;
    if (!width || !this.series) return;
    const points = this.series.flatMap((one) => one.points);
    if (!points.length) {
      const text = svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet");
      this.svg.replaceChildren(text);
      return;
    }
    const scaled = this.log ? Math.log10 : (y) => y;
    let bottom = Math.min(...points.map(([, y, half]) => scaled(this.log ? y : y - (half ?? 0))));
    let top = Math.max(...points.map(([, y, half]) => scaled(this.log ? y : y + (half ?? 0))));
    if (this.zero) bottom = Math.min(0, bottom);
    if (this.zero && top === 0) top = 1;
    if (top - bottom < 1e-12) [bottom, top] = this.log ? [bottom - 1, top + 1] : [bottom - Math.abs(bottom || 1) * 0.1, top + Math.abs(top || 1) * 0.1];
    const ticks = this.log ? decades(bottom, top) : nice(bottom, top);
    if (!this.log) [bottom, top] = [Math.min(bottom, ticks[0]), Math.max(top, ticks.at(-1))];
    this.low = this.xs[0];
    this.high = Math.max(this.xs.at(-1), this.low + 1);
    const X = (x) => LEFT + ((x - this.low) / (this.high - this.low)) * (width - LEFT - RIGHT);
    const Y = (y) => HEIGHT - BOTTOM - ((scaled(y) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    const parts = ticks.map((tick) => {
      const y = Y(this.log ? 10 ** tick : tick);
      return [
        svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.log ? `1e${tick}` : number(tick, 4)),
      ];
    });
    for (const x of whole(this.low, this.high, width / 70)) parts.push(svg("text", { x: X(x), y: HEIGHT - 6, "text-anchor": "middle" }, `${x}`));
    for (const one of this.series) parts.push(...this.shape(one, X, Y));
    if (this.picked !== null) {
      parts.push(svg("line", { class: "cursor", x1: X(this.picked), x2: X(this.picked), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.replaceChildren(...parts.flat());
  }

  shape(one, X, Y) {
    const kind = one.second ? "second" : "";
    const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
    const parts = [];
    const banded = one.points.filter(([, , half]) => half);
    if (one.whiskers) {
      for (const [x, y, half] of banded) parts.push(svg("line", { class: "whisker", x1: X(x), x2: X(x), y1: Y(y - half), y2: Y(y + half) }));
    } else if (banded.length > 1) {
      const up = banded.map(([x, y, half]) => [x, y + half]);
      const down = banded.map(([x, y, half]) => [x, y - half]).reverse();
      parts.push(svg("path", { class: `band ${kind}`, d: `${path(up)}${path(down).replace("M", "L")}Z` }));
    }
    parts.push(svg("path", { class: `series ${kind}`, d: path(one.points) }));
    for (const [x, y] of one.points) {
      if (one.second || one.points.length === 1 || x === this.picked) parts.push(svg("circle", { class: `point ${kind}`, cx: X(x), cy: Y(y), r: 3.5 }));
    }
    return parts;
  }
}

const MOST_POINTS = 600;

function thin(points) {
  const step = Math.ceil(points.length / MOST_POINTS);
  return step < 2 ? points : points.filter((_, i) => i % step === 0 || i === points.length - 1);
}

function nice(low, high, count = 4) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function decades(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 4));
  const ticks = [];
  for (let tick = Math.ceil(low); tick <= high; tick += step) ticks.push(tick);
  return ticks.length ? ticks : [Math.round((low + high) / 2)];
}

function whole(low, high, most) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find((s) => (high - low) / s <= Math.max(2, most)) ?? 50000;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}
