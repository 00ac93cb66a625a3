"""Runs that differ in the rate of requests, drawn together as one series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

RATE_KEYS: Final = ("speed", "requests_per_s", "rate")  # of configurations: what a sweep over rates changes


@dataclass(frozen=True, slots=True)
class RateSeries:
    """``points`` are requests offered per second and those of them that were good, by rate."""

    label: str
    points: list[tuple[float, float]]


def rate_series(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[RateSeries]:
    """Series of runs whose configurations differ in nothing but the rate; empty where no two runs do.

    A series is called after the values in which it differs from the others, or after its first run.
    """
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, document in enumerate(documents):
        configuration = document["configuration"]
        fixed = tuple((key, str(configuration[key])) for key in sorted(configuration) if key not in RATE_KEYS)
        groups.setdefault(fixed, []).append(number)
    if len(groups) > 1:
        common = set.intersection(*(set(group) for group in groups))
    else:
        common = {item for group in groups for item in group}
    series = []
    for fixed, members in groups.items():
        points = sorted(
            (documents[n]["summary"]["request_rate"], documents[n]["summary"]["goodput"]) for n in members
        )
        own = [value for key, value in fixed if (key, value) not in common]
        series.append(RateSeries(", ".join(own) or names[members[0]], points))
    return series if any(len({rate for rate, _ in each.points}) > 1 for each in series) else []
