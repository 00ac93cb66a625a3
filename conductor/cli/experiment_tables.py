"""What is shown of experiments beside the table of their points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from conductor.cli.point_runs import differing_labels
from conductor.cli.whole_tables import print_whole
from simulator.experiments.cache import CacheRow
from simulator.experiments.figures import FIGURES
from simulator.experiments.order import CheckedOrder
from simulator.experiments.point import Figures, Point

_GIB: Final = 1 << 30


def print_across(
    console: Console,
    title: str,
    points: Sequence[Point],
    figures: Sequence[Figures],
    across: Sequence[str],
    name: str,
) -> None:
    """The figure of that name, with a column for each value of the labels ``across`` and a row for the others."""
    figure = FIGURES[name]
    shown = [label for label in differing_labels(points) if label not in across]
    cells: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    for point, each in zip(points, figures, strict=True):
        labels = dict(point.labels)
        row = cells.setdefault(tuple(labels[label] for label in shown), {})
        row[tuple(labels[label] for label in across)] = figure.text(figure.value(each))
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    table = Table(
        title=f"{title}: {figure.heading}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    for label in shown:
        table.add_column(label, no_wrap=True)
    for column in columns:
        table.add_column("\n".join(column), justify="right", no_wrap=True)
    for labels_of_row, row in cells.items():
        table.add_row(*labels_of_row, *(row.get(column, "") for column in columns))
    print_whole(console, table)


def print_orders(console: Console, orders: Sequence[CheckedOrder]) -> None:
    """One line for each order: whether it is the source's, and ours with its figures."""
    for checked in orders:
        figure = FIGURES[checked.order.figure]
        ours = " < ".join(f"{name} {figure.text(value)}" for name, value in checked.ours)
        where = ", ".join(value for _, value in checked.labels)
        verdict = "as expected" if checked.holds else f"NOT as expected ({' < '.join(checked.expected)})"
        text = f"{figure.heading} ({where}): {verdict}: {ours}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_caches(console: Console, title: str, rows: Sequence[CacheRow]) -> None:
    """Hit rates in percent of the blocks that are looked up; the source's stand beside LRU."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("workload", no_wrap=True)
    for heading in ("cache, tokens", "LRU %", "source", "best %", "LRU of best"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        source, reuse = row.cache.expected_percent, row.reuse
        share = reuse.lru_hit_rate / reuse.belady_hit_rate if reuse.belady_hit_rate else 1.0
        table.add_row(
            row.cache.workload,
            f"{row.cache.capacity_tokens:,}",
            f"{reuse.lru_hit_rate * 100:.1f}",
            "-" if source is None else f"{source:.1f}",
            f"{reuse.belady_hit_rate * 100:.1f}",
            f"{share:.0%}",
        )
    print_whole(console, table)


def print_sizes(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """KV cache of a request in GiB, the source's beside ours."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("model", "context", "KV"):
        table.add_column(heading)
    for heading in ("GiB", "source"):
        table.add_column(heading, justify="right")
    for row in rows:
        source = "-" if row["expected_gib"] is None else f"{row['expected_gib']:g}"
        gib = f"{row['kv_bytes'] / _GIB:.3f}"
        table.add_row(row["model"], f"{row['context_tokens']:,}", row["kv"], gib, source)
    console.print(table)
