"""`conductor experiment`: experiments written down in files, their figures beside those of their sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conductor.catalogue import MODELS, kv_bytes
from conductor.cli.experiment_tables import print_across, print_caches, print_orders, print_sizes
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
from conductor.cli.trace_options import Limit, fail, warn_on
from conductor.configuration_faults import did_you_mean
from simulator.experiments.cache import CacheRow, cache_rows
from simulator.experiments.experiment_file import (
    Experiment,
    find_experiment,
    read_experiment,
    shipped_experiments,
)
from simulator.experiments.experiment_points import experiment_points
from simulator.experiments.figures import FIGURES
from simulator.experiments.order import CheckedOrder, check_orders
from simulator.experiments.point import Point
from simulator.workloads import TraceError

experiment = typer.Typer(
    help=(
        "Experiments: a question, what is simulated to answer it, and the figures of its source beside ours.\n\n"
        "conductor experiment list shows those that are shipped; docs/simulation.md says how to write one."
    ),
    no_args_is_help=True,
)


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
        bool, typer.Option("--quick", help="A small run, as the experiment says; it needs no trace.")
    ] = False,
    limit: Limit = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=VALUE,...", help="Only these points: workload=chat,rag. May be repeated."
        ),
    ] = None,
    across: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL,...",
            help="Show one figure, with a column for each value of these labels: workload,load.",
        ),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(help="The figure that --across shows; default: the report's first.")
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

      conductor experiment run policies --quick --across workload,load --figure p99_ttft_s
    """
    console = Console(stderr=True)
    path = find_experiment(name)
    chosen = read_experiment(path)
    if chosen.sizes:
        _sizes(path.stem, chosen, json_path)
        return
    if chosen.caches:
        caches = cache_rows(chosen, traces=traces, quick=quick, limit=limit, warn=warn_on(console))
        _caches(console, path.stem, chosen, caches, json_path)
        return
    points = experiment_points(
        *(chosen, path.parent),
        traces=traces,
        quick=quick,
        limit=limit,
        only=_labels(console, only or []),
        with_curves=html is not None,
    )
    columns = _columns(console, across, figure, points)
    figures = run_with_progress(console, points, make_runner(jobs, ray), out)
    orders = check_orders(chosen, points, figures)
    expected = [chosen.expected_of(dict(point.labels)) for point in points]
    if json_path is not None:
        rows = points_report(points, figures)
        report = [row | {"expected": each} for row, each in zip(rows, expected, strict=True)]
        described = _described(path.stem, chosen) | {"quick": quick, "points": report}
        write_json(json_path, described | {"orders": [_order(each) for each in orders]})
    if json_path != "-":
        stdout = Console()
        _print_question(stdout, chosen)
        if columns:
            name_of_figure = figure or chosen.report[0]
            print_across(stdout, chosen.title, points, figures, columns, name_of_figure)
        else:
            print_points(stdout, chosen.title, points, figures, chosen.report, expected)
        print_orders(stdout, orders)
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
    if json_path != "-":
        stdout = Console()
        _print_question(stdout, chosen)
        print_sizes(stdout, chosen.title, rows)


def _caches(
    console: Console, name: str, chosen: Experiment, rows: Iterator[CacheRow], json_path: str | None
) -> None:
    try:
        found = list(rows)
    except (TraceError, OSError) as error:
        fail(console, f"cannot read a trace: {error}")
    if json_path is not None:
        caches = [{**row.cache.model_dump(), "found": asdict(row.reuse)} for row in found]
        write_json(json_path, _described(name, chosen) | {"caches": caches})
    if json_path != "-":
        stdout = Console()
        _print_question(stdout, chosen)
        print_caches(stdout, chosen.title, found)


def _columns(console: Console, across: str | None, figure: str | None, points: Sequence[Point]) -> list[str]:
    """The labels of --across; exit code 2 for one that points have not, or a figure that there is not."""
    if figure is not None and figure not in FIGURES:
        fail(console, f"unknown figure {figure!r}; {did_you_mean(figure, FIGURES)}")
    if across is None:
        if figure is not None:
            fail(console, "--figure is the figure that --across shows: say which labels are across")
        return []
    known = [label for label, _ in points[0].labels]
    labels = [label.strip() for label in across.split(",")]
    for label in labels:
        if label not in known:
            fail(console, f"--across: points have no label {label!r}; {did_you_mean(label, known)}")
    return labels


def _order(checked: CheckedOrder) -> dict[str, Any]:
    return {
        "figure": checked.order.figure,
        "labels": dict(checked.labels),
        "expected": list(checked.expected),
        "ours": dict(checked.ours),
        "holds": checked.holds,
    }


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
