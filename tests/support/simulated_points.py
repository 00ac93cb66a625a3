"""Small simulations, for tests of what runs many of them."""

from __future__ import annotations

from pathlib import Path

from simulator.experiments.clusters import find_cluster
from simulator.experiments.grid import NamedCluster, PolicyChoice, all_points
from simulator.experiments.point import Point
from simulator.experiments.workload import Generated, Load, Workload
from simulator.workloads import generate, mooncake_line


def small_trace(folder: Path, requests: int = 60) -> Path:
    path = folder / "small.jsonl"
    path.write_bytes(b"".join(map(mooncake_line, generate("api", requests, 10.0, seed=2))))
    return path


def small_points(
    workload: Workload | None = None,
    *,
    clusters: tuple[str, ...] = ("1", "1p1d"),
    policies: tuple[str, ...] = ("slo", "random"),
    rates: tuple[float, ...] = (5.0, 20.0),
    good_share: float | None = None,
) -> list[Point]:
    """Eight points of 40 requests each, unless said otherwise."""
    workload = workload or Workload(Generated("api", 40, 10.0))
    named = [NamedCluster((("cluster", text),), find_cluster(text).make()) for text in clusters]
    choices = {policy: PolicyChoice(policy) for policy in policies}
    loads = [Load(rate=rate) for rate in rates]
    return all_points({workload.name: workload}, named, choices, loads, good_share=good_share)
