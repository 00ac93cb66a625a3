// Every instance by role: cards while there are few, tiles where there are many.

import { call } from "./api.js";
import { attribute, confirmed, detail, empty, h, keyed, text, width } from "./dom.js";
import { UNKNOWN, age, bytes, count, duration, percent, plural } from "./format.js";

const MOST_CARDS = 24;
const ROLES = [["prefill", "Prefill"], ["decode", "Decode"], ["mixed", "Mixed"]];
const TIERS = ["device", "host", "disk", "pod", "remote"];
const HEALTH = {
  up: ["up", "good", ""], starting: ["starting", "info", "…"], draining: ["draining", "info", "↓"],
  withheld: ["withheld", "info", "–"], suspended: ["suspended", "warn", "!"], probing: ["trying again", "warn", "?"], down: ["down", "bad", "×"],
};

export function clusterView(root, { feed, attempt }) {
  let instances = null;
  let open = null;
  const filter = h("input", { type: "search", placeholder: "Filter by name or health", "aria-label": "Filter instances", oninput: () => render() });
  const groups = h("div", {});
  root.append(
    h("div", { class: "head" }, h("h2", {}, "Cluster"), tierKey(), h("div", { class: "controls" }, filter)),
    groups,
  );

  async function drain(row) {
    const wished = await confirmed({
      title: `Drain ${row.id}?`,
      says: `Nothing more is placed there. ${underWay(row)} may finish, for ten minutes at most; then the instance leaves the cluster.`,
      yes: "Drain",
    });
    if (wished) await attempt(() => call("DELETE", `v1/instances/${encodeURIComponent(row.id)}?drain=true`), `${row.id} drains`);
  }

  function showDetail(row) {
    const body = h("div", { class: "instance" });
    open = { id: row.id, card: fillCard(body, drain, true) };
    open.card.update(row);
    detail.show(row.id, body, () => { open = null; });
  }

  function render() {
    if (instances === null) return;
    const wanted = filter.value.trim().toLowerCase();
    const rows = wanted ? instances.filter((row) => `${row.id} ${row.health}`.toLowerCase().includes(wanted)) : instances;
    const listed = ROLES.map(([role, name]) => ({ role, name, rows: rows.filter((row) => row.role === role) })).filter((group) => group.rows.length);
    if (!listed.length) {
      groups.keyed = undefined;
      groups.replaceChildren(wanted
        ? empty("No instance fits the filter", `None of ${plural(instances.length, "instance")} has “${filter.value}” in its name or health.`)
        : empty("No instances", "List engines under “instances” in the configuration, or add one with PUT /v1/instances/{id}."));
      return;
    }
    if (!groups.keyed) groups.replaceChildren();
    keyed(groups, listed, (group) => `${group.role} ${group.rows.length > MOST_CARDS}`, (group) => makeGroup(group), (element, group) => element.update(group));
    if (open) {
      const row = instances.find((each) => each.id === open.id);
      if (row) open.card.update(row);
      else detail.close();
    }
  }

  function makeGroup({ role, name, rows }) {
    const many = rows.length > MOST_CARDS;
    const note = h("span", { class: "soft" });
    const body = h("div", { class: many ? "tiles" : "cards" });
    const element = h("section", { class: "group", "aria-label": name, "data-role": role }, h("div", { class: "head" }, h("h3", {}, name), note),
      many ? h("div", { class: "panel" }, body, h("p", { class: "soft tiles-note" }, meaning(role))) : body);
    element.update = (group) => {
      text(note, summary(group));
      keyed(body, group.rows, (row) => row.id, many ? makeTile : makeCard, (child, row) => child.update(row));
    };
    return element;
  }

  function makeCard() {
    const element = h("article", { class: "card instance" });
    element.update = fillCard(element, drain, false).update;
    return element;
  }

  function makeTile() {
    const element = h("button", { type: "button", class: "tile", onclick: () => showDetail(element.row) });
    element.update = (row) => {
      element.row = row;
      const [word, kind, sign] = HEALTH[row.health];
      const load = pressure(row);
      const share = `${Math.round(load * 100)}%`;
      attribute(element, "class", `tile${kind === "warn" || kind === "bad" ? ` ${kind}` : level(load)}`);
      if (element.style.getPropertyValue("--load") !== share) element.style.setProperty("--load", share);
      text(element, sign);
      const says = `${row.id}: ${word}, ${plural(row.active_decodes, "request")}, queue ${duration(row.queue_ms)}, KV ${percent(row.kv_usage)}`;
      attribute(element, "title", says);
      attribute(element, "aria-label", says);
    };
    return element;
  }

  feed("v1/cluster/load", 2000, ({ fields, instances: given }) => {
    instances = given.map((row) => Object.fromEntries(fields.map((name, i) => [name, row[i]])));
    render();
  });
  return {};
}

function fillCard(element, drain, whole) {
  const name = h("h3", {});
  const chip = h("span", { class: "chip" });
  const reason = h("p", { class: "reason", hidden: true });
  const kv = meter("KV memory");
  const queue = meter("Queue");
  const running = meter("Requests");
  const cachedParts = TIERS.map((tier) => h("div", { class: `fill ${tier}` }));
  const cached = { track: h("div", { class: "track parts" }, cachedParts), amount: h("span", { class: "amount" }) };
  const note = h("span", {});
  const button = h("button", { type: "button", class: "small", onclick: () => drain(element.row) }, "Drain");
  const facts = h("dl", { class: "facts" });
  element.append(
    whole ? h("div", { class: "top" }, chip) : h("div", { class: "top" }, name, chip),
    reason, kv.element, queue.element, running.element,
    h("div", { class: "meter" }, h("span", { class: "name" }, "Cached"), cached.track, cached.amount),
    whole ? facts : "",
    h("div", { class: "foot" }, note, button),
  );
  const update = (row) => {
    element.row = row;
    text(name, row.id);
    attribute(name, "title", row.id);
    const [word, kind] = HEALTH[row.health];
    text(chip, row.retry_in_s === null ? word : `${word}, ${Math.ceil(row.retry_in_s)} s`);
    attribute(chip, "class", `chip ${kind}`);
    reason.hidden = row.health === "up";
    text(reason, row.health_reason);
    kv.set(row.kv_usage, percent(row.kv_usage), true);
    queue.set(row.queue_ms / 2000, duration(row.queue_ms), true);
    const placed = row.role === "prefill" ? row.pending_prefills : row.active_decodes;
    running.set(placed / 64, `${count(placed)} placed`);
    const blocks = TIERS.map((tier) => row[`${tier}_blocks`]);
    const total = blocks.reduce((sum, each) => sum + each, 0);
    const room = Math.max(total, row.kv_capacity_tokens && row.block_size ? row.kv_capacity_tokens / row.block_size : total);
    blocks.forEach((each, i) => width(cachedParts[i], room ? each / room : 0));
    const blockBytes = row.block_size ? row.block_size * row.kv_bytes_per_token : null;
    text(cached.amount, blockBytes ? bytes(total * blockBytes) : `${count(total)} blocks`);
    attribute(cached.track, "title", TIERS.map((tier, i) => `${tier}: ${count(blocks[i])} blocks`).filter((_, i) => blocks[i]).join("\n") || "nothing");
    text(note, row.engine_running === null
      ? `${plural(row.pending_prefills, "prefill")} pending`
      : `engine: ${count(row.engine_running)} running, ${count(row.engine_waiting)} waiting`);
    button.disabled = row.health === "draining";
    attribute(button, "aria-label", `Drain ${row.id}`);
    if (whole) showFacts(facts, row, blocks, blockBytes);
  };
  return { update };
}

function showFacts(list, row, blocks, blockBytes) {
  const told = [
    ["Role", row.role], ["Ranks", count(row.ranks)], ["Placements", count(row.placements)],
    ["Prefills pending", count(row.pending_prefills)], ["Context", `${count(row.context_tokens)} tokens`],
    ["KV capacity", row.kv_capacity_tokens ? `${count(row.kv_capacity_tokens)} tokens` : UNKNOWN],
    ["Suspended so far", plural(row.suspensions, "time")],
    ["May be tried again in", row.retry_in_s === null ? UNKNOWN : age(row.retry_in_s)],
    ...TIERS.map((tier, i) => [`Cached in ${tier}`, blockBytes ? `${count(blocks[i])} blocks, ${bytes(blocks[i] * blockBytes)}` : `${count(blocks[i])} blocks`]),
  ];
  keyed(list, told, ([name]) => name, ([name]) => {
    const value = h("dd", {});
    const element = h("div", {}, h("dt", {}, name), value);
    element.value = value;
    return element;
  }, (element, [, value]) => text(element.value, value));
}

function meter(name) {
  const bar = h("div", { class: "fill" });
  const amount = h("span", { class: "amount" });
  const element = h("div", { class: "meter" }, h("span", { class: "name" }, name), h("div", { class: "track" }, bar), amount);
  return {
    element,
    set(share, says, judged = false) {
      width(bar, share ?? 0);
      attribute(bar, "class", `fill${judged ? level(share ?? 0) : ""}`);
      text(amount, says);
    },
  };
}

const level = (share) => (share >= 0.95 ? " full" : share >= 0.8 ? " high" : "");
const pressure = (row) => Math.min(1, Math.max(row.kv_usage ?? 0, row.role === "decode" ? 0 : row.queue_ms / 2000));
const meaning = (role) => (role === "decode"
  ? "The filled part of a tile is the KV memory in use."
  : "The filled part of a tile is the KV memory in use or the prefill queue (2 s is full), whichever is more.")
  + " ! suspended, ? trying again, × down, – withheld, ↓ draining, … starting. Choose a tile for its figures.";

function underWay(row) {
  const running = Math.max(row.active_decodes, row.pending_prefills);
  return running ? `What runs there (${plural(running, "request")})` : "What still arrives";
}

function summary({ rows }) {
  const up = rows.filter((row) => row.health === "up").length;
  const queues = rows.reduce((sum, row) => sum + row.queue_ms, 0) / rows.length;
  const usages = rows.filter((row) => row.kv_usage !== null);
  const usage = usages.length ? usages.reduce((sum, row) => sum + row.kv_usage, 0) / usages.length : null;
  const requests = rows.reduce((sum, row) => sum + (row.role === "prefill" ? row.pending_prefills : row.active_decodes), 0);
  return [
    `${count(up)} of ${plural(rows.length, "instance")} up`, `${plural(requests, "request")} placed`,
    rows[0].role === "decode" ? null : `queue ${duration(queues)} on average`, `KV memory ${percent(usage)}`,
  ].filter(Boolean).join(" · ");
}

function tierKey() {
  return h("div", { class: "key", "aria-label": "Colours of the tiers" }, TIERS.map((tier) => h("span", {}, h("i", { class: `swatch ${tier}` }), tier)));
}
