"use strict";
// Draws the charts that lie in the page as JSON, in the colours of its style sheet, for the runs that are chosen.

const charts = JSON.parse(document.getElementById("charts").textContent);
const runButtons = [...document.querySelectorAll("button[data-run]")];
const choiceButtons = [...document.querySelectorAll("button[data-choice]")];
const shown = new Set(runButtons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => Number(b.dataset.run)));
const runsAreChosen = runButtons.length > 0;
let choice = "p95";

function coloured(value, style) {
  if (typeof value === "string") {
    const named = /^var\((--[\w-]+)\)$/.exec(value);
    return named ? style.getPropertyValue(named[1]).trim() : value;
  }
  if (Array.isArray(value)) {
    return typeof value.at(-1) === "number" ? value : value.map((each) => coloured(each, style));
  }
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, style)]));
  }
  return value;
}

function chosenTrace(trace) {
  const meta = trace.meta;
  if (!meta || !runsAreChosen) return trace;
  if (meta.by_run) {
    const kept = { ...trace };
    for (const key of ["x", "y", "customdata"]) {
      if (trace[key]) kept[key] = trace[key].filter((_, run) => shown.has(run));
    }
    return kept;
  }
  return { ...trace, visible: shown.has(meta.run) && (!meta.choice || meta.choice === choice) };
}

function axis(own, style) {
  return {
    automargin: true,
    zeroline: false,
    gridcolor: style.getPropertyValue("--grid").trim(),
    linecolor: style.getPropertyValue("--rule").trim(),
    tickcolor: style.getPropertyValue("--rule").trim(),
    ...own,
    title: { standoff: 8, ...own.title, font: { size: 12, color: style.getPropertyValue("--soft").trim() } },
  };
}

function layoutOf(figure, style) {
  const ink = style.getPropertyValue("--ink").trim();
  const soft = style.getPropertyValue("--soft").trim();
  const card = style.getPropertyValue("--card").trim();
  const family = getComputedStyle(document.body).fontFamily;
  const layout = coloured(figure.layout, style);
  const themed = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family, size: 12, color: soft },
    hoverlabel: { bgcolor: card, bordercolor: style.getPropertyValue("--rule").trim(), font: { family, size: 12, color: ink } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--rule").trim(), activecolor: soft },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal" },
    showlegend: false,
    hovermode: "closest",
    ...layout,
    margin: { t: 12, r: 14, b: 44, l: 52, ...layout.margin },
  };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis/.test(key)) themed[key] = axis(layout[key], style);
  }
  return themed;
}

const CONFIG = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage", "resetScale2d"]],
};

async function draw() {
  const style = getComputedStyle(document.documentElement);
  let drawn = 0;
  for (const chart of charts) {
    const card = document.getElementById(`card-${chart.key}`);
    card.hidden = chart.run !== null && runsAreChosen && !shown.has(chart.run);
    if (card.hidden) continue;
    const data = chart.figure.data.map(chosenTrace).map((trace) => coloured(trace, style));
    const place = document.getElementById(`chart-${chart.key}`);
    if (chart.run_px) place.style.height = `${chart.height_px - chart.run_px * (runButtons.length - shown.size)}px`;
    await Plotly.react(place, data, layoutOf(chart.figure, style), CONFIG);
    drawn += 1;
  }
  document.body.dataset.drawn = String(drawn);
}

let drawing = Promise.resolve();
function redraw() {
  drawing = drawing.then(draw); // one after the other: a chart cannot be drawn twice at once
}

for (const button of runButtons) {
  button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    if (shown.has(run)) shown.delete(run);
    else shown.add(run);
    button.setAttribute("aria-pressed", String(shown.has(run)));
    redraw();
  });
}
for (const button of choiceButtons) {
  button.addEventListener("click", () => {
    choice = button.dataset.choice;
    for (const each of choiceButtons) each.setAttribute("aria-pressed", String(each === button));
    redraw();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
