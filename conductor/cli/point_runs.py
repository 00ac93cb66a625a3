"""Running the points of a sweep or an experiment from the command line, and what is shown of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from conductor.cli.output_files import writable_file, writable_folder
from conductor.cli.progress import progress_bar
from conductor.cli.trace_options import fail
from conductor.cli.whole_tables import print_whole
from simulator.experiments.figures import FIGURES
from simulator.experiments.point import Figures, Point, point_document
from simulator.experiments.runs import Runner, in_processes, run_points
from simulator.report import html_report

Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Simulations at a time; default: one a processor.", show_default=False),
]
OutFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps each result; run again, what is there with the same configuration is not "
        "simulated.",
        callback=writable_folder,
        is_eager=True,
    ),
]
HtmlPage = Annotated[
    Path | None,
    typer.Option(help="Write one HTML page with plots of all simulations.", callback=writable_file),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: its address, auto for the one of this machine, local for a new one.",
    ),
]


def make_runner(jobs: int | None, ray_address: str | None) -> Runner:
    """Raises ConfigError where Ray is asked for and not installed."""
    if ray_address is None:
        return in_processes(jobs or len(os.sched_getaffinity(0)))
    from simulator.experiments.ray_runner import on_ray

    return on_ray(ray_address)


def run_with_progress(
    console: Console, points: Sequence[Point], runner: Runner, folder: Path | None
) -> list[Figures]:
    """The figures of all points in their order; exit code 130 when interrupted, 2 when one cannot be simulated."""
    kept = None
    try:
        with progress_bar(console, "simulations") as progress:
            task = progress.add_task("simulating", total=len(points), note="")

            def on_done(done: int) -> None:
                nonlocal kept
                if kept is None:
                    kept = done
                    progress.update(task, note=f"{kept} kept from before" if kept else "")
                progress.update(task, completed=done)

            return run_points(points, runner, folder, on_done)
    except KeyboardInterrupt:
        left = (
            f"what has ended is in {folder}"
            if folder is not None
            else "--out FOLDER would keep what has ended"
        )
        console.print(f"interrupted: {left}", style="red", markup=False)
        raise typer.Exit(130) from None
    except (OSError, ValueError) as error:
        fail(console, f"cannot simulate: {error}")


def points_report(points: Sequence[Point], figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Labels, digest and figures of each point, JSON types only."""
    return [
        {
            "labels": dict(point.labels),
            "digest": point.digest(),
            "figures": {name: figure for name, figure in each.items() if name != "curves"},
        }
        for point, each in zip(points, figures, strict=True)
    ]


def write_page(
    console: Console, path: Path, title: str, points: Sequence[Point], figures: Sequence[Figures]
) -> None:
    """Exit code 2 when it cannot be written."""
    documents = [point_document(point, each) for point, each in zip(points, figures, strict=True)]
    try:
        path.write_text(html_report(title, documents), encoding="utf-8")
    except OSError as error:
        fail(console, f"cannot write {path}: {error.strerror}")
    console.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", highlight=False, soft_wrap=True)


def print_points(
    console: Console,
    title: str,
    points: Sequence[Point],
    figures: Sequence[Figures],
    columns: Sequence[str],
    beside: Sequence[dict[str, float]] | None = None,
) -> None:
    """A row a point, with the labels that differ and the figures of those names.

    ``beside`` are figures of the points' source by name, shown in a column of their own behind ours.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown = differing_labels(points)
    for label in shown:
        table.add_column(label, no_wrap=True)
    with_source = [name for name in columns if any(name in each for each in beside or ())]
    for name in columns:
        heading = FIGURES[name].heading.replace(" ", "\n")
        table.add_column(heading, justify="right", no_wrap=True)
        if name in with_source:
            table.add_column("source", justify="right", no_wrap=True)
    for i, (point, each) in enumerate(zip(points, figures, strict=True)):
        labels = dict(point.labels)
        cells = [labels.get(label, "") for label in shown]
        for name in columns:
            figure = FIGURES[name]
            cells.append(figure.text(figure.value(each)))
            if name in with_source:
                cells.append(figure.text((beside or [{}])[i].get(name)))
        table.add_row(*cells)
    print_whole(console, table)


def differing_labels(points: Sequence[Point]) -> list[str]:
    """Labels that not all points have the same value of; the policy at least."""
    values: dict[str, set[str]] = {}
    for point in points:
        for label, value in point.labels:
            values.setdefault(label, set()).add(value)
    return [label for label, each in values.items() if len(each) > 1] or ["policy"]
