"""Running points: in this process, in several, or wherever a runner takes them; results kept in a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from simulator.experiments.point import Figures, Point, simulate_point
from simulator.experiments.rate_search import search_rate
from simulator.experiments.workload import records_once
from simulator.workloads import TraceRecord

# Simulates points and gives each one's number and figures as they come.
Runner = Callable[[Sequence[Point]], Iterator[tuple[int, Figures]]]


def run_point(point: Point, records: Sequence[TraceRecord] | None = None) -> Figures:
    """The figures of a point; without ``records`` its workload is read, once in this process."""
    records = records_once(point.workload) if records is None else records
    return simulate_point(point, records) if point.good_share is None else search_rate(point, records)


def in_this_process(points: Sequence[Point]) -> Iterator[tuple[int, Figures]]:
    """One after another."""
    for number, point in enumerate(points):
        yield number, run_point(point)


def in_processes(jobs: int) -> Runner:
    """So many points at a time, each process reading a trace once; in this process where one is enough."""

    def run(points: Sequence[Point]) -> Iterator[tuple[int, Figures]]:
        processes = min(jobs, len(points))
        if processes < 2:
            yield from in_this_process(points)
            return
        others = set(multiprocessing.active_children())
        with ProcessPoolExecutor(
            processes, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
        ) as pool:
            try:
                numbers = {pool.submit(run_point, point): number for number, point in enumerate(points)}
                for future in as_completed(numbers):
                    yield numbers[future], future.result()
            except BaseException:
                # A simulation that is not wanted any more would be waited for. Only the pool's own thread joins
                # its processes: of two that wait for a process, one is not told that it has ended.
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
                pool.shutdown(cancel_futures=True)
                raise

    return run


def run_points(
    points: Sequence[Point],
    runner: Runner,
    folder: Path | None = None,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Figures]:
    """The figures of all points, in their order however they were run; ``on_done`` is told how many there are.

    With a ``folder`` every result is written to a file of its own as it comes, and points that it has with the
    same configuration are not simulated. Raises OSError when the folder cannot be used.
    """
    found: dict[int, Figures] = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, point in enumerate(points):
            kept = _kept(folder, point)
            if kept is not None:
                found[number] = kept
    on_done(len(found))
    missing = [number for number in range(len(points)) if number not in found]
    for position, figures in runner([points[number] for number in missing]):
        found[missing[position]] = figures
        if folder is not None:
            _keep(folder, points[missing[position]], figures)
        on_done(len(found))
    return [found[number] for number in range(len(points))]


def _end_with_parent() -> None:
    """In a process of the pool: an interrupt, or the end of the process that started it, ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _file(folder: Path, point: Point) -> Path:
    words = "-".join(value for _, value in point.labels)
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', words)}-{point.digest()[:16]}.json"


def _kept(folder: Path, point: Point) -> Figures | None:
    try:
        content = json.loads(_file(folder, point).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("digest") != point.digest():
        return None
    figures = content.get("figures")
    return figures if isinstance(figures, dict) else None


def _keep(folder: Path, point: Point, figures: Figures) -> None:
    path = _file(folder, point)
    content = {
        "labels": dict(point.labels),
        "digest": point.digest(),
        "configuration": point.configuration(),
        "figures": figures,
    }
    # Never half a file: an interrupted sweep is resumed from what is there.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
