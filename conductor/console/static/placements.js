// The newest requests: where they went, what they reused, and whether it went as predicted.

import { get } from "./api.js";
import { attribute, detail, empty, h, keyed, text, width } from "./dom.js";
import { UNKNOWN, age, count, duration, percent } from "./format.js";
import { explanation } from "./explanation.js";

const TIERS = ["device", "host", "disk", "pod", "remote"];
const OUTCOMES = { running: "info", finished: "good", cancelled: "", failed: "bad", expired: "warn" };

export function placementsView(root, { feed }) {
  let latest = null;
  let held = false;
  const filter = h("input", { type: "search", placeholder: "Filter by model, instance, outcome, id", "aria-label": "Filter placements", oninput: () => render() });
  const hold = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
    held = !held;
    hold.setAttribute("aria-pressed", String(held));
    text(hold, held ? "Go on" : "Hold");
    if (!held) live.now();
  } }, "Hold");
  const body = h("tbody", {});
  const table = h("div", { class: "panel scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Placement", "Age", "Model", "Prefill", "Decode"].map((name) => h("th", { scope: "col" }, name)),
      h("th", { scope: "col", class: "num" }, "Prompt tokens"), h("th", { scope: "col" }, "Reused"),
      ["TTFT predicted", "TTFT observed"].map((name) => h("th", { scope: "col", class: "num" }, name)), h("th", { scope: "col" }, "Outcome"))),
    body));
  const place = h("div", {});
  root.append(
    h("div", { class: "head" }, h("h2", {}, "Placements"), h("span", { class: "soft" }, "the newest first; choose one to see why"),
      h("div", { class: "controls" }, filter, hold)),
    place,
  );

  function render() {
    if (latest === null) return;
    const wanted = filter.value.trim().toLowerCase();
    const rows = latest.filter((each) => !wanted
      || [each.model, each.prefill_instance, each.decode_instance, each.outcome, each.placement_id, each.request_id].join(" ").toLowerCase().includes(wanted));
    if (!rows.length) {
      place.replaceChildren(latest.length
        ? empty("No placement fits the filter", `${count(latest.length)} placements were looked through.`)
        : empty("No placements yet", "Send a request to /v1/chat/completions, and it shows here within two seconds."));
      return;
    }
    if (place.firstChild !== table) place.replaceChildren(table);
    keyed(body, rows, (each) => each.placement_id, makeRow, (row, each) => row.update(each));
  }

  function makeRow({ placement_id: id }) {
    const cells = Array.from({ length: 7 }, () => h("span", {}));
    const [old, model, prefill, decode, tokens, predicted, observed] = cells;
    const parts = TIERS.map((tier) => h("div", { class: `fill ${tier}` }));
    const reused = h("span", {});
    const track = h("div", { class: "track parts" }, parts);
    const delta = h("span", { class: "delta" });
    const chip = h("span", { class: "chip" });
    const row = h("tr", { class: "open", "data-id": id, onclick: () => { location.hash = `placements/${encodeURIComponent(id)}`; } },
      h("td", { class: "nowrap" }, h("button", { type: "button", class: "plain mono", "aria-label": `Why ${id} was placed so` }, id)),
      h("td", { class: "soft nowrap" }, old), h("td", { class: "nowrap" }, model), h("td", { class: "nowrap" }, prefill), h("td", { class: "nowrap" }, decode),
      h("td", { class: "num" }, tokens), h("td", { class: "nowrap" }, track, reused),
      h("td", { class: "num" }, predicted), h("td", { class: "num" }, observed, " ", delta), h("td", {}, chip));
    row.update = (each) => {
      text(old, age(each.age_s));
      text(model, each.model);
      text(prefill, each.prefill_instance);
      text(decode, each.decode_instance === each.prefill_instance ? "the same" : each.decode_instance);
      attribute(decode, "class", each.decode_instance === each.prefill_instance ? "soft" : null);
      text(tokens, count(each.prompt_tokens));
      const total = TIERS.reduce((sum, tier) => sum + (each.reused_tokens[tier] ?? 0), 0);
      TIERS.forEach((tier, i) => width(parts[i], (each.reused_tokens[tier] ?? 0) / Math.max(each.prompt_tokens, 1)));
      text(reused, percent(total / Math.max(each.prompt_tokens, 1)));
      attribute(track, "title", TIERS.filter((tier) => each.reused_tokens[tier]).map((tier) => `${tier}: ${count(each.reused_tokens[tier])} tokens`).join("\n") || "nothing");
      text(predicted, duration(each.predicted_ttft_ms));
      text(observed, duration(each.observed_ttft_ms));
      const off = each.observed_ttft_ms === null ? null : each.observed_ttft_ms - each.predicted_ttft_ms;
      text(delta, off === null ? "" : `${off >= 0 ? "+" : ""}${duration(off).replace(UNKNOWN, "0")}`);
      attribute(delta, "class", off !== null && off > 50 && off > each.predicted_ttft_ms ? "delta late" : "delta");
      text(chip, each.outcome);
      attribute(chip, "class", `chip ${OUTCOMES[each.outcome] ?? ""}`);
    };
    return row;
  }

  const live = feed("v1/placements?limit=100", 2000, ({ placements }) => {
    if (held && latest !== null) return;
    latest = placements;
    render();
  });

  async function turn(id) {
    if (!id) {
      detail.close();
      return;
    }
    const closed = () => { if (location.hash.startsWith("#placements/")) location.hash = "placements"; };
    const load = async (limit) => {
      try {
        const why = await get(`v1/placements/${encodeURIComponent(id)}?limit=${limit}`);
        detail.show(`Placement ${id}`, explanation(why, () => load(why.candidates_total)), closed);
      } catch (error) {
        detail.show(`Placement ${id}`, empty("That placement cannot be shown", error.message), closed);
      }
    };
    await load(25);
  }

  return { turn };
}
