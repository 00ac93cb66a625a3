"""How much of each holder's link requests need for their own loads: what a second of it costs them.

Copies from and to a pool go over the link that requests load over: they make each of these wait the longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cache_index import Holder

MEMORY_S = 60.0
LEAST_PRICE = 0.1  # of an idle link: requests may come
MOST_BUSY = 0.95


@dataclass(slots=True)
class LinkDemand:
    """Seconds that are taken of a holder's link a second, by requests and in all, fading by 1/e in `MEMORY_S`."""

    _requests: dict[Holder, tuple[float, float]] = field(default_factory=dict)
    _all: dict[Holder, tuple[float, float]] = field(default_factory=dict)

    def load(self, holder: Holder, seconds: float, now_s: float) -> None:
        """A request will take the link for so long."""
        _add(self._requests, holder, seconds, now_s)
        _add(self._all, holder, seconds, now_s)

    def copy(self, holder: Holder, seconds: float, now_s: float) -> None:
        """A copy will."""
        _add(self._all, holder, seconds, now_s)

    def price(self, holder: Holder, now_s: float) -> float:
        """Seconds of requests that a second of the link costs: of those behind it in the queue of one server."""
        of_requests = min(_faded(self._requests, holder, now_s) / MEMORY_S, MOST_BUSY)
        of_all = min(_faded(self._all, holder, now_s) / MEMORY_S, MOST_BUSY)
        return max(of_requests / (1.0 - of_all), LEAST_PRICE)


_Taken = dict[Holder, tuple[float, float]]


def _add(taken: _Taken, holder: Holder, seconds: float, now_s: float) -> None:
    taken[holder] = _faded(taken, holder, now_s) + seconds, now_s


def _faded(taken: _Taken, holder: Holder, now_s: float) -> float:
    seconds, at_s = taken.get(holder, (0.0, now_s))
    return seconds * math.exp((at_s - now_s) / MEMORY_S)
