"""Run documents: thinned curves that keep their shape, files that read back, precise errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import INSTANCES, busy_pairs, finished, lost, simulated

from conductor.cli.live_replay import RequestResult
from conductor.cli.live_replay import measured as measured_over_http
from conductor.placement import Objectives
from simulator.cluster import Timeline
from simulator.report import Run, RunFileError, measured, read_run_file, run_document, write_run_file
from simulator.report.curves import (
    CDF_POINTS,
    HEATMAP_CELLS,
    ROLLING_POINTS,
    cumulative,
    heatmaps,
    load_variation_over_time,
    roles,
    rolling,
)

OBJECTIVES = Objectives(ttft_s=1.0, tbt_s=0.05)
RUN = Run("pairs", {"policy": "slo", "speed": 2.0}, busy_pairs(300), OBJECTIVES)


def test_a_file_reads_back(tmp_path: Path) -> None:
    write_run_file(tmp_path / "run.json", RUN)
    document = read_run_file(tmp_path / "run.json")
    assert document == run_document(RUN)
    assert json.loads(json.dumps(document)) == document
    write_run_file(tmp_path / "again.json", replace(RUN, simulated=busy_pairs(300)))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "run.json").read_bytes()


def broken(document: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    """A copy with one value changed."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    part = copy
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((("format",), "something"), 'lacks "format": "conductor-run"'),
        ((("summary", "schema_version"), 1), "schema_version is 1, and this version reads 2: run it again"),
        ((("summary", "goodput"), "much"), "summary.goodput: Input should be a valid number"),
        ((("summary", "badput"), 1.0), "summary.badput: Extra inputs are not permitted"),
        ((("curves", "ttft"), {"ms": []}), "curves.ttft.percent: Field required"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[tuple[str, ...], Any], message: str) -> None:
    path = tmp_path / "run.json"
    keys, value = change
    path.write_text(json.dumps(broken(run_document(RUN), *keys, value=value)))
    with pytest.raises(RunFileError, match=r"run\.json") as error:
        read_run_file(path)
    assert message in str(error.value)


def test_what_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("[")
    with pytest.raises(RunFileError, match="is not JSON"):
        read_run_file(path)
    path.write_text("[]")
    with pytest.raises(RunFileError, match="not a run file"):
        read_run_file(path)


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=2_000), st.integers(0, 50))
def test_a_cumulative_curve_is_never_wrong_where_it_has_a_point(values: list[float], not_served: int) -> None:
    curve = cumulative(np.array(values), not_served)
    assert len(curve["ms"]) <= CDF_POINTS
    total = len(values) + not_served
    for ms, percent in zip(curve["ms"], curve["percent"], strict=True):
        within = sum(value * 1e3 <= ms + 6e-4 for value in values)  # rounded to a microsecond
        before = sum(value * 1e3 < ms - 6e-4 for value in values)
        assert before / total * 100 - 1e-3 <= percent <= within / total * 100 + 1e-3
    assert curve["percent"][-1] == pytest.approx(len(values) / total * 100, abs=1e-3)
    assert curve["percent"] == sorted(curve["percent"])


def test_rolling_percentiles_follow_a_step() -> None:
    arrival_s = np.arange(0.0, 1_000.0, 0.5)
    values_s = np.where(arrival_s < 500.0, 1.0, 3.0)
    curve = rolling(arrival_s, values_s)
    assert len(curve["at_s"]) == ROLLING_POINTS
    margin_s = curve["window_s"]
    assert margin_s == pytest.approx(999.5 / 40, abs=0.001)
    for at_s, p50 in zip(curve["at_s"], curve["p50"], strict=True):
        if abs(at_s - 500.0) > margin_s:
            assert p50 == (1_000.0 if at_s < 500.0 else 3_000.0)


def test_a_gap_in_arrivals_is_a_gap_in_the_curve() -> None:
    arrival_s = np.concatenate([np.linspace(0, 10, 200), np.linspace(990, 1_000, 200)])
    curve = rolling(arrival_s, np.ones(400))
    assert None in curve["p99"] and curve["p99"][0] == curve["p99"][-1] == 1_000.0


def test_heatmaps_show_means_and_longest_queues() -> None:
    looks = 5_000
    timeline = Timeline(
        at_s=np.arange(looks, dtype=np.float64),
        instances=("a", "b"),
        running=np.tile(np.array([[2, 4]], np.int32), (looks, 1)),
        waiting=np.stack([np.arange(looks), np.zeros(looks)], axis=1).astype(np.int32),
        kv_usage=np.full((looks, 2), 0.5, np.float32),
    )
    maps = heatmaps(timeline)
    assert maps is not None
    columns = len(maps["running"][0])
    assert columns * 2 <= HEATMAP_CELLS and columns * maps["step_s"] >= looks - 1
    assert maps["running"] == [[2.0] * columns, [4.0] * columns]
    assert maps["waiting"][0][0] == maps["step_s"] - 1
    assert maps["waiting"][0][-1] == looks - 1
    assert maps["kv_usage"][0][0] == 50.0


def test_while_nothing_happens_gauges_stay() -> None:
    timeline = Timeline(
        at_s=np.array([0.0, 1.0, 5.0]),
        instances=("a",),
        running=np.array([[1], [7], [3]], np.int32),
        waiting=np.zeros((3, 1), np.int32),
        kv_usage=np.zeros((3, 1), np.float32),
    )
    maps = heatmaps(timeline)
    assert maps is not None and maps["running"] == [[1.0, 7.0, 7.0, 7.0, 7.0, 3.0]]


def test_load_variation_is_within_roles() -> None:
    """Prefill instances at 4 each and decode instances at 1 and 3: 0 and 0.5."""
    run = simulated([finished(0, 0.0), finished(1, 2.5, e2e_s=1.0)])
    looks = len(run.timeline.at_s)
    even = replace(
        run.timeline,
        running=np.tile(np.array([[4, 4, 1, 3]], np.int32), (looks, 1)),
        waiting=np.zeros((looks, 4), np.int32),
    )
    curve = load_variation_over_time(measured(replace(run, timeline=even)))
    assert curve is not None
    assert curve["at_s"] == [0.0, 1.0, 2.0], "not while the cluster drains"
    assert curve["cv"] == [0.25, 0.25, 0.25]


def test_roles_of_instances() -> None:
    pairs = measured(simulated([finished(0, 0.0)]))
    assert roles(pairs, INSTANCES) == [[0, 1], [2, 3]], "p1 and d1 did nothing, but are called so"
    mixed = measured(simulated([finished(0, 0.0, decode_instance="p0")]))
    assert roles(mixed, INSTANCES) == [[0, 1, 2, 3]]


def test_a_run_that_served_nothing_is_a_document(tmp_path: Path) -> None:
    write_run_file(tmp_path / "run.json", Run("nothing", {}, simulated([lost(0, 0.0)]), OBJECTIVES))
    curves = read_run_file(tmp_path / "run.json")["curves"]
    assert curves["ttft"] == {"ms": [], "percent": []}


def test_a_replay_over_http_is_a_document(tmp_path: Path) -> None:
    seen = [RequestResult(sent_s=0.1 * n, ttft_s=0.5, duration_s=1.0, gaps_s=[0.05] * 10) for n in range(30)]
    seen.append(RequestResult(sent_s=4.0, error="HTTP 429: full"))
    write_run_file(tmp_path / "run.json", Run("live", {}, measured_over_http(seen, 5.0), OBJECTIVES))
    document = read_run_file(tmp_path / "run.json")
    assert document["curves"]["heatmaps"] is document["curves"]["load_variation"] is None
    assert document["curves"]["ttft"]["percent"][-1] == pytest.approx(30 / 31 * 100, abs=1e-3)
