// Lines over time, drawn as SVG: an axis that starts at zero, an objective where there is one, and the figures under
// the pointer.

import { h, svg, text } from "./dom.js";

const HEIGHT = 190;
const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;

export class Chart {
  constructor(title, series, { format, most, objective } = {}) {
    this.series = series;  // [name, value of a point]
    this.format = format;
    this.most = most;
    this.objective = objective;
    this.drawing = svg("svg", { role: "img", "aria-label": title });
    this.values = series.map(() => h("b", {}));
    this.when = h("span", {});
    const key = h("div", { class: "key" }, series.map(([name], i) => h("span", {}, h("i", { class: `swatch s${i + 1}` }), `${name} `, this.values[i])));
    this.element = h("figure", { class: "panel chart" }, h("figcaption", {}, h("h3", {}, title), key), this.drawing);
    this.title = title;
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.latest());
    new ResizeObserver(() => { if (this.points) this.draw(this.points, this.history); }).observe(this.drawing);
  }

  draw(points, history) {
    const { step_s: stepS, objectives } = history;
    this.points = points;
    this.history = history;
    this.right = Math.max(this.drawing.clientWidth, 240) - RIGHT;
    this.drawing.setAttribute("viewBox", `0 0 ${this.right + RIGHT} ${HEIGHT}`);
    const objective = this.objective ? objectives[this.objective] : null;
    const values = points.flatMap((point) => this.series.map(([, value]) => value(point))).filter((value) => value !== null);
    let most = this.most ?? ceiling(Math.max(0, ...values));
    const far = objective !== null && objective > most * 4;  // it would press all lines to the ground
    if (objective !== null && !far && !this.most) most = ceiling(Math.max(most, objective * 1.05));
    this.x = (i) => LEFT + (points.length > 1 ? (i / (points.length - 1)) * (this.right - LEFT) : 0);
    this.y = (value) => TOP + (1 - Math.min(value, most) / most) * (HEIGHT - TOP - BOTTOM);
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((share) => [
      svg("line", { class: "grid", x1: LEFT, x2: this.right, y1: this.y(share * most), y2: this.y(share * most) }),
      svg("text", { x: LEFT - 8, y: this.y(share * most) + 4, "text-anchor": "end" }, this.format(share * most)),
    ]);
    const times = [0, 0.5, 1].map((share) => svg("text", {
      x: LEFT + share * (this.right - LEFT), y: HEIGHT - 5, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle",
    }, ago((1 - share) * (points.length - 1) * stepS)));
    const line = objective === null ? [] : far
      ? [svg("text", { class: "objective-name", x: this.right, y: TOP + 12, "text-anchor": "end" }, `objective ${this.format(objective)}, above`)]
      : [svg("line", { class: "objective", x1: LEFT, x2: this.right, y1: this.y(objective), y2: this.y(objective) }),
        svg("text", { class: "objective-name", x: this.right, y: this.y(objective) - 4, "text-anchor": "end" }, `objective ${this.format(objective)}`)];
    this.drawing.replaceChildren(...grid.flat(), ...times, this.cursor, ...line, ...this.series.flatMap(([, value], i) => this.path(points.map(value), i)));
    this.latest();
  }

  // One line, broken where nothing is known; a point that stands alone is a dot.
  path(values, number) {
    const lines = [];
    let run = [];
    const end = () => {
      if (run.length === 1) lines.push(svg("path", { class: `dot s${number + 1}`, d: `M${run[0]}h0.01` }));
      else if (run.length) lines.push(svg("path", { class: `line s${number + 1}`, d: `M${run.join("L")}` }));
      run = [];
    };
    values.forEach((value, i) => {
      if (value === null) end();
      else run.push(`${this.x(i).toFixed(1)},${this.y(value).toFixed(1)}`);
    });
    end();
    return lines;
  }

  point(event) {
    if (!this.points) return;
    const box = this.drawing.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (this.right - LEFT);
    const i = Math.max(0, Math.min(this.points.length - 1, Math.round(share * (this.points.length - 1))));
    this.cursor.setAttribute("x1", this.x(i));
    this.cursor.setAttribute("x2", this.x(i));
    this.cursor.setAttribute("visibility", "visible");
    this.show(this.points[i]);
  }

  // The newest step of which anything is known.
  latest() {
    if (!this.points) return;
    this.cursor.setAttribute("visibility", "hidden");
    const known = (point) => this.series.some(([, value]) => value(point) !== null);
    this.show(this.points.findLast(known) ?? this.points.at(-1));
  }

  show(point) {
    this.series.forEach(([, value], i) => text(this.values[i], this.format(value(point))));
    const told = this.series.map(([name, value]) => `${name} ${this.format(value(point))}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.title}: ${told}, ${ago(point.age_s)}`);
  }
}

function ceiling(value) {
  if (value <= 0) return 1;
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 8, 10].find((step) => step * scale >= value) * scale;
}

function ago(seconds) {
  if (seconds < 3) return "now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  const minutes = seconds / 60;
  if (minutes < 120) return `${minutes < 10 ? Math.round(minutes * 2) / 2 : Math.round(minutes)} min ago`;
  return `${Math.round(minutes / 60)} h ago`;
}
