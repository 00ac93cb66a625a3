"""Runs side by side: which figures are shown, which run is best in each, and by how much the others differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

_UNKNOWN: Final = "-"

Better = Literal["less", "more", ""]


@dataclass(frozen=True, slots=True)
class Figure:
    """``path`` into a summary; the value is shown ``scale`` times as large, in ``unit``.

    Those with a name in ``short`` are the ones to look at first.
    """

    group: str
    label: str
    path: tuple[str, ...]
    unit: str
    better: Better
    scale: float = 1.0
    digits: int = 0
    short: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """``difference`` is from the best of the row; both are empty where there is nothing to compare."""

    text: str
    best: bool = False
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    figure: Figure
    cells: tuple[Cell, ...]


def _latency(group: str, key: str, *which: str, digits: int = 0, short: str = "") -> tuple[Figure, ...]:
    return tuple(
        Figure(
            group,
            "mean" if each == "avg" else each,
            (key, each),
            "ms",
            "less",
            digits=digits,
            short=f"{short} {'mean' if each == 'avg' else each}" if short else "",
        )
        for each in which
    )


def _percent(group: str, label: str, *path: str, better: Better = "more", short: str = "") -> Figure:
    return Figure(group, label, path, "%", better, 100.0, 1, short)


_TBT = "Token gaps, longest tenth (TBT)"
_ITL = "Token gaps, mean (ITL)"
_GAPS = "Against the bounds"
FIGURES: Final = (
    _percent("Service", "good requests", "good_request_fraction", short="good requests"),
    _percent("Service", "TTFT objective met", "ttft_fraction", short="TTFT objective met"),
    _percent("Service", "TBT objective met", "tbt_fraction", short="TBT objective met"),
    Figure("Service", "goodput", ("goodput",), "requests/s", "more", digits=2, short="goodput"),
    Figure("Service", "not served", ("error_request_count",), "requests", "less", short="not served"),
    *_latency("Time to first token", "time_to_first_token", "avg", "p50", "p90", "p99", short="TTFT"),
    *_latency(_TBT, "longest_tenth_token_latency", "avg", "p50", "p99", digits=1, short="TBT"),
    *_latency(_ITL, "inter_token_latency", "avg", "p99", digits=1),
    *_latency("Request latency", "request_latency", "avg", "p50", "p99"),
    *_latency("Queue before prefill", "queue_time", "avg", "p99"),
    _percent("Cache", "prompt tokens reused", "prefix_cache_reused_ratio", short="prompt tokens reused"),
    _percent("Cache", "reused on the device", "reuse_by_tier", "device", "ratio", better=""),
    Figure("Throughput", "served", ("request_throughput",), "requests/s", "more", digits=2),
    Figure("Throughput", "output", ("output_token_throughput",), "tokens/s", "more"),
    Figure("Cluster", "load variation", ("load_variation",), "CV", "less", digits=2, short="load variation"),
    Figure("Cluster", "preemptions", ("preemptions",), "", "less"),
    Figure("Cluster", "retries", ("retries",), "", "less"),
    *_latency("Error of predicted TTFT", "ttft_prediction_error", "avg", "p99"),
    Figure(
        *(_GAPS, "mean TTFT", ("gaps", "mean_time_to_first_token_ratio"), "x", "less"),
        digits=2,
        short="TTFT mean against bound",
    ),
    _percent(
        _GAPS, "good requests", "gaps", "good_request_fraction_of_bound", short="good requests against bound"
    ),
    _percent(
        _GAPS,
        "reuse, capacity bound",
        "gaps",
        "reuse_fraction_of_capacity_bound",
        short="reuse against bound",
    ),
    _percent(_GAPS, "reuse, bound without limit", "gaps", "reuse_fraction_of_unlimited_bound"),
)
_TIE: Final = 0.005  # of the best: no difference worth a mark
_TIE_POINTS: Final = 0.001


def compare(summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of `FIGURES` that at least one of the runs knows."""
    rows = []
    for figure in FIGURES:
        values = [value_of(each, figure.path) for each in summaries]
        if any(value is not None for value in values):
            rows.append(Row(figure, _cells(figure, values)))
    return rows


def value_of(summary: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """None where the run does not tell."""
    found: Any = summary
    for key in path:
        found = None if found is None else found[key]
    return None if found is None else float(found)


def distinct_names(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of runs; a second run of one name is called so."""
    counts: dict[str, int] = {}
    names = []
    for document in documents:
        name = document["name"]
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def _cells(figure: Figure, values: list[float | None]) -> tuple[Cell, ...]:
    texts = [_UNKNOWN if value is None else f"{value * figure.scale:,.{figure.digits}f}" for value in values]
    known = [value for value in values if value is not None]
    if figure.better and len(known) > 1:
        best = min(known) if figure.better == "less" else max(known)
        tied = [value is not None and _ties(figure, value, best) for value in values]
        if tied.count(True) < len(known):
            return tuple(
                Cell(text, tie, "" if tie or value is None else _difference(figure, value, best))
                for text, value, tie in zip(texts, values, tied, strict=True)
            )
    return tuple(Cell(text) for text in texts)


def _ties(figure: Figure, value: float, best: float) -> bool:
    return abs(value - best) <= (_TIE_POINTS if figure.unit == "%" else _TIE * abs(best))


def _difference(figure: Figure, value: float, best: float) -> str:
    """Points of per cent, per cent, or a multiple where that would be unwieldy."""
    if figure.unit == "%":
        return f"{(value - best) * 100:+.1f} pts"
    if best <= 0.0:
        return ""
    times = value / best
    return f"{times:,.1f}x" if times >= 3.0 else f"{(times - 1) * 100:+.0f} %"
