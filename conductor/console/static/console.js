// The frame: which view is shown, the figures above it, and how the page stands with its server.

import { key } from "./api.js";
import { detail, h, say, text } from "./dom.js";
import { Feed } from "./feed.js";
import { count, duration, durationParts, goal, percent, plural, rate } from "./format.js";
import { actionsView } from "./actions.js";
import { clusterView } from "./cluster.js";
import { objectivesView } from "./objectives.js";
import { placementsView } from "./placements.js";
import { prefixesView } from "./prefixes.js";
import { problemsView } from "./problems.js";

const VIEWS = {
  cluster: clusterView, placements: placementsView, prefixes: prefixesView,
  actions: actionsView, objectives: objectivesView, problems: problemsView,
};
const at = (id) => document.getElementById(id);
const feeds = new Set();
let shown = null;

const watch = {
  live() {
    if (at("link").dataset.state === "live") return;
    at("link").dataset.state = "live";
    text(at("link"), "live");
    at("away").hidden = true;
    document.body.classList.remove("stale");
  },
  away() {
    at("link").dataset.state = "away";
    text(at("link"), "reconnecting");
    text(at("away"), "The server does not answer. What is shown is the last that was heard; the page goes on trying.");
    at("away").hidden = false;
    document.body.classList.add("stale");
  },
  failed(error) {
    at("link").dataset.state = "away";
    text(at("link"), "error");
    text(at("away"), `The server answers with an error: ${error.message}`);
    at("away").hidden = false;
  },
  refused(message) {
    at("link").dataset.state = "waiting";
    text(at("link"), "key needed");
    askForKey(message);
  },
};

function feed(path, everyMs, take) {
  const made = new Feed(path, everyMs, take, watch);
  feeds.add(made);
  return made;
}

// ---- the key ----

function askForKey(message) {
  const fault = at("key-fault");
  fault.hidden = !key.get();
  text(fault, message);
  at("sign-out").hidden = true;
  if (!at("key-dialog").open) {
    detail.close();
    at("key-dialog").showModal();
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("key").value.trim();
  at("key").value = "";
  if (!given) return;
  if (!/^[\x21-\x7e]+$/.test(given)) {
    text(at("key-fault"), "A key has printable ASCII characters and no spaces.");
    at("key-fault").hidden = false;
    return;
  }
  key.set(given);
  at("sign-out").hidden = false;
  at("key-dialog").close();
  for (const each of feeds) each.again();
});
at("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
at("sign-out").hidden = !key.get();
at("sign-out").addEventListener("click", () => {
  key.forget();
  location.reload();
});

// ---- light and dark ----

const THEMES = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
function useTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  text(at("theme"), THEMES[name][0]);
  at("theme").setAttribute("aria-label", `Theme: ${THEMES[name][1]}`);
}
let theme = localStorage.getItem("conductor.theme");
if (!(theme in THEMES)) theme = "auto";
useTheme(theme);
at("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  localStorage.setItem("conductor.theme", theme);
  useTheme(theme);
});

// ---- the figures of the last two minutes ----

// Streams tell what was cached only with `include_usage`: then the figure is of a part of the prompts.
const ofWhat = (told) => told !== null && told < 0.95 ? ` of ${percent(told)}` : "";

const FIGURES = [
  ["Requests", (c) => [rate(c.window.requests_per_s), "/s"], (c) => `${count(c.now.active_placements)} under way`],
  ["TTFT, median", (c) => durationParts(c.window.ttft_p50_ms), (c) => `p99 ${duration(c.window.ttft_p99_ms)}, goal ${goal(c.objectives.ttft_ms)}`],
  ["TBT, median", (c) => durationParts(c.window.tbt_p50_ms), (c) => `p99 ${duration(c.window.tbt_p99_ms)}, goal ${goal(c.objectives.tbt_ms)}`],
  ["Objectives met", (c) => share(c.window.goodput_share), (c) => `${rate(c.window.goodput_per_s)} good requests/s`,
    (c) => c.window.goodput_share !== null && c.window.goodput_share < 0.9],
  ["Tokens reused", (c) => share(c.window.token_reuse_planned), (c) => `engines say ${percent(c.window.token_reuse_reported)}${ofWhat(c.window.token_reuse_reported_of)}`],
  ["Prefill queue, mean", (c) => durationParts(c.now.queue_mean_ms), (c) => `longest ${duration(c.now.queue_max_ms)}`],
  ["KV memory, mean", (c) => share(c.now.kv_usage_mean), (c) => `fullest ${percent(c.now.kv_usage_max)}`],
  ["Refused", (c) => [count(c.window.refused), ""], (c) => `of ${plural(c.window.placed + c.window.refused, "placement")}`,
    (c) => c.window.refused > 0],
];
const share = (value) => {
  const [number, unit] = percent(value).split(" ");
  return [number, unit ?? ""];
};
const figures = FIGURES.map(([name]) => {
  const value = h("div", { class: "value" });
  const note = h("div", { class: "note" });
  const figure = h("div", { class: "figure" }, h("div", { class: "name" }, name), value, note);
  at("figures").append(figure);
  return { figure, value, note };
});

function showFigures(cluster) {
  FIGURES.forEach(([, valueOf, noteOf, missed], i) => {
    const [number, unit] = valueOf(cluster);
    figures[i].value.replaceChildren(number, h("span", { class: "unit" }, unit));
    text(figures[i].note, noteOf(cluster));
    figures[i].note.title = noteOf(cluster);
    figures[i].figure.classList.toggle("missed", Boolean(missed?.(cluster)));
  });
  const models = cluster.models.map((each) => each.model);
  const named = models.slice(0, 3).join(", ") + (models.length > 3 ? ` and ${models.length - 3} more` : "");
  text(at("facts"), `${plural(cluster.instances.total, "instance")}, ${plural(cluster.instances.ranks, "rank")} · policy ${cluster.policy}`
    + (models.length ? ` · ${named}` : ""));
}

function showProblemCount({ problems }) {
  const badge = at("problem-count");
  badge.hidden = problems.length === 0;
  text(badge, String(problems.length));
  badge.classList.toggle("critical", problems.some((each) => each.severity === "critical"));
  badge.setAttribute("aria-label", plural(problems.length, "problem"));
}

// ---- which view ----

function show() {
  const [name, rest] = splitHash();
  for (const link of at("nav").children) {
    const current = link.getAttribute("href") === `#${name}`;
    if (current) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else link.removeAttribute("aria-current");
  }
  if (shown?.name === name) {
    shown.view.turn?.(rest);
    return;
  }
  for (const each of shown?.feeds ?? []) {
    each.stop();
    feeds.delete(each);
  }
  detail.close();
  const own = [];
  const root = h("div", { id: `view-${name}` });
  at("view").replaceChildren(root);
  document.title = `${at("nav").querySelector("[aria-current]").firstChild.textContent} · Conductor`;
  shown = { name, feeds: own, view: null };
  shown.view = VIEWS[name](root, {
    feed: (...given) => {
      own.push(feed(...given));
      return own.at(-1);
    },
    again: () => { for (const each of own) each.now(); },
    attempt,
  });
  shown.view.turn?.(rest);
}

function splitHash() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return [name in VIEWS ? name : "cluster", rest.map(decodeURIComponent).join("/")];
}

// What a button does: says how it went, whatever happens.
async function attempt(what, done) {
  try {
    await what();
    say(done);
  } catch (error) {
    say(`That did not work: ${error.message}`);
  }
  for (const each of shown.feeds) each.now();
}

window.addEventListener("hashchange", show);
feed("v1/cluster", 2000, showFigures);
feed("v1/problems", 5000, showProblemCount);
show();
