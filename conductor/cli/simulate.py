"""`conductor replay TRACE --cluster CLUSTER`: policies compared on a simulated cluster, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from conductor.cli.json_output import write_json
from conductor.cli.kept_runs import keep_runs
from conductor.cli.progress import progress_bar
from conductor.cli.result_table import result_table
from conductor.cli.start_up import announce_compilation
from conductor.cli.trace_options import fail
from conductor.policies import POLICIES
from simulator.bounds import Bounds, bounds
from simulator.cluster import Simulated
from simulator.cluster.cluster_file import ClusterFile
from simulator.experiments.point import simulate
from simulator.experiments.workload import Load, Requests
from simulator.report import Run, request_rows, summary, write_chrome_trace

_SHOWN_EVERY = 64  # requests: drawing takes longer than simulating


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What is simulated, under each of the policies; ``trace`` and ``cluster`` as they were asked for."""

    trace: str
    cluster: str
    setup: ClusterFile
    policies: list[str]
    workload: Requests
    load: Load
    with_bounds: bool = True
    step_by_step: bool = False


@dataclass(frozen=True, slots=True)
class SimulationOutputs:
    """Where the results go, beside the table on stdout."""

    json_path: str | None = None
    with_requests: bool = False
    save: Path | None = None  # folder
    html: Path | None = None
    perfetto: Path | None = None  # of the only policy


def read_policies(console: Console, names: str | None, default: str) -> list[str]:
    """Policies separated by commas, or ``all``; exit code 2 for one that is not known."""
    if names is None:
        return [default]
    if names == "all":
        return list(POLICIES)
    policies = [name.strip() for name in names.split(",") if name.strip()]
    for name in policies:
        if name not in POLICIES:
            fail(console, f"unknown policy {name!r}; known: {', '.join(POLICIES)} (or all)")
    if not policies:
        fail(console, f"--policy names none; known: {', '.join(POLICIES)} (or all)")
    return list(dict.fromkeys(policies))


def replay_simulated(console: Console, plan: SimulationPlan, outputs: SimulationOutputs) -> None:
    """Simulate, and write what was asked for; exit code 130 when interrupted, 2 when the cluster cannot be."""
    announce_compilation()
    try:
        simulated = _simulate(console, plan)
        limits = _bounds(console, plan) if plan.with_bounds else None
    except KeyboardInterrupt:
        console.print("interrupted: what was simulated so far is discarded", style="red")
        raise typer.Exit(130) from None
    except ValueError as error:
        fail(console, f"cannot simulate {plan.cluster}: {error}")
    objectives = plan.setup.scheduling.objectives_s()
    figures: dict[str, dict[str, Any]] = {
        policy: summary(each, objectives, limits) for policy, each in simulated.items()
    }
    if outputs.json_path is not None:
        policies = figures
        if outputs.with_requests:
            policies = {
                name: each | {"requests": request_rows(simulated[name])} for name, each in figures.items()
            }
        write_json(outputs.json_path, _report(plan, policies))
    if outputs.json_path != "-":
        Console().print(result_table(_title(plan), figures))
    _keep(console, plan, simulated, limits, outputs)


def _keep(
    console: Console,
    plan: SimulationPlan,
    simulated: dict[str, Simulated],
    limits: Bounds | None,
    outputs: SimulationOutputs,
) -> None:
    """Run files, traces and the page, where they were asked for."""
    configuration = {
        "trace": plan.trace,
        "cluster": plan.cluster,
        "speed": plan.load.speed,
        "rate": plan.load.rate,
    }
    scheduling = plan.setup.scheduling.model_dump(mode="json", exclude={"policy", "objectives"})
    runs = [
        Run(
            *(policy, {"policy": policy, **configuration, **scheduling}, each),
            *(plan.setup.scheduling.objectives_s(), limits),
        )
        for policy, each in simulated.items()
    ]
    outages = plan.setup.cluster.outages
    try:
        written = keep_runs(runs, _title(plan), save=outputs.save, html=outputs.html, outages=outages)
        if outputs.perfetto is not None:
            (only,) = simulated.values()
            write_chrome_trace(outputs.perfetto, only, outages)
            written.append(outputs.perfetto)
    except OSError as error:
        fail(console, f"cannot write {error.filename}: {error.strerror}")
    for path in written:
        console.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", highlight=False, soft_wrap=True)


def _simulate(console: Console, plan: SimulationPlan) -> dict[str, Simulated]:
    simulated = {}
    with progress_bar(console, "requests") as progress:
        for policy in plan.policies:
            task = progress.add_task(policy, total=len(plan.workload.requests), note="")
            ended = 0

            def on_end() -> None:
                nonlocal ended
                ended += 1
                if ended % _SHOWN_EVERY == 0:
                    progress.update(task, completed=ended)  # noqa: B023  (called in this round only)

            setup = replace(plan.setup, scheduling=plan.setup.scheduling.policy_named(policy))
            simulated[policy] = simulate(setup, plan.workload, step_by_step=plan.step_by_step, on_end=on_end)
            progress.update(task, completed=ended)
    return simulated


def _bounds(console: Console, plan: SimulationPlan) -> Bounds:
    with progress_bar(console, "%") as progress:
        task = progress.add_task("bounds", total=100, note="")
        return bounds(
            *(plan.setup.cluster, plan.workload.requests, plan.setup.scheduling.objectives_s()),
            block_tokens=plan.workload.block_tokens,
            on_progress=lambda fraction: progress.update(task, completed=100 * fraction),
        )


def _report(plan: SimulationPlan, policies: dict[str, Any]) -> dict[str, Any]:
    scheduling = plan.setup.scheduling
    return {
        "trace": plan.trace,
        "requests": len(plan.workload.requests),
        "block_tokens": plan.workload.block_tokens,
        "speed": plan.load.speed,
        "rate": plan.load.rate,
        "cluster": plan.cluster,
        "instances": [
            {
                "name": spec.name,
                "role": spec.role.value,
                "instance_class": spec.instance_class.name,
                "kv_tokens": spec.kv_tokens,
            }
            for spec in plan.setup.cluster.instances
        ],
        "scheduling": scheduling.model_dump(mode="json", exclude={"policy"}),
        "policies": policies,
    }


def _load(load: Load) -> str:
    if load.rate is not None:
        return f"{load.rate:g} a second"
    return "as recorded" if load.speed in (None, 1.0) else f"{load.speed:g} times as fast"


def _title(plan: SimulationPlan) -> str:
    return f"{len(plan.workload.requests)} requests, {_load(plan.load)}, on {plan.cluster}"
