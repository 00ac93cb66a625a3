"""All combinations of workloads, clusters, policies and loads, as points in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.policies import make_policy
from simulator.cluster.cluster_file import ClusterFile, SchedulingSection
from simulator.experiments.point import Point
from simulator.experiments.workload import Load, Workload


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy with parameters of its own; without any, those of the cluster file, if it names that policy."""

    policy: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make_policy(self.policy, self.parameters)  # raises ValueError for what is not known

    def of(self, scheduling: SchedulingSection) -> SchedulingSection:
        named = scheduling.policy_named(self.policy)
        if not self.parameters:
            return named
        return named.model_copy(update={"policy_parameters": dict(self.parameters)})


@dataclass(frozen=True, slots=True)
class NamedCluster:
    """``labels`` say what sets it apart from the others."""

    labels: tuple[tuple[str, str], ...]
    setup: ClusterFile


def all_points(
    workloads: Mapping[str, Workload],
    clusters: Sequence[NamedCluster],
    policies: Mapping[str, PolicyChoice] | None,
    loads: Sequence[Load],
    *,
    good_share: float | None = None,
    with_bounds: bool = False,
    with_curves: bool = False,
) -> list[Point]:
    """One point for each combination, the last of these varying fastest.

    ``policies`` by their labels; None: each cluster's own. With ``good_share`` every point is a search for the
    highest rate, and loads only say what is drawn.
    """
    return [
        Point(
            labels=(
                ("workload", workload_name),
                *cluster.labels,
                ("policy", policy_name),
                ("load", "highest rate" if good_share is not None else str(load)),
            ),
            workload=workload,
            load=load,
            cluster=cluster.setup.cluster,
            scheduling=choice.of(cluster.setup.scheduling),
            good_share=good_share,
            with_bounds=with_bounds,
            with_curves=with_curves,
        )
        for workload_name, workload in workloads.items()
        for cluster in clusters
        for policy_name, choice in (policies or _own(cluster.setup)).items()
        for load in loads
    ]


def _own(setup: ClusterFile) -> dict[str, PolicyChoice]:
    return {setup.scheduling.policy: PolicyChoice(setup.scheduling.policy)}
