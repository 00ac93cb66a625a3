// Where recent prompts' look-ups ended, as a tree: which prefix continues which, who holds it, and how large it is.

import { get } from "./api.js";
import { attribute, empty, h, keyed, text, width } from "./dom.js";
import { UNKNOWN, bytes, count, percent } from "./format.js";

const MOST_HOLDERS = 6;

export function prefixesView(root, { feed }) {
  let kind = null;
  let latest = null;
  let once = false;
  const more = h("button", { type: "button", class: "small", onclick: () => { once = !once; render(); } });
  const note = h("span", { class: "soft" });
  const body = h("tbody", {});
  const table = h("div", { class: "panel scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Prefix"), h("th", { scope: "col" }, "Recent matches"),
      ["Blocks", "Tokens", "KV"].map((name) => h("th", { scope: "col", class: "num" }, name)), h("th", { scope: "col" }, "Held by"))),
    body));
  const place = h("div", {});
  const all = [table, h("p", { class: "below" }, more)];
  root.append(h("div", { class: "head" }, h("h2", {}, "Hot prefixes"), note), place);

  // Sizes are known where all instances have blocks of one size.
  get("v1/instances").then(({ instances }) => {
    const sizes = new Set(instances.map((each) => each.block_size));
    if (sizes.size === 1) kind = { tokens: [...sizes][0] };
    return get("v1/cluster/load");
  }).then(({ fields, instances }) => {
    const perToken = new Set(instances.map((row) => row[fields.indexOf("kv_bytes_per_token")]));
    if (kind && perToken.size === 1) kind.bytes = [...perToken][0];
  }).catch(() => {});  // the feed tells of a server that is away

  function makeRow() {
    const bar = h("div", { class: "fill" });
    const [branch, name, matches, blocks, tokens, size] = Array.from({ length: 6 }, () => h("span", {}));
    attribute(branch, "class", "branch");
    attribute(name, "class", "mono");
    const holders = h("div", { class: "holders" });
    const row = h("tr", {}, h("td", { class: "nowrap" }, branch, name), h("td", { class: "nowrap" }, h("div", { class: "track" }, bar), matches),
      h("td", { class: "num" }, blocks), h("td", { class: "num" }, tokens), h("td", { class: "num" }, size), h("td", {}, holders));
    row.update = ({ prefix, level, most, total }) => {
      text(branch, level ? "└ " : "");
      branch.style.paddingLeft = `${Math.max(0, level - 1) * 18}px`;
      text(name, prefix.hash);
      width(bar, prefix.matches / most);
      text(matches, `${count(prefix.matches)} (${percent(prefix.matches / total)})`);
      const long = prefix.depth === null ? null : prefix.depth + 1;  // the first one has depth 0
      text(blocks, count(long));
      const held = kind?.tokens && long !== null ? long * kind.tokens : null;
      text(tokens, count(held));
      text(size, held !== null && kind.bytes ? bytes(held * kind.bytes) : UNKNOWN);
      keyed(holders, prefix.held_by.slice(0, MOST_HOLDERS).concat(prefix.holders > MOST_HOLDERS ? [null] : []),
        (each) => (each ? `${each.instance} ${each.rank} ${each.tier}` : "more"),
        (each) => h("span", { class: "chip" }, each ? h("i", { class: `swatch ${each.tier}` }) : "", h("span", {})),
        (chip, each) => text(chip.lastElementChild, each ? `${each.instance}${each.rank ? ` / ${each.rank}` : ""} · ${each.tier}` : `${count(prefix.holders - MOST_HOLDERS)} more`));
    };
    return row;
  }

  function render() {
    const prefixes = latest;
    if (!prefixes.length) {
      text(note, "");
      place.replaceChildren(empty("Nothing is hot yet", "Prefixes show here when prompts are found in a cache, wholly or in part."));
      return;
    }
    if (place.firstChild !== table) place.replaceChildren(...all);
    const total = prefixes.reduce((sum, each) => sum + each.matches, 0);
    const most = prefixes[0].matches;
    const often = prefixes.filter((each) => each.matches > 1);
    const rare = often.length ? prefixes.length - often.length : 0;
    more.hidden = rare === 0;
    text(more, once ? "Hide those matched once" : `Show ${count(rare)} matched once`);
    text(note, "where the look-ups of recent prompts ended; counts are estimates that fade");
    keyed(body, ordered(once || !rare ? prefixes : often), ({ prefix }) => prefix.hash, makeRow, (row, { prefix, level }) => row.update({ prefix, level, most, total }));
  }

  feed("v1/cache/hot?limit=50", 4000, ({ prefixes }) => {
    latest = prefixes;
    render();
  });
  return {};
}

// Each below the one that it continues, otherwise in the given order.
function ordered(prefixes) {
  const shown = new Set(prefixes.map((each) => each.hash));
  const below = grouped(prefixes.map((each) => (shown.has(each.above) ? each : { ...each, above: null })));
  const rows = [];
  const add = (above, level) => {
    for (const prefix of below.get(above) ?? []) {
      rows.push({ prefix, level });
      add(prefix.hash, level + 1);
    }
  };
  add(null, 0);
  return rows;
}

function grouped(prefixes) {
  const groups = new Map();
  for (const each of prefixes) groups.set(each.above, [...(groups.get(each.above) ?? []), each]);
  return groups;
}
