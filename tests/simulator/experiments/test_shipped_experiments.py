"""Every shipped experiment: it can be read, simulated, and is described with its results."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_points import small_trace

from simulator.experiments.cache import cache_rows
from simulator.experiments.experiment_file import Experiment, read_experiment, shipped_experiments
from simulator.experiments.experiment_points import experiment_points
from simulator.experiments.figures import FIGURES
from simulator.experiments.order import check_orders
from simulator.experiments.point import Point
from simulator.experiments.runs import in_this_process, run_points

DOCS = Path(__file__).parents[3] / "docs" / "experiments.md"
SIMULATED = [path for path in shipped_experiments() if read_experiment(path).clusters]


def a_point_of_each_cluster(points: list[Point]) -> list[Point]:
    by_cluster = {(point.labels[1], dict(point.labels).get("variant")): point for point in points}
    return list(by_cluster.values())


@pytest.mark.parametrize("path", SIMULATED, ids=lambda path: path.stem)
def test_fifty_requests_run_on_every_cluster(path: Path) -> None:
    shipped = read_experiment(path)
    points = experiment_points(shipped, path.parent, traces=None, quick=True, limit=50)
    for figures in run_points(a_point_of_each_cluster(points), in_this_process):
        assert sum(figures["outcomes"].values()) == 50
        assert all(FIGURES[name].value(figures) is not None for name in shipped.report if "ttft" not in name)


@pytest.mark.parametrize("path", SIMULATED, ids=lambda path: path.stem)
def test_expectations_and_orders_are_of_points_that_there_are(path: Path, tmp_path: Path) -> None:
    shipped = read_experiment(path)
    traces_of(shipped, tmp_path)
    points = experiment_points(shipped, path.parent, traces=tmp_path)
    labels = [dict(point.labels) for point in points]
    for each in shipped.expected:
        assert any(each.where.items() <= found.items() for found in labels), each
        assert set(each.figures) <= set(shipped.report), each
    for order in shipped.orders:
        assert set(order.ascending) <= {found[order.label] for found in labels}, order
    same = [{"goodput": 1.0, "time_to_first_token": {"avg": 1.0}}] * len(points)
    if any(order.figure in ("goodput", "mean_ttft_s") for order in shipped.orders):
        assert check_orders(shipped, points, same)


def test_the_experiment_of_caches_runs(tmp_path: Path) -> None:
    for path in shipped_experiments():
        shipped = read_experiment(path)
        if shipped.caches:
            traces_of(shipped, tmp_path)
            rows = list(cache_rows(shipped, traces=tmp_path, limit=50))
            assert len(rows) == len(shipped.caches)
            assert list(cache_rows(shipped, traces=None, quick=True, limit=50))


def test_every_experiment_is_described_with_its_command() -> None:
    text = DOCS.read_text()
    for path in shipped_experiments():
        assert f"conductor experiment run {path.stem}" in text, path.stem


def traces_of(shipped: Experiment, folder: Path) -> None:
    for section in shipped.workloads.values():
        if section.trace is not None:
            small_trace(folder).rename(folder / section.trace)
