"""A report as one HTML file that needs nothing else: plotly.js, style and data are all inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from typing import Any, Final

import orjson
from plotly.offline import get_plotlyjs

from simulator.report.charts import COLOURS, Chart, charts, line_of
from simulator.report.comparison import Row, compare, distinct_names
from simulator.report.run_document import Run, run_document

SHOWN_AT_FIRST: Final = 8  # runs; more can be switched on, but nobody tells more lines apart
_SAME_RATE: Final = 1.02  # runs whose rates differ by more are a sweep over rates
_DIFFERENCES_UP_TO: Final = 6  # runs; tables of more have no room for them
_CHOICES: Final = ("p50", "p95", "p99")


def html_report(title: str, runs: Sequence[Run | Mapping[str, Any]]) -> str:
    """The page, of runs or of documents as `run_document` makes them. Equal runs give equal pages.

    Raises ValueError without runs.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    documents = [run_document(run) if isinstance(run, Run) else run for run in runs]
    names = distinct_names(documents)
    drawn = charts(documents, names)
    several = len(documents) > 1
    body = "\n".join(
        [
            f"<header><h1>{escape(title)}</h1><p>{escape(headline(documents, names))}</p>"
            f"<p>{escape(_what(documents))}</p></header>",
            _toolbar(names) if several else "",
            "<main>",
            _comparison(documents, names, brief=True),
            f'<div class="grid">{"".join(_card(chart) for chart in drawn)}</div>',
            _comparison(documents, names, brief=False),
            _configuration(documents, names),
            "</main>",
            "<footer>Made by Conductor. Statistics are of the requests that were served, shares of all."
            "</footer>",
        ]
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('page.css')}</style>",
            "</head><body>",
            body,
            f'<script type="application/json" id="charts">{_json(drawn)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{_asset('page.js')}</script>",
            "</body></html>\n",
        ]
    )


def headline(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The outcome in a sentence."""
    good = [document["summary"]["good_request_fraction"] * 100 for document in documents]
    if len(documents) == 1:
        return f"{good[0]:.1f}\u00a0% of the requests met both objectives."
    rates = [document["summary"]["request_rate"] for document in documents]
    if max(rates) > _SAME_RATE * min(rates):
        goodputs = [document["summary"]["goodput"] for document in documents]
        best = max(range(len(goodputs)), key=lambda run: goodputs[run])
        return (
            f"Most goodput: {names[best]}, {goodputs[best]:.2f} good requests/s of {rates[best]:.2f} offered."
        )
    best = max(range(len(good)), key=lambda run: good[run])
    rest = [each for run, each in enumerate(good) if run != best]
    if max(rest) >= good[best]:
        return f"The best of the runs meet both objectives for {good[best]:.1f}\u00a0% of the requests."
    others = f"{rest[0]:.1f}" if len(rest) == 1 else f"{min(rest):.1f} to {max(rest):.1f}"
    return (
        f"{names[best]} meets both objectives for {good[best]:.1f}\u00a0% of the requests, "
        f"{'the other' if len(rest) == 1 else 'the others'} for {others}\u00a0%."
    )


def _what(documents: Sequence[Mapping[str, Any]]) -> str:
    """Requests and objectives, where all runs have the same."""
    counts = {d["summary"]["request_count"] + d["summary"]["error_request_count"] for d in documents}
    objectives = {
        tuple(d["objectives"][name] for name in ("ttft_s", "tbt_s", "tbt_share")) for d in documents
    }
    told = []
    if len(counts) == 1:
        told.append(f"{counts.pop():,} requests{' in each run' if len(documents) > 1 else ''}.")
    if len(objectives) == 1:
        ttft_s, tbt_s, tbt_share = objectives.pop()
        gaps = "token gaps" if tbt_share == 1.0 else "longest tenth of token gaps"
        told.append(
            f"Objectives: first token within {ttft_s:g}\u00a0s, {gaps} within {tbt_s * 1e3:g}\u00a0ms in the mean."
        )
    return " ".join(told)


def _toolbar(names: Sequence[str]) -> str:
    runs = "".join(
        f'<button type="button" data-run="{run}" aria-pressed="{str(run < SHOWN_AT_FIRST).lower()}">'
        f"{_swatch(run)}{escape(name)}</button>"
        for run, name in enumerate(names)
    )
    choices = "".join(
        f'<button type="button" data-choice="{which}" aria-pressed="{str(which == "p95").lower()}">{which}</button>'
        for which in _CHOICES
    )
    return (
        f'<div class="toolbar" role="group" aria-label="Runs shown">{runs}<span class="gap"></span>'
        f'<span class="unit">over time:</span>'
        f'<span class="choice" role="group" aria-label="Percentile over time">{choices}</span></div>'
    )


def _swatch(run: int) -> str:
    line = line_of(run)
    dashes = {"solid": "", "dash": ' stroke-dasharray="6 3"', "dot": ' stroke-dasharray="2 3"'}[line["dash"]]
    return (
        '<svg width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" stroke-width="3"'
        f' style="stroke: {line["color"]}"{dashes}/></svg>'
    )


def _card(chart: Chart) -> str:
    caption = f'<p class="caption">{escape(chart.caption)}</p>' if chart.caption else ""
    return (
        f'<section class="card{" wide" if chart.wide else ""}" id="card-{chart.key}">'
        f"<h2>{escape(chart.title)}</h2>{caption}"
        f'<div id="chart-{chart.key}" role="img" aria-label="{escape(chart.title)}"'
        f' style="height: {chart.height_px}px"></div></section>'
    )


def _heads(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f'<th scope="col">{escape(names[0])}</th>'
    return "".join(
        f'<th scope="col"><span class="swatch" style="background: var(--series-{run % COLOURS + 1})"></span>'
        f"{escape(name)}</th>"
        for run, name in enumerate(names)
    )


def _comparison(documents: Sequence[Mapping[str, Any]], names: Sequence[str], *, brief: bool) -> str:
    rows = [row for row in compare([d["summary"] for d in documents]) if row.figure.short or not brief]
    differences = 1 < len(documents) <= _DIFFERENCES_UP_TO
    if brief:
        lines = "".join(_row(row, row.figure.short, differences=differences) for row in rows)
    else:
        lines = "".join(
            f'<tr class="group"><th scope="rowgroup" colspan="{len(names) + 1}">{escape(group)}</th></tr>'
            + "".join(_row(row, row.figure.label, differences=differences) for row in members)
            for group, members in groupby(rows, key=lambda row: row.figure.group)
        )
    table = (
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{_heads(names)}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
    if not brief:
        return f'<details class="card"><summary>All figures</summary>{table}</details>'
    if len(documents) == 1:
        return _tiles(rows)
    rest = "; the others tell by how much they differ from it" if differences else ""
    return (
        '<section class="card"><h2>Runs side by side</h2>'
        f'<p class="caption">The best of each row is marked{rest}.</p>{table}</section>'
    )


def _tiles(rows: Sequence[Row]) -> str:
    """The figures of a run that is alone."""
    tiles = "".join(
        f"<div><dt>{escape(row.figure.short)}</dt><dd>{escape(row.cells[0].text)} "
        f'<span class="unit">{escape(row.figure.unit)}</span></dd></div>'
        for row in rows
    )
    return f'<section class="card"><dl class="tiles">{tiles}</dl></section>'


def _row(row: Row, label: str, *, differences: bool) -> str:
    unit = f' <span class="unit">{escape(row.figure.unit)}</span>' if row.figure.unit else ""
    cells = "".join(
        f"<td{' class=best' if cell.best else ''}>{escape(cell.text)}"
        + (f" <small>{'best' if cell.best else escape(cell.difference)}</small>" if differences else "")
        + "</td>"
        for cell in row.cells
    )
    return f'<tr><th scope="row">{escape(label)}{unit}</th>{cells}</tr>'


def _configuration(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    settings = [
        {**document["configuration"], **{f"objective {k}": v for k, v in document["objectives"].items()}}
        for document in documents
    ]
    keys = dict.fromkeys(key for each in settings for key in each)
    lines = []
    for key in keys:
        values = [_setting(each.get(key)) if key in each else "" for each in settings]
        if len(set(values)) > 1:
            cells = "".join(f"<td>{escape(value)}</td>" for value in values)
            lines.append(f'<tr class="differs"><th scope="row">{escape(key)}</th>{cells}</tr>')
        else:
            whole = f'<td colspan="{len(values)}">{escape(values[0])}</td>'
            lines.append(f'<tr><th scope="row">{escape(key)}</th>{whole}</tr>')
    note = "Where runs differ, the row is marked." if len(documents) > 1 else ""
    return (
        f'<section class="card configuration"><h2>Configuration</h2><p class="caption">{note}</p>'
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{_heads(names)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json(drawn: Sequence[Chart]) -> str:
    """Safe inside a script element: no end tag can be in it."""
    values = [
        {
            "key": chart.key,
            "run": chart.run,
            "height_px": chart.height_px,
            "run_px": chart.run_px,
            "figure": chart.figure,
        }
        for chart in drawn
    ]
    return orjson.dumps(values).decode().replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("simulator.report").joinpath("page", name).read_text(encoding="utf-8")
