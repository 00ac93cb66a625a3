"""How much of each holder's link requests need for their own loads: what a second of it costs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cache_index import Holder
from conductor.explanation import PlacementRecord
from conductor.placement import PlanSegment

MEMORY_S = 60.0
LEAST_PRICE = 0.1  # of an idle link: requests may come
MOST_BUSY = 0.95


@dataclass(slots=True)
class LinkDemand:
    """Seconds of its link that requests take of a holder a second, fading by 1/e in `MEMORY_S`."""

    _busy: dict[Holder, tuple[float, float]] = field(default_factory=dict)

    def placed(
        self, record: PlacementRecord, seconds_of: Callable[[PlanSegment], float], now_s: float
    ) -> None:
        """A request will load what its plan says; ``seconds_of`` tells how long a part of it takes its link."""
        for part in record.placement.plan.segments:
            seconds = seconds_of(part)
            if seconds > 0.0:
                self._busy[part.holder] = self._faded(part.holder, now_s) + seconds, now_s

    def price(self, holder: Holder, now_s: float) -> float:
        """Seconds of requests that a second of the link costs: of those behind it in the queue of one server."""
        busy = min(self._faded(holder, now_s) / MEMORY_S, MOST_BUSY)
        return max(busy / (1.0 - busy), LEAST_PRICE)

    def _faded(self, holder: Holder, now_s: float) -> float:
        seconds, at_s = self._busy.get(holder, (0.0, now_s))
        return seconds * math.exp((at_s - now_s) / MEMORY_S)
