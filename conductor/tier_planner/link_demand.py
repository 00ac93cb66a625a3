"""How much of each holder's link requests need for their own loads: what a second of it costs them.

Where requests load from a pool, copies from and to it count like loads: all of it goes over one link.
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
    """Seconds of a holder's link that are taken of it a second, fading by 1/e in `MEMORY_S`."""

    _busy: dict[Holder, tuple[float, float]] = field(default_factory=dict)

    def take(self, holder: Holder, seconds: float, now_s: float) -> None:
        """A request, or a copy, will take the link for so long."""
        self._busy[holder] = self._faded(holder, now_s) + seconds, now_s

    def price(self, holder: Holder, now_s: float) -> float:
        """Seconds of requests that a second of the link costs: of those behind it in the queue of one server."""
        busy = min(self._faded(holder, now_s) / MEMORY_S, MOST_BUSY)
        return max(busy / (1.0 - busy), LEAST_PRICE)

    def _faded(self, holder: Holder, now_s: float) -> float:
        seconds, at_s = self._busy.get(holder, (0.0, now_s))
        return seconds * math.exp((at_s - now_s) / MEMORY_S)
