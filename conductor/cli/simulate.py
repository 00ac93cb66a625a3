"""`conductor simulate`: a trace against a simulated cluster, policy by policy, in virtual time."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conductor.admission import WaitingRoom
from conductor.catalogue import INSTANCE_CLASSES
from conductor.cli.kept_runs import keep_runs
from conductor.cli.result_table import result_table
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives
from conductor.policies import POLICIES, make_policy
from simulator.cluster import (
    ClusterSimulation,
    Layout,
    Request,
    Simulated,
    make_scheduler,
    read_layout,
    requests_of,
    reuse_bound,
)
from simulator.report import Run, request_rows, summary
from simulator.traces import TraceError, read_mooncake

_SHOWN_EVERY = 64  # requests: drawing takes longer than simulating


@dataclass(frozen=True, slots=True)
class _Plan:
    layout: Layout
    policies: list[str]
    requests: list[Request]
    objectives: Objectives
    hold: int
    step_by_step: bool


def simulate(
    trace: Annotated[
        Path, typer.Argument(help="Mooncake JSONL: timestamp, input_length, output_length, hash_ids.")
    ],
    cluster: Annotated[
        str,
        typer.Option(help="8 for eight mixed instances, 4p4d for four that prefill and four that decode."),
    ] = "8",
    instance_class: Annotated[str, typer.Option(help="Speeds and sizes, by catalogue name.")] = (
        "llama-3.1-8b-h100"
    ),
    policy: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = (
        "slo,lmetric,dynamo,round_robin"
    ),
    speed: Annotated[float, typer.Option(min=1e-6, help="Arrivals this many times faster.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    cache_blocks: Annotated[
        int,
        typer.Option(min=0, help="KV memory of each instance in blocks of 512 tokens; 0: as the class has."),
    ] = 0,
    ttft_objective_s: Annotated[float, typer.Option(min=1e-6, help="For time to first token.")] = 2.0,
    tbt_objective_s: Annotated[
        float, typer.Option(min=1e-6, help="For the mean of a request's longest tenth of token gaps.")
    ] = 0.05,
    hold: Annotated[
        int,
        typer.Option(min=0, help="Requests that may wait at the router for a short queue; 0: none waits."),
    ] = 0,
    step_by_step: Annotated[
        bool, typer.Option("--step-by-step", help="Every engine step by itself: slow, for checks.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for a run file (conductor report) and a Perfetto trace of each policy."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page with plots of all policies.")] = None,
    requests: Annotated[bool, typer.Option("--requests", help="With --json: also each request.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout instead of a table.")
    ] = False,
) -> None:
    """Simulate TRACE on a cluster under one or more policies and compare them.

    Engines, caches and links are modelled; the scheduler is the real one. The TTFT and TBT columns are in
    milliseconds; good requests meet both objectives. With --json, figures have AIPerf's names.
    """
    console = Console(stderr=True)
    if requests and not as_json:
        _fail(console, "--requests belongs to --json")
    plan = _Plan(
        layout=_layout(console, cluster, instance_class, cache_blocks),
        policies=_policies(console, policy),
        requests=_requests(console, trace, speed, limit),
        objectives=Objectives(ttft_objective_s, tbt_objective_s),
        hold=hold,
        step_by_step=step_by_step,
    )
    figures: dict[str, dict[str, Any]] = {}
    simulated_runs = _simulate(console, plan)
    for name, simulated in simulated_runs.items():
        figures[name] = summary(simulated, plan.objectives)
        if requests:
            figures[name]["requests"] = request_rows(simulated)
    title = f"{len(plan.requests)} requests, {speed:g} times as fast, on {cluster} x {instance_class}"
    configuration = {
        "trace": str(trace),
        "cluster": cluster,
        "instance_class": instance_class,
        "speed": speed,
        "hold": hold,
        "cache_blocks": plan.layout.capacity_blocks,
    }
    if save is not None or html is not None:
        runs = [
            Run(name, {"policy": name, **configuration}, simulated, plan.objectives)
            for name, simulated in simulated_runs.items()
        ]
        try:
            for path in keep_runs(runs, title, save=save, html=html):
                console.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", highlight=False)
        except OSError as error:
            _fail(console, f"cannot write {error.filename}: {error.strerror}")
    if as_json:
        result = {
            **configuration,
            "ttft_objective_s": ttft_objective_s,
            "tbt_objective_s": tbt_objective_s,
            "prefix_cache_reuse_bound": round(reuse_bound(plan.requests), 6),
            "policies": figures,
        }
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        caption = f"one cache without limit would reuse {reuse_bound(plan.requests):.1%}"
        Console().print(result_table(title, figures, caption=caption))


def _layout(console: Console, cluster: str, instance_class: str, cache_blocks: int) -> Layout:
    if instance_class not in INSTANCE_CLASSES:
        _fail(console, f"unknown instance class {instance_class!r}; known: {', '.join(INSTANCE_CLASSES)}")
    try:
        return read_layout(cluster, INSTANCE_CLASSES[instance_class], cache_blocks)
    except ValueError as error:
        _fail(console, f"--cluster: {error}")


def _policies(console: Console, names: str) -> list[str]:
    policies = [name.strip() for name in names.split(",") if name.strip()]
    for name in policies:
        if name not in POLICIES:
            _fail(console, f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    if not policies:
        _fail(console, f"--policy names none; known: {', '.join(POLICIES)}")
    return list(dict.fromkeys(policies))


def _requests(console: Console, trace: Path, speed: float, limit: int | None) -> list[Request]:
    try:
        requests = list(requests_of(islice(read_mooncake(trace), limit), speed))
    except (TraceError, OSError, ValueError) as error:
        _fail(console, f"cannot read the trace: {error}")
    if not requests:
        _fail(console, f"{trace} holds no requests")
    return requests


def _simulate(console: Console, plan: _Plan) -> dict[str, Simulated]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    simulated = {}
    with Progress(*columns, console=console, transient=True) as progress:
        for name in plan.policies:
            task = progress.add_task(name, total=len(plan.requests))
            ended = 0

            def on_end() -> None:
                nonlocal ended
                ended += 1
                if ended % _SHOWN_EVERY == 0:
                    progress.update(task, completed=ended)  # noqa: B023  (called in this round only)

            scheduler = make_scheduler(plan.layout, make_policy(name), plan.objectives)
            dispatcher = Dispatcher(scheduler, WaitingRoom(plan.hold) if plan.hold else None)
            simulation = ClusterSimulation(scheduler, dispatcher, step_by_step=plan.step_by_step)
            simulated[name] = simulation.run(plan.requests, on_end)
            progress.update(task, completed=ended)
    return simulated


def _fail(console: Console, message: str) -> NoReturn:
    console.print(message, style="red", markup=False)
    raise typer.Exit(2)
