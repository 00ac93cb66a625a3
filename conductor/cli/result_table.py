"""Figures of runs as tables in the terminal: of every command the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

from simulator.report import compare

_COLUMNS: Final = (  # heading, the figure's path in a summary, and how it is shown
    ("TTFT\nmean", ("time_to_first_token", "avg"), "{:,.0f}"),
    ("\np50", ("time_to_first_token", "p50"), "{:,.0f}"),
    ("\np99", ("time_to_first_token", "p99"), "{:,.0f}"),
    ("TBT\nmean", ("longest_tenth_token_latency", "avg"), "{:,.0f}"),
    ("\np99", ("longest_tenth_token_latency", "p99"), "{:,.0f}"),
    ("TTFT\nmet %", ("ttft_fraction",), "{:.1%}"),
    ("TBT\nmet %", ("tbt_fraction",), "{:.1%}"),
    ("good\n%", ("good_request_fraction",), "{:.1%}"),
    ("reuse\n%", ("prefix_cache_reused_ratio",), "{:.1%}"),
    ("load\nCV", ("load_variation",), "{:.2f}"),
    ("not\nserved", ("error_request_count",), "{:d}"),
)

_NOT_SERVED: Final = {
    "rejected": "turned away by admission",
    "refused": "too long for every instance",
    "failed": "lost with their instance",
}


def result_table(title: str, summaries: Mapping[str, Mapping[str, Any]], *, of: str = "policy") -> Table:
    """A row for each run, by its name; ``of`` heads the names. Times are in milliseconds; fits 80 columns.

    The last row has the bounds, where all runs have the same.
    """
    every = list(summaries.values())
    limits = every[0]["bounds"] if all(each["bounds"] == every[0]["bounds"] for each in every) else None
    caption = "TTFT and TBT in ms; TBT: the longest tenth of a request's gaps"
    caption += "\nbound: what no scheduler can exceed" if limits else ""
    caption += "".join(
        f"\n{text}" for name, each in summaries.items() for text in _why_not_served(name, each)
    )
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0)
    table.add_column(of, no_wrap=True)
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_row(name, *(_cell(summary, path, form) for _, path, form in _COLUMNS))
    if limits:
        table.add_section()
        table.add_row("bound", *_bound_cells(limits, every[0]))
    return table


def _why_not_served(name: str, summary: Mapping[str, Any]) -> list[str]:
    kinds = [
        f"{count:,} {words}"
        for kind, words in _NOT_SERVED.items()
        if (count := summary["outcomes"].get(kind))
    ]
    return [f"not served by {name}: {', '.join(kinds)}"] if kinds else []


def _bound_cells(limits: Mapping[str, float], summary: Mapping[str, Any]) -> list[str]:
    requests = summary["request_count"] + summary["error_request_count"]
    known = {
        "time_to_first_token": {"avg": limits["mean_time_to_first_token"]},
        "good_request_fraction": limits["good_request_count"] / requests,
        "prefix_cache_reused_ratio": limits["prefix_cache_reused_ratio_capacity"],
    }
    return [
        _cell(known, path, form) if path[0] in known and path[-1] in (path[0], "avg") else ""
        for _, path, form in _COLUMNS
    ]


def comparison_table(title: str, names: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each run, a row for each figure; the best of a row is marked with a star."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    group = None
    for row in compare(summaries):
        if row.figure.group != group:
            group = row.figure.group
            table.add_row(f"[bold]{group}[/bold]", *("" for _ in names))
        label = f"  {row.figure.label} [dim]{row.figure.unit}[/dim]"
        cells = (f"[bold green]{c.text} *[/bold green]" if c.best else f"{c.text}  " for c in row.cells)
        table.add_row(label, *cells)
    return table


def _cell(summary: Mapping[str, Any], path: tuple[str, ...], form: str) -> str:
    value: Any = summary
    for key in path:
        value = None if value is None else value[key]
    return "-" if value is None else form.format(value).removesuffix("%")
