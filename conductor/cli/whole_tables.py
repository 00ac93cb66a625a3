"""Tables in files and pipes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_whole(console: Console, table: Table) -> None:
    """Nothing is cut off where the width means nothing: in files and pipes."""
    if not console.is_terminal:
        options = console.options.update(max_width=1_000)
        console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)
