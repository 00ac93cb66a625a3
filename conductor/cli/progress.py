"""Bars on stderr that say how far something is, how fast it goes, and when it will be done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:,.0f} {self._unit}/s" if speed >= 10 else f"{speed:.2g} {self._unit}/s")


def progress_bar(console: Console, unit: str, *, transient: bool = True) -> Progress:
    """Counts ``unit``; a task's description stands before its bar, its field ``note`` behind the count."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        _Rate(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        transient=transient,
    )
