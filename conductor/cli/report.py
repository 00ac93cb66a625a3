"""`conductor report`: runs that were kept in files, side by side, in the terminal and as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement

from conductor.cli.output_files import writable_file
from conductor.cli.result_table import comparison_table, result_table
from conductor.cli.trace_options import fail
from simulator.report import RunFileError, distinct_names, html_report, read_run_file


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Run files, as conductor replay --save writes them, or the folder that it wrote them to.",
            metavar="FILES...",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write one HTML page that needs nothing else.", callback=writable_file)
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page and the table.")] = "Conductor: runs compared",
) -> None:
    """Compare the runs in FILES: a table here, and with --html plots of latencies, reuse, outcomes and load.

    The page works without a network. The best of each row is marked with a star.
    """
    console = Console(stderr=True)
    try:
        documents = [read_run_file(path) for path in _run_files(files)]
    except RunFileError as error:
        fail(console, str(error))
    except OSError as error:
        fail(console, f"cannot read {error.filename}: {error.strerror}")
    if not documents:
        fail(
            console,
            f"there is no run file in {', '.join(map(str, files))}: conductor replay --save writes them",
        )
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
            fail(console, f"cannot write {html}: {error.strerror}")
        console.print(f"wrote {html} ({html.stat().st_size / 1e6:.1f} MB)", highlight=False)


def _run_files(given: list[Path]) -> list[Path]:
    """Of a folder all its run files; the traces that lie beside them (and in ``FOLDER/*``) are of another kind."""
    files: list[Path] = []
    for path in given:
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [path for path in files if not path.name.endswith(".trace.json.gz")]
