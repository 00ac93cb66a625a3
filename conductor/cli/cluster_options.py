"""Options that say which simulated cluster, and how requests are placed on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from conductor.admission import RULES
from conductor.cli.trace_options import fail
from conductor.configuration_faults import read_yaml
from simulator.experiments.clusters import Setting

InstanceClassOption = Annotated[
    str | None,
    typer.Option(
        help="Speeds and sizes of the instances of a short form such as 8 or 4p4d, by catalogue name."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Another value for a key of the cluster: instances.*.kv_tokens=200k, "
        "scheduling.admission.queue.capacity=50. May be repeated.",
    ),
]
TtftObjective = Annotated[float | None, typer.Option(min=1e-6, help="Objective of the time to first token.")]
TbtObjective = Annotated[
    float | None,
    typer.Option(min=1e-6, help="Objective of the mean of a request's longest tenth of token gaps."),
]
Admission = Annotated[
    str | None,
    typer.Option(metavar="RULE", help=f"Admission rule: {', '.join(RULES)}. Its parameters: --set."),
]
Hold = Annotated[
    int | None,
    typer.Option(min=0, help="Requests that may wait at the router for a short queue; 0: none waits."),
]


def read_setting(console: Console, text: str) -> Setting:
    """``PATH=VALUE``; exit code 2 for anything else."""
    path, sign, value = text.partition("=")
    if not sign or not path.strip() or not value.strip():
        fail(console, f"--set {text!r} must look like instances.*.kv_tokens=200k")
    return path.strip(), read_value(value)


def read_value(text: str) -> Any:
    """A value as it would stand in a cluster file."""
    try:
        return read_yaml(text)
    except yaml.YAMLError:
        return text


def scheduling_settings(
    ttft_objective_s: float | None,
    tbt_objective_s: float | None,
    admission: str | None,
    hold: int | None,
) -> list[Setting]:
    """What these options set in a cluster file."""
    given: dict[str, Any] = {
        "scheduling.objectives.ttft_s": ttft_objective_s,
        "scheduling.objectives.tbt_s": tbt_objective_s,
        "scheduling.admission.rule": admission,
        "scheduling.admission.queue.capacity": hold,
    }
    return [(path, value) for path, value in given.items() if value is not None]
