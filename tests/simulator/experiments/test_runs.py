"""Running many points: the same results however they are run, and kept where that is asked for."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_points import small_points, small_trace

from simulator.experiments.point import Figures, Point
from simulator.experiments.runs import in_processes, in_this_process, run_points
from simulator.experiments.workload import Workload


class Counting:
    """Runs points in this process, last first, and remembers how many."""

    def __init__(self) -> None:
        self.run = 0

    def __call__(self, points: Sequence[Point]) -> Iterator[tuple[int, Figures]]:
        for number in range(len(points) - 1, -1, -1):
            self.run += 1
            yield number, next(figures for _, figures in in_this_process([points[number]]))


def test_processes_give_the_same_bytes_as_one(tmp_path: Path) -> None:
    points = small_points(Workload(small_trace(tmp_path)), rates=(5.0,))
    done: list[int] = []
    together = run_points(points, in_processes(2), tmp_path / "two", done.append)
    alone = run_points(points, Counting(), tmp_path / "one")
    assert json.dumps(together) == json.dumps(alone)
    assert done == [0, 1, 2, 3, 4]
    kept = [{path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("one", "two")]
    assert kept[0] == kept[1] and len(kept[0]) == 4
    assert not multiprocessing.active_children()


def test_what_is_kept_is_not_simulated_again(tmp_path: Path) -> None:
    points, folder = small_points(), tmp_path / "kept"
    first, again, changed = Counting(), Counting(), Counting()
    figures = run_points(points[:5], first, folder)
    assert run_points(points, again, folder)[:5] == figures
    assert (first.run, again.run) == (5, 3)
    points[2] = replace(points[2], step_by_step=True)
    run_points(points, changed, folder)
    assert changed.run == 1
    content = json.loads(next(folder.glob("*1p1d-slo-5-s*.json")).read_text())
    assert content["labels"] == {"workload": "api", "cluster": "1p1d", "policy": "slo", "load": "5/s"}


def test_a_broken_result_is_simulated_again(tmp_path: Path) -> None:
    points = small_points()[:1]
    run_points(points, Counting(), tmp_path)
    (path,) = tmp_path.iterdir()
    for broken in ('{"digest": ', "[]", json.dumps({"digest": points[0].digest()})):
        path.write_text(broken)
        again = Counting()
        run_points(points, again, tmp_path)
        assert again.run == 1


def test_an_interrupted_run_keeps_what_has_ended(tmp_path: Path) -> None:
    points = small_points()

    def interrupted(given: Sequence[Point]) -> Iterator[tuple[int, Figures]]:
        yield from in_this_process(given[:3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_points(points, interrupted, tmp_path)
    rest = Counting()
    run_points(points, rest, tmp_path)
    assert rest.run == len(points) - 3


def test_a_failure_in_a_process_ends_all_of_them(tmp_path: Path) -> None:
    points = small_points(Workload(tmp_path / "gone.jsonl"))
    with pytest.raises(OSError, match=r"gone\.jsonl"):
        run_points(points, in_processes(2))
    assert not multiprocessing.active_children()
