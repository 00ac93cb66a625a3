"""`conductor experiment`: experiments written down in files, their figures beside those of their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from conductor.catalogue import MODELS, kv_bytes
from conductor.cli.json_output import JsonOption, write_json
from conductor.cli.point_runs import (
    HtmlPage,
    Jobs,
    OutFolder,
    RayAddress,
    make_runner,
    points_report,
    print_points,
    run_with_progress,
    write_page,
)
from conductor.cli.trace_options import fail
from simulator.experiments.experiment_file import (
    Experiment,
    find_experiment,
    read_experiment,
    shipped_experiments,
)
from simulator.experiments.experiment_points import experiment_points

experiment = typer.Typer(
    help=(
        "Experiments: a question, what is simulated to answer it, and the figures of its source beside ours.\n\n"
        "conductor experiment list shows those that are shipped; docs/simulation.md says how to write one."
    ),
    no_args_is_help=True,
)

_GIB = 1 << 30


@experiment.command("list")
def list_experiments() -> None:
    """The shipped experiments: name, title, question and source."""
    console = Console()
    for path in shipped_experiments():
        each = read_experiment(path)
        console.print(f"[bold]{path.stem}[/bold]: {each.title}", highlight=False)
        console.print(f"  {each.question}", markup=False, highlight=False)
        console.print(f"  Source: {each.source}\n", markup=False, highlight=False)


@experiment.command()
def run(
    name: Annotated[str, typer.Argument(help="A shipped experiment, or a file.", show_default=False)],
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder of the traces; default: what CONDUCTOR_TRACES says, else here."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the part that the experiment names for this.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=VALUE,...", help="Only these points: workload=chat,rag. May be repeated."
        ),
    ] = None,
    jobs: Jobs = None,
    ray: RayAddress = None,
    out: OutFolder = None,
    json_path: JsonOption = None,
    html: HtmlPage = None,
) -> None:
    """Run an experiment and show its figures, those of its source beside them.

    Examples:

      conductor experiment run policies --quick

      conductor experiment run policies --traces ~/traces --only workload=conversation --out results
    """
    console = Console(stderr=True)
    path = find_experiment(name)
    chosen = read_experiment(path)
    if chosen.sizes:
        _sizes(path.stem, chosen, json_path)
        return
    points = experiment_points(
        *(chosen, path.parent),
        traces=traces,
        quick=quick,
        only=_labels(console, only or []),
        with_curves=html is not None,
    )
    figures = run_with_progress(console, points, make_runner(jobs, ray), out)
    expected = [chosen.expected_of(dict(point.labels)) for point in points]
    if json_path is not None:
        rows = points_report(points, figures)
        report = [row | {"expected": each} for row, each in zip(rows, expected, strict=True)]
        write_json(json_path, _described(path.stem, chosen) | {"quick": quick, "points": report})
    if json_path != "-":
        stdout = Console()
        _print_question(stdout, chosen)
        print_points(stdout, chosen.title, points, figures, chosen.report, expected)
    if html is not None:
        write_page(console, html, chosen.title, points, figures)


def _sizes(name: str, chosen: Experiment, json_path: str | None) -> None:
    rows = [
        {
            **size.model_dump(mode="json"),
            "kv_bytes": kv_bytes(MODELS[size.model], size.context_tokens, size.kv),
        }
        for size in chosen.sizes
    ]
    if json_path is not None:
        write_json(json_path, _described(name, chosen) | {"sizes": rows})
    if json_path == "-":
        return
    console = Console()
    _print_question(console, chosen)
    table = Table(title=chosen.title, box=box.SIMPLE_HEAD)
    for heading in ("model", "context", "KV"):
        table.add_column(heading)
    for heading in ("GiB", "source"):
        table.add_column(heading, justify="right")
    for row in rows:
        source = "-" if row["expected_gib"] is None else f"{row['expected_gib']:g}"
        cells = (
            row["model"],
            f"{row['context_tokens']:,}",
            row["kv"],
            f"{row['kv_bytes'] / _GIB:.3f}",
            source,
        )
        table.add_row(*cells)
    console.print(table)


def _described(name: str, chosen: Experiment) -> dict[str, Any]:
    return {
        "experiment": name,
        **chosen.model_dump(mode="json", include={"title", "question", "source", "notes"}),
    }


def _print_question(console: Console, chosen: Experiment) -> None:
    console.print(f"{chosen.question}\nSource: {chosen.source}", markup=False, highlight=False)
    if chosen.notes:
        console.print(chosen.notes.strip(), markup=False, highlight=False)


def _labels(console: Console, texts: list[str]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for text in texts:
        label, sign, values = text.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not sign or not listed:
            fail(console, f"--only {text!r} must look like workload=chat,rag")
        wanted.setdefault(label.strip(), []).extend(listed)
    return wanted
