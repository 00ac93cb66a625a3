"""A second instance asked beside the first one when that is late."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from conductor.placement import Placement, PlacementError
from router.metrics import HedgeOutcome

if TYPE_CHECKING:
    from router.attempt import Attempt
    from router.delivery import Delivery

_KEPT: Final = 512  # latest times
_LEAST: Final = 50  # of them, before anything can be called late
_EVERY: Final = 16  # times between looking at all of them again


class _Times:
    __slots__ = ("latest", "limit_s", "since")

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=_KEPT)
        self.limit_s: float | None = None
        self.since = 0


class FirstBytes:
    """Times from sending a request to its first byte, by model and whether the answer is streamed.

    An answer is late when it takes longer than ``quantile`` of the last 512 did, and than ``least_s``.
    """

    def __init__(self, quantile: float, least_s: float) -> None:
        self._quantile = quantile
        self._least_s = least_s
        self._times: dict[tuple[str, bool], _Times] = {}

    def observe(self, model: str, streamed: bool, seconds: float) -> None:
        times = self._times.get((model, streamed))
        if times is None:
            times = self._times[model, streamed] = _Times()
        times.latest.append(seconds)
        times.since += 1
        if times.since >= _EVERY and len(times.latest) >= _LEAST:
            times.since = 0
            ordered = sorted(times.latest)
            times.limit_s = ordered[min(int(self._quantile * len(ordered)), len(ordered) - 1)]

    def late_after_s(self, model: str, streamed: bool) -> float | None:
        """None while too little is known."""
        times = self._times.get((model, streamed))
        if times is None or times.limit_s is None:
            return None
        return max(times.limit_s, self._least_s)


class Hedge:
    """A second attempt at a request whose ``first`` is late; the first of them to answer ends the other.

    It stands in line for its placement itself, and counts against the retry budget.
    """

    __slots__ = ("_delivery", "_timer", "_waiting", "first", "second")

    def __init__(self, delivery: Delivery, first: Attempt, delay_s: float) -> None:
        self.first = first
        self.second: Attempt | None = None
        self._delivery = delivery
        self._waiting = False
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(delay_s, self._ask)

    def _ask(self) -> None:
        self._timer = None
        services, placement = self._delivery.services, self.first.placement
        if not services.retry_budget.take(placement.model):
            services.metrics.hedges[HedgeOutcome.NO_BUDGET] += 1
            return
        self._waiting = True
        try:
            asked = self._delivery.asked_beside(placement)
            made = services.line.arrive(self, asked, services.clock())
        except PlacementError as error:
            self.refused(error)
        except Exception:
            self._delivery.fail_unexpectedly()
        else:
            if made is not None:
                self.placed(made)

    def refused(self, error: PlacementError) -> None:
        """No other instance can take it, or should."""
        self._not_asked()

    def placed(self, placement: Placement) -> None:
        """Ask this instance, too; not a pair, whose hand-off would take its time."""
        if placement.disaggregated:
            services = self._delivery.services
            self._delivery.tell(services.placements.cancelled, placement.placement_id, services.clock())
            self._not_asked()
            return
        self._waiting = False
        try:
            self.second = self._delivery.attempt_beside(placement)
            self.second.start()
        except Exception:
            self._delivery.fail_unexpectedly()

    def _not_asked(self) -> None:
        self._waiting = False
        services = self._delivery.services
        services.metrics.hedges[HedgeOutcome.NO_INSTANCE] += 1
        services.retry_budget.give_back(self.first.placement.model)

    def settle(self, winner: Attempt) -> None:
        """One of the two has begun its response: the other one is left."""
        if winner is self.second:
            self._count(HedgeOutcome.WON)
            self.second = None
            self.first.end()
        else:
            self.end()

    def failed(self, attempt: Attempt) -> Attempt | None:
        """One of the two has failed: the other, which goes on, or None where there is none."""
        second, self.second = self.second, None
        self.end()
        if second is None:
            return None
        if attempt is second:
            self._count(HedgeOutcome.FAILED)
            return self.first
        self._count(HedgeOutcome.WON)
        return second

    def end(self) -> None:
        """Nobody is asked any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._waiting = False
            self._delivery.services.line.leave(self)
        if self.second is not None:
            self._count(HedgeOutcome.LOST)
            self.second.end()
            self.second = None

    def _count(self, outcome: HedgeOutcome) -> None:
        self._delivery.services.metrics.hedges[outcome] += 1
