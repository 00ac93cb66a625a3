// Why a placement was made: the sentence, what each part should take and took, and every candidate's costs.

import { h, width } from "./dom.js";
import { UNKNOWN, count, duration, goal, percent } from "./format.js";

const TERMS = [["queue", "Queue"], ["fetch", "Fetch"], ["prefill", "Prefill"], ["hand_off", "Hand-off"]];

export function explanation(why, showAll) {
  return [
    h("p", { class: "why" }, why.why ?? "Its candidates have left the log (scheduling.records); what became of it is still known."),
    times(why),
    facts(why),
    plan(why),
    candidates(why, showAll),
    excluded(why),
  ].filter(Boolean);
}

function times(why) {
  const predicted = why.predicted;
  const observed = why.observed;
  const longest = Math.max(predicted.ttft_ms, observed.ttft_ms ?? 0, 0.001);
  const parts = TERMS.map(([name, label]) => {
    const bar = h("div", { class: `fill ${name}`, title: `${label}: ${duration(predicted[`${name}_ms`])}` });
    width(bar, predicted[`${name}_ms`] / longest);
    return bar;
  });
  const seen = h("div", { class: "fill observed" });
  width(seen, (observed.ttft_ms ?? 0) / longest);
  return h("section", { class: "section" }, h("h3", {}, "Time to first token"),
    h("div", { class: "terms" },
      h("div", { class: "meter" }, h("span", { class: "name" }, "Predicted"), h("div", { class: "track parts" }, parts), h("span", { class: "amount" }, duration(predicted.ttft_ms))),
      h("div", { class: "meter" }, h("span", { class: "name" }, "Observed"), h("div", { class: "track" }, seen), h("span", { class: "amount" }, duration(observed.ttft_ms))),
      h("div", { class: "key" }, TERMS.map(([name, label]) => h("span", {}, h("i", { class: `swatch ${name}` }), `${label} ${duration(predicted[`${name}_ms`])}`)))));
}

function facts(why) {
  const { predicted, observed, counterfactual } = why;
  const reused = why.prompt_tokens - why.plan.computed_tokens;
  const told = [
    ["Outcome", why.outcome], ["Model", why.model], ["Prefill", `${why.prefill_instance} / ${why.prefill_rank}`],
    ["Decode", `${why.decode_instance} / ${why.decode_rank}`], ["Prompt", `${count(why.prompt_tokens)} tokens`],
    ["Reused as planned", `${count(reused)} tokens, ${percent(reused / Math.max(why.prompt_tokens, 1))}`],
    ["Cached, says the engine", observed.cached_tokens === null ? UNKNOWN : `${count(observed.cached_tokens)} tokens`],
    ["TBT predicted", duration(predicted.tbt_ms)], ["Answer", `${count(observed.output_tokens)} tokens (${count(predicted.output_tokens)} predicted)`],
    ["Took in all", duration(observed.duration_ms)], ["Waited before", duration(why.held_ms)],
    ["Delay to others", duration(predicted.inflicted_ms)], ["Cost of evictions", duration(predicted.eviction_ms)],
    ["Policy", why.policy], ["Tenant", why.tenant || UNKNOWN], ["Priority", String(why.priority)],
    ["Request", why.request_id], ["Tokens from", why.token_source + (why.token_fallback ? ` (${why.token_fallback})` : "")],
    why.objectives && ["Objectives", `TTFT ${goal(why.objectives.ttft_ms)}, TBT ${goal(why.objectives.tbt_ms)}`],
    why.retry_of && ["Second attempt after", why.retry_of], why.hedge_of && ["Asked beside", why.hedge_of],
    why.failure && ["Failure", `${why.failure.instance}: ${why.failure.kind}, ${why.failure.detail}`],
    counterfactual?.without_this_prefill && ["Without this prefill instance", `${other(counterfactual.without_this_prefill)}`],
    counterfactual?.slo && why.policy !== "slo" && ["The policy slo would choose", other(counterfactual.slo)],
  ];
  return h("section", { class: "section" }, h("h3", {}, "What happened"),
    h("dl", { class: "facts" }, told.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

const other = (choice) => (choice.prefill_instance === choice.decode_instance ? choice.prefill_instance : `${choice.prefill_instance} and ${choice.decode_instance}`)
  + `, TTFT ${duration(choice.ttft_ms)}`;

function plan(why) {
  if (!why.plan.segments.length) return null;
  const parts = why.plan.segments.map((segment) => {
    const bar = h("div", { class: `fill ${segment.tier}`, title: `${count(segment.stop_token - segment.start_token)} tokens from ${segment.holder}, ${segment.tier}` });
    width(bar, (segment.stop_token - segment.start_token) / why.prompt_tokens);
    return bar;
  });
  return h("section", { class: "section" }, h("h3", {}, "Where the prompt comes from"),
    h("div", { class: "terms" }, h("div", { class: "track parts" }, parts),
      h("div", { class: "key" },
        why.plan.segments.map((segment) => h("span", {}, h("i", { class: `swatch ${segment.tier}` }),
          `${count(segment.start_token)}–${count(segment.stop_token)}: ${segment.holder}, ${segment.tier}`)),
        h("span", {}, h("i", { class: "swatch computed" }), `${count(why.plan.computed_tokens)} tokens computed`))));
}

const COLUMNS = [
  ["Overlap", (c) => count(c.overlap_tokens), "tokens of the prompt that it holds"],
  ["Queue", (c) => duration(c.queue_ms), "until a prefill begins"],
  ["Fetch", (c) => duration(c.fetch_ms), "loads and transfers of the plan"],
  ["Prefill", (c) => duration(c.prefill_ms), "what must be computed"],
  ["TTFT", (c) => duration(c.ttft_ms), "time to first token, all in all"],
  ["Hand-off", (c) => duration(c.hand_off_ms), "from the prefill to this decode rank"],
  ["Memory", (c) => duration(c.wait_for_memory_ms), "wait for KV memory"],
  ["Delay", (c) => duration(c.inflicted_ms), "what its prefill costs others"],
  ["Eviction", (c) => duration(c.eviction_ms), "what others compute again because of what it evicts"],
  ["TBT", (c) => duration(c.tbt_ms), "time between tokens there"],
];

function candidates(why, showAll) {
  if (why.candidates === null) return null;
  const rows = why.candidates.map((c) => h("tr", { class: c.chosen_for.length ? "chosen" : null },
    h("td", { class: "nowrap" }, `${c.instance} / ${c.rank}`), h("td", { class: "nowrap soft" }, c.role),
    COLUMNS.map(([, value]) => h("td", { class: "num" }, value(c))),
    h("td", {}, c.chosen_for.map((leg) => h("span", { class: "chip info" }, leg)), c.ruled_out.length ? h("span", { class: "soft" }, c.ruled_out.join("; ")) : "")));
  const left = why.candidates_total - why.candidates.length;
  return h("section", { class: "section" }, h("h3", {}, `Candidates, best TTFT first (${count(why.candidates_total)})`),
    h("div", { class: "scroll" }, h("table", { id: "candidates" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Instance / rank"), h("th", { scope: "col" }, "Role"),
        COLUMNS.map(([name, , says]) => h("th", { scope: "col", class: "num", title: says }, name)), h("th", { scope: "col" }, "Chosen for, or ruled out"))),
      h("tbody", {}, rows))),
    left > 0 ? h("p", {}, h("button", { type: "button", class: "small", onclick: showAll }, `Show ${count(left)} more`)) : "");
}

function excluded(why) {
  const names = Object.entries(why.excluded ?? {});
  if (!names.length) return null;
  return h("section", { class: "section" }, h("h3", {}, "No candidates"),
    h("dl", { class: "facts" }, names.slice(0, 60).map(([name, reason]) => h("div", {}, h("dt", {}, name), h("dd", {}, reason)))),
    names.length > 60 ? h("p", { class: "soft" }, `and ${count(names.length - 60)} more`) : "");
}
