// What to look at now, and what limits the cluster.

import { attribute, h, keyed, text } from "./dom.js";
import { UNKNOWN } from "./format.js";

export function problemsView(root, { feed }) {
  const list = h("div", { class: "problems" });
  const fine = h("div", { class: "panel fine", hidden: true }, h("strong", {}, "Nothing needs attention. "), h("span", { class: "soft" }, "Instances, KV events, refusals, failures and objectives are looked at."));
  const summary = h("span", { class: "soft" });
  const rows = h("tbody", {});
  root.append(
    h("div", { class: "head" }, h("h2", {}, "Problems")), fine, list,
    h("section", { class: "group" }, h("div", { class: "head" }, h("h2", {}, "What limits the cluster"), summary),
      h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Limit", "Now", "Finding", "Remedy"].map((name) => h("th", { scope: "col" }, name)))), rows))),
  );

  feed("v1/problems", 3000, ({ problems }) => {
    fine.hidden = problems.length > 0;
    keyed(list, problems, (each) => `${each.kind} ${each.says}`, (each) => h("article", { class: `panel problem ${each.severity}` },
      h("span", { class: `chip ${each.severity === "critical" ? "bad" : "warn"}` }, each.severity), h("p", { class: "says" }, sentence(each.says)), h("p", { class: "remedy" }, sentence(each.remedy))), () => {});
  });

  feed("v1/diagnosis", 5000, (diagnosis) => {
    text(summary, diagnosis.limit === null ? diagnosis.summary : "");
    keyed(rows, diagnosis.findings, (each) => each.cause, (finding) => {
      const chip = h("span", { class: "chip" });
      const [says, evidence] = [h("span", {}), h("div", { class: "evidence" })];
      const row = h("tr", {}, h("td", { class: "nowrap" }, finding.cause), h("td", { class: "nowrap" }, chip), h("td", { class: "says" }, says, evidence), h("td", { class: "reason soft" }, finding.remedy));
      row.update = (each) => {
        text(chip, each.limits === null ? "not known" : each.limits ? "limits" : "no limit");
        attribute(chip, "class", `chip ${each.limits === null ? "" : each.limits ? "warn" : "good"}`);
        text(says, each.says);
        evidence.title = each.basis;
        keyed(evidence, each.evidence, (fact) => fact.name, () => h("span", {}), (span, fact) => text(span, told(fact)));
      };
      return row;
    }, (row, finding) => row.update(finding));
  });
  return {};
}

const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
const number = (value) => (value === null ? UNKNOWN : String(Number(value.toPrecision(3))));
const told = ({ name, value, unit, limit }) => `${name.replaceAll("_", " ")} ${number(value)}${unit ? ` ${unit}` : ""}${limit === null ? "" : ` (limit ${number(limit)})`}`;
