"""Points: equal configurations have equal digests and equal figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_points import small_points, small_trace

from simulator.experiments.point import Point, point_document
from simulator.experiments.runs import run_point
from simulator.experiments.workload import Load, Workload, file_digest
from simulator.report import read_run_file


@pytest.fixture
def point() -> Point:
    return small_points()[0]


def test_figures_are_json_and_repeat_to_the_byte(point: Point) -> None:
    first, second = (json.dumps(run_point(point)) for _ in range(2))
    assert first == second
    figures = json.loads(first)
    assert figures["request_count"] == 40
    assert figures["prefill_busy_s_per_request"] is None, "mixed instances do more than prefill"


def test_prefill_work_is_told_of_instances_that_prefill() -> None:
    point = small_points(clusters=("2p1d",))[0]
    figures = run_point(point)
    busy_s = sum(figures["busy_fraction"][name] for name in ("p0", "p1")) * figures["benchmark_duration"]
    assert figures["prefill_busy_s_per_request"] == pytest.approx(busy_s / 40, rel=1e-3)


def test_bounds_are_those_of_the_load_whatever_the_policy() -> None:
    points = [replace(point, with_bounds=True) for point in small_points(clusters=("1",))]
    slo_calm, slo_busy, random_calm, _ = (run_point(point) for point in points)
    assert slo_calm["bounds"] == random_calm["bounds"] != slo_busy["bounds"]
    assert slo_calm["gaps"]["mean_time_to_first_token_ratio"] >= 1.0
    assert run_point(small_points()[0])["bounds"] is None


def test_a_point_with_curves_is_a_run_document(point: Point, tmp_path: Path) -> None:
    charted = replace(point, with_curves=True)
    figures = run_point(charted)
    assert {name: value for name, value in figures.items() if name != "curves"} == run_point(point)
    document = point_document(charted, figures)
    assert document["name"] == "1 slo 5/s"
    assert document["configuration"] == {"workload": "api", "cluster": "1", "policy": "slo", "rate": 5.0}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    assert read_run_file(path) == document


def test_labels_are_no_part_of_the_configuration(point: Point) -> None:
    assert replace(point, labels=()).digest() == point.digest()
    assert len({each.digest() for each in small_points()}) == len(small_points())


def test_whatever_changes_figures_changes_the_digest(point: Point) -> None:
    instance = point.cluster.instances[0]
    changed = [
        replace(point, load=Load(rate=6.0)),
        replace(point, load=Load(rate=5.0, seed=1)),
        replace(point, step_by_step=True),
        replace(point, good_share=0.5),
        replace(point, with_bounds=True),
        replace(point, with_curves=True),
        replace(point, scheduling=point.scheduling.policy_named("lmetric")),
        replace(point, workload=replace(point.workload, output_tokens=3)),
        replace(point, cluster=replace(point.cluster, instances=(replace(instance, kv_tokens=99_999),))),
    ]
    digests = {each.digest() for each in changed}
    assert len(digests) == len(changed) and point.digest() not in digests


def test_a_trace_counts_by_its_content(tmp_path: Path, point: Point) -> None:
    path = small_trace(tmp_path)
    moved = path.rename(tmp_path / "moved.jsonl")
    small_trace(tmp_path)
    digests = {replace(point, workload=Workload(each)).digest() for each in (path, moved)}
    assert len(digests) == 1
    file_digest.cache_clear()
    path.write_bytes(path.read_bytes()[:-200])
    assert replace(point, workload=Workload(path)).digest() not in digests


def test_the_configuration_is_json(point: Point) -> None:
    configuration = point.configuration()
    assert json.loads(json.dumps(configuration)) == configuration
    assert configuration["cluster"]["instances"][0]["role"] == "mixed"
