"""One simulation of a sweep or an experiment: everything it depends on, and its figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from conductor import __version__
from conductor.admission import OutputLengths
from conductor.configured_admission import make_dispatcher, make_gate
from conductor.placement import Role
from conductor.policies import make_policy
from simulator.bounds import Bounds, bounds
from simulator.cluster import ClusterSimulation, ClusterSpec, Simulated, make_scheduler
from simulator.cluster.cluster_file import ClusterFile, SchedulingSection
from simulator.experiments.workload import Load, Requests, Workload, file_digest, requests_at
from simulator.report import Run, run_document, summary
from simulator.report.run_document import FORMAT
from simulator.workloads import TraceRecord

Figures = dict[str, Any]  # those of `summary` and some more, JSON types only

_BESIDE_SUMMARY: Final = {"prefill_busy_s_per_request", "curves", "highest_rate", "rates_tried"}

SCHEMA_VERSION: Final = 1  # of results that are kept: another number is simulated again


@dataclass(frozen=True, slots=True)
class Point:
    """A workload under a load on a cluster. ``labels`` say what sets it apart from the other points."""

    labels: tuple[tuple[str, str], ...]
    workload: Workload
    load: Load
    cluster: ClusterSpec
    scheduling: SchedulingSection
    step_by_step: bool = False
    good_share: float | None = None  # search the highest rate at which this share of the requests is good
    with_bounds: bool = False  # what no scheduler can exceed, too
    with_curves: bool = False  # what charts need, too

    def configuration(self) -> dict[str, Any]:
        """All that the figures depend on, JSON types only; a trace is named by its content."""
        workload = _plain(self.workload)
        if isinstance(self.workload.source, Path):
            workload["source"] = {"sha256": file_digest(self.workload.source)}
        return {
            "schema_version": SCHEMA_VERSION,
            "conductor": __version__,
            "workload": workload,
            "load": _plain(self.load),
            "cluster": _plain(self.cluster),
            "scheduling": _plain(self.scheduling),
            "step_by_step": self.step_by_step,
            "good_share": self.good_share,
            "with_bounds": self.with_bounds,
            "with_curves": self.with_curves,
        }

    def digest(self) -> str:
        """Of the configuration: equal digests, equal figures."""
        return hashlib.sha256(json.dumps(self.configuration(), sort_keys=True).encode()).hexdigest()


def simulate(
    setup: ClusterFile,
    workload: Requests,
    *,
    step_by_step: bool = False,
    on_end: Callable[[], None] = lambda: None,
) -> Simulated:
    """Requests on a cluster under its scheduling; ``on_end`` is called when one has ended.

    Raises ValueError for an instance whose memory does not hold a block.
    """
    cluster, scheduling = setup.cluster, setup.scheduling
    scheduler = make_scheduler(
        cluster,
        make_policy(scheduling.policy, scheduling.policy_parameters, scheduling.seed),
        scheduling.objectives_s(),
        make_gate(scheduling.admission, OutputLengths()),
        block_tokens=workload.block_tokens,
    )
    dispatcher = make_dispatcher(scheduling.admission, scheduler)
    simulation = ClusterSimulation(
        scheduler,
        cluster,
        dispatcher,
        block_tokens=workload.block_tokens,
        step_by_step=step_by_step,
        tier_planner=scheduling.tier_planner if scheduling.tier_planner.enabled else None,
        action_budget=scheduling.tier_planner.budget(),
    )
    return simulation.run(workload.requests, on_end)


def simulate_point(point: Point, records: Sequence[TraceRecord]) -> Figures:
    """The figures of a point whose workload has these records."""
    workload = requests_at(records, point.load)
    simulated = simulate(
        ClusterFile(point.cluster, point.scheduling), workload, step_by_step=point.step_by_step
    )
    limits = _bounds_once(point, workload) if point.with_bounds else None
    prefill_s = [simulated.busy_s[spec.name] for spec in point.cluster.instances if spec.role is Role.PREFILL]
    run = Run("", {}, simulated, point.scheduling.objectives_s(), limits)
    return {
        **summary(simulated, run.objectives, limits),
        "prefill_busy_s_per_request": (
            round(sum(prefill_s) / len(simulated.results), 6) if prefill_s and simulated.results else None
        ),
        **({"curves": run_document(run)["curves"]} if point.with_curves else {}),
    }


def point_document(point: Point, figures: Figures) -> dict[str, Any]:
    """The run document of a point that was simulated ``with_curves``, named by its labels."""
    labels = dict(point.labels)
    name = " ".join(value for label, value in labels.items() if label != "workload")
    scales = {"speed": point.load.speed or 1.0} if point.load.rate is None else {"rate": point.load.rate}
    settings = {label: value for label, value in labels.items() if label != "load"}
    objectives = asdict(point.scheduling.objectives_s())
    return {
        "format": FORMAT,
        "name": name,
        "configuration": settings | scales,
        "objectives": objectives,
        "summary": {name: value for name, value in figures.items() if name not in _BESIDE_SUMMARY},
        "curves": figures["curves"],
    }


_bounds: dict[str, Bounds] = {}  # of this process


def _bounds_once(point: Point, workload: Requests) -> Bounds:
    """Bounds do not depend on the policy: computed once for all of them."""
    configuration = point.configuration()
    scheduling = configuration.pop("scheduling")
    key = json.dumps([configuration, scheduling["objectives"]], sort_keys=True)
    if key not in _bounds:
        _bounds[key] = bounds(
            *(point.cluster, workload.requests, point.scheduling.objectives_s()),
            block_tokens=workload.block_tokens,
        )
    return _bounds[key]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(_plain(each) for each in value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return str(value)  # JSON has no infinity
    return str(value) if isinstance(value, Path) else value
