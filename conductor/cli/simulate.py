"""`conductor simulate`: a trace against a simulated cluster, policy by policy, in virtual time."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conductor.admission import WaitingRoom
from conductor.catalogue import INSTANCE_CLASSES
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives
from conductor.policies import POLICIES, make_policy
from simulator.cluster import (
    BLOCK_TOKENS,
    ClusterSimulation,
    ClusterSpec,
    Request,
    Simulated,
    make_scheduler,
    requests_of,
    reuse_bound,
    uniform,
)
from simulator.report import request_rows, summary
from simulator.workloads import TraceError, read_mooncake

_SHOWN_EVERY = 64  # requests: drawing takes longer than simulating


@dataclass(frozen=True, slots=True)
class _Plan:
    cluster: ClusterSpec
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
        cluster=_cluster(console, cluster, instance_class, cache_blocks),
        policies=_policies(console, policy),
        requests=_requests(console, trace, speed, limit),
        objectives=Objectives(ttft_objective_s, tbt_objective_s),
        hold=hold,
        step_by_step=step_by_step,
    )
    figures: dict[str, dict[str, Any]] = {}
    for name, simulated in _simulate(console, plan).items():
        figures[name] = summary(simulated, plan.objectives)
        if requests:
            figures[name]["requests"] = request_rows(simulated)
    if as_json:
        result = {
            "trace": str(trace),
            "cluster": cluster,
            "instance_class": instance_class,
            "speed": speed,
            "hold": hold,
            "cache_blocks": plan.cluster.instances[0].kv_tokens // BLOCK_TOKENS,
            "ttft_objective_s": ttft_objective_s,
            "tbt_objective_s": tbt_objective_s,
            "prefix_cache_reuse_bound": round(reuse_bound(plan.requests), 6),
            "policies": figures,
        }
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        title = f"{len(plan.requests)} requests, {speed:g} times as fast, on {cluster} x {instance_class}"
        _print(Console(), title, figures, reuse_bound(plan.requests))


def _cluster(console: Console, cluster: str, instance_class: str, cache_blocks: int) -> ClusterSpec:
    if instance_class not in INSTANCE_CLASSES:
        _fail(console, f"unknown instance class {instance_class!r}; known: {', '.join(INSTANCE_CLASSES)}")
    try:
        return uniform(cluster, INSTANCE_CLASSES[instance_class], kv_tokens=cache_blocks * BLOCK_TOKENS)
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

            scheduler = make_scheduler(plan.cluster, make_policy(name), plan.objectives)
            dispatcher = Dispatcher(scheduler, WaitingRoom(plan.hold) if plan.hold else None)
            simulation = ClusterSimulation(
                scheduler, plan.cluster, dispatcher, step_by_step=plan.step_by_step
            )
            simulated[name] = simulation.run(plan.requests, on_end)
            progress.update(task, completed=ended)
    return simulated


def _fail(console: Console, message: str) -> NoReturn:
    console.print(message, style="red", markup=False)
    raise typer.Exit(2)


_COLUMNS = (  # heading, the figure's name, and which statistic of it; fractions are shown in per cent
    ("TTFT\nmean", "time_to_first_token", "avg"),
    ("\np50", "time_to_first_token", "p50"),
    ("\np99", "time_to_first_token", "p99"),
    ("TBT\nmean", "longest_tenth_token_latency", "avg"),
    ("\np99", "longest_tenth_token_latency", "p99"),
    ("TTFT\nmet %", "ttft_fraction", None),
    ("TBT\nmet %", "tbt_fraction", None),
    ("good\n%", "good_request_fraction", None),
    ("reuse\n%", "prefix_cache_reused_ratio", None),
)


def _print(console: Console, title: str, figures: dict[str, dict[str, Any]], reusable: float) -> None:
    caption = f"one cache without limit would reuse {reusable:.1%}"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0)
    table.add_column("policy", no_wrap=True)
    for heading in (*(column[0] for column in _COLUMNS), "load\nCV", "not\nserved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, each in figures.items():
        cells = []
        for _, name, statistic in _COLUMNS:
            if statistic is None:
                cells.append(f"{each[name] * 100:.1f}")
            else:
                cells.append(f"{each[name][statistic]:,.0f}" if each[name] else "-")
        table.add_row(policy, *cells, f"{each['load_variation']:.2f}", str(each["error_request_count"]))
    console.print(table)
