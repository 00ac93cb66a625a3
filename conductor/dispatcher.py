"""Late binding: requests wait at the router, in an order of our choosing, until a rank is about to run dry.

What an engine has been sent it works off first come, first served, and nothing can be taken back. While every rank
has a queue, a request gains nothing from standing in one: held back, it is placed by what is known later, and the
next to go can be whose turn it is. See SkyWalker (arXiv 2505.24095) for pushing only to replicas without a queue.
"""

from __future__ import annotations

from math import inf
from typing import Final

from msgspec.structs import replace

from conductor.admission import WaitingRoom
from conductor.placement import (
    Held,
    NoInstanceError,
    Placement,
    PlacementError,
    PlacementRequest,
    RejectedError,
    Released,
)
from conductor.scheduler import Scheduler

_TOGETHER: Final = 16  # requests looked at in one go when something has ended
_LEAST_SLEEP_S: Final = 1e-3


class Dispatcher:
    """Stands before a scheduler. Without a room it places everything at once.

    A request is held while the prefill rank it would get has more than ``hold_above_s`` of work before it, and at
    most until ``deadline_s`` after its arrival (by default what its TTFT objective leaves when its own prefill is
    subtracted); then it is placed wherever is best. Call `release` after events of the scheduler and when
    `next_wakeup_s` says so.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        room: WaitingRoom | None = None,
        *,
        hold_above_s: float = 0.01,
        deadline_s: float | None = None,
    ) -> None:
        self.room = room
        self._scheduler = scheduler
        self._hold_above_s = hold_above_s
        self._deadline_s = deadline_s
        self._tickets = 0
        self._drained_s = inf  # when the first rank that somebody waits for is predicted to run dry
        self._waiting: dict[int, PlacementRequest] = {}
        self._turned_away: list[Released] = []

    def __len__(self) -> int:
        """Requests held."""
        return len(self._waiting)

    def arrive(self, request: PlacementRequest, now_s: float) -> Placement | Held:
        """Place the request, or hold it. Raises PlacementError."""
        if self.room is None:
            return self._scheduler.place(request, now_s)
        request = replace(request, arrived_s=now_s) if request.arrived_s is None else request
        # A retry has waited before, and goes past those who wait.
        if request.retry_of is not None:
            return self._scheduler.place(request, now_s)
        if request.hedge_of is not None:  # that is placed already: no reason to wait, nor to go past others
            if self._waiting:
                raise NoInstanceError("others wait for a first instance")
            return self._scheduler.place(request, now_s)
        outlook = self._scheduler.consider(request, now_s)
        if not self._waiting and outlook.queue_s <= self._hold_above_s:
            return self._scheduler.place(request, now_s)
        prefill_s = outlook.placement.plan.prefill_s
        self._expect(outlook.queue_s, now_s)
        self._tickets += 1
        rejection = self.room.add(
            self._tickets,
            request.tenant,
            request.priority,
            max(prefill_s, 1e-6),
            now_s,
            now_s + self._patience_s(request, prefill_s),
        )
        self._waiting[self._tickets] = request
        if rejection is not None:
            assert isinstance(rejection.key, int)
            self._scheduler.gate.count(rejection)
            error = RejectedError(rejection.reason, rejection.stage, rejection.retry_after_s)
            del self._waiting[rejection.key]
            if rejection.key == self._tickets:
                raise error
            self._turned_away.append(Released(rejection.key, error))
        return Held(self._tickets)

    def leave(self, ticket: int) -> None:
        """The client of a held request is gone."""
        if self.room is not None and self._waiting.pop(ticket, None) is not None:
            self.room.remove(ticket)

    def release(self, now_s: float) -> list[Released]:
        """Place those whose turn it is; what became of them, and of those turned away."""
        released, self._turned_away = self._turned_away, []
        if self.room is None or not self._waiting:
            return released
        self._drained_s = inf
        overdue = [ticket for ticket in self.room.expire(now_s) if isinstance(ticket, int)]
        released += self._place(overdue, now_s)
        while len(self.room):
            ready, not_yet = self._next(now_s)
            for ticket in not_yet:
                self.room.push_back(ticket)
            released += self._place(ready, now_s)
            if not_yet or not ready:
                break
        return released

    def next_wakeup_s(self, now_s: float) -> float | None:
        """When to call `release` at the latest, though nothing has happened; None when nobody waits."""
        if self.room is None or not self._waiting:
            return now_s if self._turned_away else None
        deadline_s = self.room.next_deadline_s
        # A queue runs down by itself as well, as predicted.
        drained_s = max(self._drained_s, now_s + _LEAST_SLEEP_S)
        return drained_s if deadline_s is None else min(deadline_s, drained_s)

    def _expect(self, queue_s: float, now_s: float) -> None:
        """Somebody waits for a rank with so much work before it."""
        self._drained_s = min(self._drained_s, now_s + max(queue_s - self._hold_above_s, 0.0))

    def _patience_s(self, request: PlacementRequest, prefill_s: float) -> float:
        limit_s = self._deadline_s
        if limit_s is None:
            limit_s = request.ttft_objective_s or self._scheduler.objectives.ttft_s
        return max(limit_s - prefill_s, 0.0)

    def _next(self, now_s: float) -> tuple[list[int], list[int]]:
        """Who could start soon, of the next few; those who could not."""
        assert self.room is not None
        ready: list[int] = []
        not_yet: list[int] = []
        while len(ready) < _TOGETHER and len(not_yet) < _TOGETHER:
            ticket = self.room.pop(now_s)
            if not isinstance(ticket, int):
                break
            try:
                queue_s = self._scheduler.consider(self._waiting[ticket], now_s).queue_s
            except PlacementError:
                queue_s = 0.0  # `place` says why
            soon = queue_s <= self._hold_above_s
            if not soon:
                self._expect(queue_s, now_s)
            (ready if soon else not_yet).append(ticket)
            if ready and len(ready) >= self._idle_ranks():
                break
        return ready, not_yet

    def _idle_ranks(self) -> int:
        """How many may go at once: more would queue behind each other."""
        return max(
            sum(not rank.pending_prefills for instance in self._scheduler.cluster for rank in instance.ranks),
            1,
        )

    def _place(self, tickets: list[int], now_s: float) -> list[Released]:
        requests = [self._waiting.pop(ticket) for ticket in tickets]
        outcomes = self._scheduler.place_together(requests, now_s)
        return [Released(ticket, outcome) for ticket, outcome in zip(tickets, outcomes, strict=True)]
