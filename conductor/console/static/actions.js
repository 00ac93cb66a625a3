// What the tier planner and people have ordered for the caches.

import { call } from "./api.js";
import { attribute, empty, h, keyed, text, width } from "./dom.js";
import { UNKNOWN, age, bytes, count, duration, plural } from "./format.js";

const STATES = { planned: "", running: "info", done: "good", failed: "bad", abandoned: "warn", cancelled: "" };
const COLUMNS = [["Action"], ["State"], ["From → to"], ["Blocks", "num"], ["KV", "num"], ["Benefit", "num"], ["Cost", "num"], ["Reason"], ["Age"], [""]];

export function actionsView(root, { feed, attempt }) {
  const note = h("span", { class: "soft" });
  const body = h("tbody", {});
  const table = h("div", { class: "panel scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind }, name || h("span", { "aria-label": "Cancel" }))))), body));
  const place = h("div", {});
  const choice = h("select", { "aria-label": "Which actions", onchange: () => live.turn(path()) },
    [["", "All states"], ...Object.keys(STATES).map((state) => [state, state])].map(([value, name]) => h("option", { value }, name)));
  root.append(h("div", { class: "head" }, h("h2", {}, "Tier actions"), note, h("div", { class: "controls" }, choice)), place);
  const path = () => `v1/actions?limit=200${choice.value ? `&state=${choice.value}` : ""}`;

  function makeRow(action) {
    const [kind, chip, route, blocks, size, benefit, cost, reason, detail, old] = Array.from({ length: 10 }, () => h("span", {}));
    const bar = h("div", { class: "fill" });
    const button = h("button", { type: "button", class: "small", "aria-label": `Cancel ${action.id}`,
      onclick: () => attempt(() => call("POST", `v1/actions/${encodeURIComponent(action.id)}/cancel`), `${action.id} is cancelled`) }, "Cancel");
    const row = h("tr", { "data-id": action.id }, h("td", { class: "nowrap" }, kind, h("div", { class: "soft mono" }, action.id)), h("td", { class: "nowrap" }, chip),
      h("td", { class: "nowrap" }, route), h("td", { class: "num" }, h("div", { class: "track" }, bar), blocks), h("td", { class: "num" }, size),
      h("td", { class: "num" }, benefit), h("td", { class: "num" }, cost), h("td", { class: "reason" }, reason, h("div", { class: "soft" }, detail)),
      h("td", { class: "nowrap soft" }, old), h("td", {}, button));
    row.update = (each) => {
      const total = each.stop_block - each.start_block;
      text(kind, each.kind);
      text(chip, each.partial ? "done in part" : each.state);
      attribute(chip, "class", `chip ${STATES[each.state]}`);
      text(route, each.source ? `${where(each.source)} → ${where(each.target)}` : where(each.target));
      text(blocks, `${count(each.blocks_done)} of ${count(total)}`);
      width(bar, total ? each.blocks_done / total : 0);
      text(size, each.kv_bytes ? bytes(each.kv_bytes) : UNKNOWN);
      text(benefit, each.ordered && !each.benefit_s ? UNKNOWN : duration(each.benefit_s * 1000));
      text(cost, each.ordered && !each.cost_s ? UNKNOWN : duration(each.cost_s * 1000));
      text(reason, each.reason + (each.ordered ? " (by hand)" : ""));
      text(detail, each.detail);
      text(old, each.ran_s === null ? age(each.age_s) : `${age(each.age_s)}, ran ${duration(each.ran_s * 1000)}`);
      button.hidden = each.state !== "planned" && each.state !== "running";
    };
    return row;
  }

  const live = feed(path(), 2000, ({ counts, actions }) => {
    text(note, ["planned", "running"].map((state) => `${count(counts[state] ?? 0)} ${state}`).join(", "));
    if (!actions.length) {
      place.replaceChildren(choice.value
        ? empty("No such actions", `None is ${choice.value}, of those that are remembered.`)
        : empty("No tier actions", "The planner orders some when it is on (tier_planner.actions) and they pay; “conductor cache” orders them by hand."));
      return;
    }
    if (place.firstChild !== table) place.replaceChildren(table);
    keyed(body, actions, (each) => each.id, makeRow, (row, each) => row.update(each));
  });
  return {};
}

const where = (spot) => `${spot.instance}${spot.rank ? `/${spot.rank}` : ""} ${spot.tier}`;
