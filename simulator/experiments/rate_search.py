"""The highest rate that a cluster serves well: capacity, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from simulator.experiments.point import Figures, Point, simulate_point
from simulator.experiments.workload import Load, recorded_rate
from simulator.workloads import TraceRecord

_PRECISION: Final = 0.02  # of the rate found
_MOST_DOUBLINGS: Final = 12


def highest_rate(serves: Callable[[float], bool], first_guess: float) -> float | None:
    """The highest rate that ``serves`` accepts, as far as it accepts all lower ones, to 2 % from below.

    Doubles or halves from ``first_guess`` (at most 12 times), then bisects. None when it accepts no rate tried;
    the last rate tried when it refuses none.
    """
    rate = first_guess
    if serves(rate):
        good, bad = rate, None
        for _ in range(_MOST_DOUBLINGS):
            rate *= 2
            if not serves(rate):
                bad = rate
                break
            good = rate
        if bad is None:
            return good
    else:
        bad, lower = rate, None
        for _ in range(_MOST_DOUBLINGS):
            rate /= 2
            if serves(rate):
                lower = rate
                break
            bad = rate
        if lower is None:
            return None
        good = lower
    while bad > good * (1 + _PRECISION):
        middle = (good + bad) / 2
        if serves(middle):
            good = middle
        else:
            bad = middle
    return good


def search_rate(point: Point, records: Sequence[TraceRecord]) -> Figures:
    """Figures at the highest rate at which ``point.good_share`` of the requests is good.

    ``highest_rate`` is that rate, in requests a second over the whole trace, null when no rate is low enough;
    ``rates_tried`` are rates and shares in the order they were simulated.
    """
    assert point.good_share is not None
    tried: dict[float, Figures] = {}

    def serves(rate: float) -> bool:
        tried[rate] = simulate_point(replace(_at(point, rate), with_bounds=False), records)
        return bool(tried[rate]["good_request_fraction"] >= point.good_share)

    found = highest_rate(serves, recorded_rate(records))
    shown = found if found is not None else min(tried)
    return {
        **(simulate_point(_at(point, shown), records) if point.with_bounds else tried[shown]),
        "highest_rate": None if found is None else round(found, 6),
        "rates_tried": [[round(rate, 6), each["good_request_fraction"]] for rate, each in tried.items()],
    }


def _at(point: Point, rate: float) -> Point:
    return replace(point, load=Load(rate=rate, seed=point.load.seed))
