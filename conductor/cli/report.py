"""`conductor report`: runs that were kept in files, side by side, in the terminal and as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement

from conductor.cli.result_table import comparison_table, result_table
from simulator.report import RunFileError, distinct_names, html_report, read_run_file


def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Run files, as conductor replay --save writes them.", metavar="FILES..."),
    ],
    html: Annotated[Path | None, typer.Option(help="Write one HTML page that needs nothing else.")] = None,
    title: Annotated[str, typer.Option(help="Of the page and the table.")] = "Conductor: runs compared",
) -> None:
    """Compare the runs in FILES: a table here, and with --html plots of latencies, reuse, outcomes and load.

    The page works without a network. The best of each row is marked with a star.
    """
    console = Console(stderr=True)
    try:
        documents = [read_run_file(path) for path in files]
    except (RunFileError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    names = distinct_names(documents)
    summaries = [document["summary"] for document in documents]
    out = Console()
    table = comparison_table(title, names, summaries)
    if Measurement.get(out, out.options.update(width=10_000), table).maximum > out.width:
        table = result_table(title, dict(zip(names, summaries, strict=True)), of="run")
    out.print(table)
    if html is not None:
        try:
            html.write_text(html_report(title, documents), encoding="utf-8")
        except OSError as error:
            console.print(f"cannot write {html}: {error.strerror}", style="red", markup=False)
            raise typer.Exit(2) from None
        console.print(f"wrote {html} ({html.stat().st_size / 1e6:.1f} MB)", highlight=False)
