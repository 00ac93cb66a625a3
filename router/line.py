"""Requests that the dispatcher holds: who waits for which ticket, and when to ask again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from conductor.placement import Held, Placement, PlacementError, PlacementRequest, Released

logger = structlog.get_logger("router")


class Dispatch(Protocol):
    """The dispatcher as the router sees it (`conductor.dispatcher.Dispatcher`)."""

    def arrive(self, request: PlacementRequest, now_s: float) -> Placement | Held: ...

    def leave(self, ticket: int) -> None: ...

    def release(self, now_s: float) -> list[Released]: ...

    def next_wakeup_s(self, now_s: float) -> float | None: ...


class Places(Protocol):
    """Makes placements."""

    def place(self, request: PlacementRequest, now_s: float) -> Placement | Held: ...


class AtOnce:
    """A dispatch that holds nobody of its own accord."""

    def __init__(self, placements: Places) -> None:
        self._placements = placements

    def arrive(self, request: PlacementRequest, now_s: float) -> Placement | Held:
        return self._placements.place(request, now_s)

    def leave(self, ticket: int) -> None:
        pass

    def release(self, now_s: float) -> list[Released]:
        return []

    def next_wakeup_s(self, now_s: float) -> float | None:
        return None


class Waiter(Protocol):
    """Whoever asked for a placement that was not made at once."""

    def placed(self, placement: Placement) -> None: ...

    def refused(self, error: PlacementError) -> None: ...


class Line:
    """Hands out placements on one event loop, at once or later. ``pump`` after everything that frees a rank."""

    def __init__(self, dispatch: Dispatch, clock: Callable[[], float]) -> None:
        self._dispatch = dispatch
        self._clock = clock
        self.waiting: dict[int, Waiter] = {}  # by ticket
        self._tickets: dict[Waiter, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False

    def __len__(self) -> int:
        """Requests held."""
        return len(self.waiting)

    def arrive(self, waiter: Waiter, request: PlacementRequest, now_s: float) -> Placement | None:
        """The placement, or None: ``waiter`` is told later. Raises PlacementError."""
        outcome = self._dispatch.arrive(request, now_s)
        return outcome if isinstance(outcome, Placement) else self.hold(waiter, outcome)

    def hold(self, waiter: Waiter, outcome: Placement | Held) -> Placement | None:
        """Let ``waiter`` wait for what the dispatch has not decided yet."""
        if isinstance(outcome, Placement):
            return outcome
        self.waiting[outcome.ticket] = waiter
        self._tickets[waiter] = outcome.ticket
        self._wind()
        return None

    def leave(self, waiter: Waiter) -> None:
        """It waits no longer, if it did."""
        ticket = self._tickets.pop(waiter, None)
        if ticket is not None:
            del self.waiting[ticket]
            self._dispatch.leave(ticket)

    def pump(self) -> None:
        """Tell those whose turn has come."""
        if not self.waiting or self._pumping:
            return
        self._pumping = True  # placing one may end another, which pumps again
        try:
            for released in self._dispatch.release(self._clock()):
                self._tell(released)
        except Exception:
            logger.exception("releasing held requests failed")
        finally:
            self._pumping = False
        self._wind()

    def _tell(self, released: Released) -> None:
        """A waiter that cannot take it must not cost those behind it their placements."""
        waiter = self.waiting.pop(released.ticket, None)
        if waiter is None:
            return
        del self._tickets[waiter]
        try:
            if isinstance(released.outcome, Placement):
                waiter.placed(released.outcome)
            else:
                waiter.refused(released.outcome)
        except Exception:
            logger.exception("telling a held request failed")

    def close(self) -> None:
        """Nobody is told any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wind(self) -> None:
        """See to it that somebody asks again even if nothing happens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._clock()
        wakeup_s = self._dispatch.next_wakeup_s(now_s) if self.waiting else None
        if wakeup_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(wakeup_s - now_s, 1e-3), self.pump)
