"""Curves of a run, thinned out to what a chart can show."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simulator.cluster.results import Timeline
from simulator.report.measured import Measured
from simulator.report.statistics import Column, rounded

CDF_POINTS: Final = 500
ROLLING_POINTS: Final = 240
ROLLING_PERCENTILES: Final = (50, 95, 99)
HEATMAP_CELLS: Final = 24_000  # of one gauge of one run
_MOST_BINS, _FEWEST_BINS = 240, 40
_WINDOWS: Final = (
    40  # of a rolling percentile, in a run; wider where fewer than this many requests are in one:
)
_WINDOW_REQUESTS: Final = 20


def cumulative(values_s: Column, not_served: int) -> dict[str, list[float]]:
    """``percent`` of the requests that took at most so many ``ms``; those without the value are left out.

    Those that were not served count, so the curve of a run that turned requests away ends below 100.
    """
    known = np.sort(values_s[~np.isnan(values_s)]) * 1e3
    count = len(known)
    if not count:
        return {"ms": [], "percent": []}
    evenly = np.linspace(0, count - 1, CDF_POINTS - 100)
    tail = count - np.geomspace(1, count, 100)  # the last requests are what a p99 is made of
    ranks = np.unique(np.round(np.concatenate([evenly, tail])).astype(np.int64))
    return {
        "ms": [round(value, 3) for value in known[ranks].tolist()],
        "percent": [round(value, 3) for value in ((ranks + 1) / (count + not_served) * 100).tolist()],
    }


def rolling(arrival_s: Column, values_s: Column) -> dict[str, Any]:
    """Percentiles in milliseconds over the requests that arrived within ``window_s`` around each ``at_s``."""
    known = ~np.isnan(values_s)
    arrival_s, ms = arrival_s[known], values_s[known] * 1e3
    names = [f"p{which}" for which in ROLLING_PERCENTILES]
    if not len(ms):
        return {"window_s": 0.0, "at_s": [], **{name: [] for name in names}}
    first_s, span_s = float(arrival_s[0]), float(arrival_s[-1] - arrival_s[0])
    window_s = min(max(span_s / _WINDOWS, span_s * _WINDOW_REQUESTS / len(ms)), span_s)
    at_s = np.linspace(first_s, first_s + span_s, min(ROLLING_POINTS, len(ms)))
    lows = np.searchsorted(arrival_s, at_s - window_s / 2, side="left")
    highs = np.searchsorted(arrival_s, at_s + window_s / 2, side="right")
    rows = [
        np.percentile(ms[low:high], ROLLING_PERCENTILES).round(3).tolist()
        if high > low
        else [None] * len(names)
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True)
    ]
    return {
        "window_s": round(window_s, 3),
        "at_s": at_s.round(3).tolist(),
        **{name: [row[column] for row in rows] for column, name in enumerate(names)},
    }


def load_variation_over_time(run: Measured) -> dict[str, list[float]] | None:
    """``cv`` of running and waiting requests over the instances of a role, mean of the roles, at each ``at_s``.

    Until the last arrival: while a cluster drains, load is uneven under every policy.
    """
    if run.timeline is None or not len(run.timeline.at_s):
        return None
    load = (run.timeline.running + run.timeline.waiting).astype(np.float64)
    groups = [load[:, columns] for columns in roles(run, run.timeline.instances)]
    levels = np.stack([group.mean(axis=1) for group in groups])
    deviations = np.stack([group.std(axis=1) for group in groups])
    busy = levels > 0.0
    each = np.divide(deviations, levels, out=np.zeros_like(levels), where=busy)
    variation = each.sum(axis=0) / np.maximum(busy.sum(axis=0), 1)
    start_s, step_s, bins = _bins(run.timeline, _MOST_BINS)
    at_s = [round(start_s + step_s * bin_, 3) for bin_ in range(len(bins))]
    last_s = float(run.arrival_s.max()) if run.served else at_s[-1]
    means = [rounded(float(variation[bin_].mean())) for bin_ in bins]
    kept = sum(each_s <= last_s for each_s in at_s)
    return {"at_s": at_s[:kept], "cv": means[:kept]}


def roles(run: Measured, instances: tuple[str, ...]) -> list[list[int]]:
    """Columns of a timeline by what the instances did: prefill and decode, or both.

    An instance that did nothing is one of those with its name but for the digits, or, with no such, of the first.
    """
    prefills, decodes = set(run.prefill_instances), set(run.decode_instances)
    if not prefills or not decodes or prefills & decodes:
        return [list(range(len(instances)))]
    stems = [{re.sub(r"\d+", "", name) for name in group} for group in (decodes, prefills)]

    def decodes_only(name: str) -> bool:
        if name in prefills or name in decodes:
            return name in decodes
        stem = re.sub(r"\d+", "", name)
        return stem in stems[0] and stem not in stems[1]

    split = [decodes_only(name) for name in instances]
    return [[column for column, decode in enumerate(split) if decode is side] for side in (False, True)]


def heatmaps(timeline: Timeline | None) -> dict[str, Any] | None:
    """Gauges of every instance over time: rows are instances, columns periods of ``step_s`` from ``start_s`` on.

    ``running`` and ``kv_usage`` (in per cent) are means of a period, ``waiting`` its longest queue.
    """
    if timeline is None or not len(timeline.at_s) or not timeline.instances:
        return None
    most = min(max(HEATMAP_CELLS // len(timeline.instances), _FEWEST_BINS), _MOST_BINS)
    start_s, step_s, bins = _bins(timeline, most)

    def rows(
        gauge: NDArray[Any], of: Callable[[NDArray[Any]], NDArray[Any]], digits: int
    ) -> list[list[float]]:
        periods = np.stack([of(gauge[bin_]) for bin_ in bins], axis=1)
        return [[round(value, digits) for value in row] for row in periods.astype(np.float64).tolist()]

    return {
        "start_s": start_s,
        "step_s": step_s,
        "instances": list(timeline.instances),
        "running": rows(timeline.running, lambda looks: looks.mean(axis=0), 1),
        "waiting": rows(timeline.waiting, lambda looks: looks.max(axis=0), 0),
        "kv_usage": rows(timeline.kv_usage * 100.0, lambda looks: looks.mean(axis=0), 1),
    }


def _bins(timeline: Timeline, most: int) -> tuple[float, float, list[slice]]:
    """Start, length in seconds and looks of at most so many periods of one length.

    Nothing is looked at while nothing happens, so a period without a look shows the last one before.
    """
    at_s = timeline.at_s
    start_s, span_s = float(at_s[0]), float(at_s[-1] - at_s[0])
    step_s = max(1.0, float(np.ceil(span_s / most)))
    count = int(span_s // step_s) + 1
    edges = np.searchsorted(at_s, start_s + step_s * np.arange(count + 1), side="left")
    bins = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        bins.append(slice(low, high) if high > low else slice(low - 1, low))
    return start_s, step_s, bins
