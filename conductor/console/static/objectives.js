// How the objectives were met over time, and what was served, refused and reused meanwhile.

import { h, text } from "./dom.js";
import { Chart } from "./chart.js";
import { duration, goal, percent, rate } from "./format.js";

const SPANS = [[300, "5 minutes"], [3600, "1 hour"], [21600, "6 hours"]];

export function objectivesView(root, { feed }) {
  let stepS = 5;
  const perStep = (value, point) => value / Math.min(stepS, Math.max(point.age_s, 1));
  const perSecond = (value) => (value === null ? "–" : `${rate(value)}/s`);
  const charts = [
    new Chart("Time to first token", [["p50", (p) => p.ttft_p50_ms], ["p90", (p) => p.ttft_p90_ms], ["p99", (p) => p.ttft_p99_ms]], { format: duration, objective: "ttft_ms" }),
    new Chart("Time between tokens", [["p50", (p) => p.tbt_p50_ms], ["p90", (p) => p.tbt_p90_ms], ["p99", (p) => p.tbt_p99_ms]], { format: duration, objective: "tbt_ms" }),
    new Chart("Requests that meet their objectives", [["TTFT", (p) => p.ttft_attainment], ["TBT", (p) => p.tbt_attainment], ["all", (p) => p.goodput_share]], { format: percent, most: 1 }),
    new Chart("Requests and goodput", [["ended", (p) => p.requests_per_s], ["good", (p) => p.goodput_per_s]], { format: perSecond }),
    new Chart("Refused and failed", [["refused", (p) => perStep(p.refused, p)], ["failed", (p) => perStep(p.ended.failed ?? 0, p)], ["client left", (p) => perStep(p.ended.cancelled ?? 0, p)]], { format: perSecond }),
    new Chart("Prompt tokens reused", [["planned", (p) => p.token_reuse_planned], ["as engines say", (p) => p.token_reuse_reported]], { format: percent, most: 1 }),
  ];
  const span = h("select", { "aria-label": "How far back", onchange: () => live.turn(path()) }, SPANS.map(([value, name]) => h("option", { value }, name)));
  const path = () => `v1/cluster/history?span_s=${span.value}`;
  const note = h("span", { class: "soft" });
  root.append(h("div", { class: "head" }, h("h2", {}, "Objectives"), note, h("div", { class: "controls" }, span)), h("div", { class: "charts" }, charts.map((chart) => chart.element)));

  const live = feed(path(), 5000, (history) => {
    stepS = history.step_s;
    text(note, `TTFT ${goal(history.objectives.ttft_ms)}, TBT ${goal(history.objectives.tbt_ms)}; in steps of ${goal(stepS * 1000)}`);
    const points = history.points;
    const young = points.at(-1).age_s < stepS / 2;  // too little has ended in it to say how many do
    for (const chart of charts) chart.draw(young ? points.slice(0, -1) : points, history);
  });
  return {};
}
