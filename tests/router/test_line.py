"""Who waits for a placement is told when it is made: after an event, by the clock, or never when it left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from cluster_factory import make_scheduler, request

from conductor.admission import WaitingRoom
from conductor.dispatcher import Dispatcher
from conductor.placement import Placement, PlacementError, RejectedError, UnknownModelError
from router.line import AtOnce, Line

LONG = 65_536  # tokens; seconds of prefill


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Asking:
    """Somebody who waits, and what it was told."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.told: list[Placement | PlacementError] = []
        self._then = then

    def placed(self, placement: Placement) -> None:
        self.told.append(placement)
        self._then()

    def refused(self, error: PlacementError) -> None:
        self.told.append(error)
        self._then()


class Queue:
    """A line before one instance, whose first request is long."""

    def __init__(self, *, capacity: int = 8, **options: Any) -> None:
        self.clock = Clock()
        self.scheduler = make_scheduler("m")
        room = WaitingRoom(capacity)
        self.line = Line(Dispatcher(self.scheduler, room, **{"deadline_s": 100.0, **options}), self.clock)
        first = self.line.arrive(Asking(), request(LONG), 0.0)
        assert first is not None
        self.first = first

    def hold(self, waiter: Asking, tokens: int = 1024, **fields: Any) -> None:
        assert (
            self.line.arrive(waiter, request(tokens, seed=len(self.line) + 1, **fields), self.clock()) is None
        )

    def run_dry(self, now_s: float) -> None:
        """The long prefill has ended."""
        self.clock.now_s = now_s
        self.scheduler.first_token(self.first.placement_id, now_s)


@pytest.fixture
async def queue() -> Queue:
    return Queue(hold_above_s=0.05)


async def test_without_a_queue_a_placement_is_made_at_once_or_not_at_all() -> None:
    scheduler = make_scheduler("m")
    line = Line(AtOnce(scheduler), Clock())
    waiter = Asking()
    assert isinstance(line.arrive(waiter, request(LONG), 0.0), Placement)
    assert isinstance(line.arrive(waiter, request(LONG), 0.0), Placement)
    with pytest.raises(UnknownModelError):
        line.arrive(waiter, request(model="absent"), 0.0)
    line.leave(waiter)
    line.pump()
    assert (len(line), waiter.told) == (0, [])


async def test_those_who_wait_are_told_once_the_instance_runs_dry(queue: Queue) -> None:
    waiters = [Asking(), Asking()]
    for waiter in waiters:
        queue.hold(waiter)
    queue.line.pump()
    assert (len(queue.line), [w.told for w in waiters]) == (2, [[], []])
    queue.run_dry(3.0)
    queue.line.pump()
    assert len(queue.line) == 0
    for waiter in waiters:
        (placement,) = waiter.told
        assert isinstance(placement, Placement)
        record = queue.scheduler.find(placement.placement_id)
        assert record is not None and record.held_s == 3.0
    queue.line.pump()
    assert [len(w.told) for w in waiters] == [1, 1]


async def test_who_left_is_not_placed(queue: Queue) -> None:
    stays, leaves = Asking(), Asking()
    queue.hold(leaves)
    queue.hold(stays)
    queue.line.leave(leaves)
    queue.line.leave(leaves)
    assert len(queue.line) == 1
    queue.run_dry(3.0)
    queue.line.pump()
    assert (len(stays.told), leaves.told) == (1, [])
    assert queue.scheduler.active_placements == 2, "the long one, and the one that stayed"


async def test_who_is_turned_away_for_another_is_told_why() -> None:
    queue = Queue(capacity=1)
    usual, urgent = Asking(), Asking()
    queue.hold(usual, priority=0)
    queue.hold(urgent, priority=5)
    assert (len(queue.line), usual.told) == (2, []), (
        "told from the event loop, not from within another's call"
    )
    queue.line.pump()
    (error,) = usual.told
    assert isinstance(error, RejectedError)
    assert (len(queue.line), urgent.told) == (1, [])
    with pytest.raises(RejectedError):
        queue.line.arrive(Asking(), request(1024, seed=9), 0.0)
    assert len(queue.line) == 1


async def test_nobody_has_to_ask_when_a_deadline_passes() -> None:
    queue = Queue(deadline_s=0.05)
    waiter = Asking()
    queue.hold(waiter)
    await asyncio.sleep(0.1)
    assert waiter.told == [], "the clock of the cluster has not moved"
    queue.clock.now_s = 100.0
    for _ in range(500):
        if waiter.told:
            break
        await asyncio.sleep(0.01)
    assert isinstance(waiter.told[0], Placement)


async def test_after_the_end_nobody_is_told() -> None:
    queue = Queue(deadline_s=0.05)
    waiter = Asking()
    queue.hold(waiter)
    queue.line.close()
    queue.clock.now_s = 100.0
    await asyncio.sleep(0.1)
    assert waiter.told == []


async def test_an_event_while_somebody_is_told_does_not_call_the_next_twice(queue: Queue) -> None:
    """What is placed may end there and then; the long one goes first, for its deadline is the earlier one."""

    def ends() -> None:
        placement = first.told[-1]
        assert isinstance(placement, Placement)
        queue.scheduler.cancelled(placement.placement_id, queue.clock.now_s)
        queue.line.pump()

    first, second = Asking(ends), Asking()
    queue.hold(first, LONG)
    queue.hold(second)
    queue.run_dry(3.0)
    queue.line.pump()
    assert (len(first.told), len(second.told)) == (1, 0)
    queue.line.pump()
    assert (len(first.told), len(second.told), len(queue.line)) == (1, 1, 0)


async def test_one_that_fails_when_it_is_told_costs_the_others_nothing(queue: Queue) -> None:
    def breaks() -> None:
        raise RuntimeError("the client's connection is in no state for that")

    waiters = [Asking(breaks), Asking(), Asking()]
    for waiter in waiters:
        queue.hold(waiter, tokens=64)
    queue.run_dry(3.0)
    queue.line.pump()
    assert [len(waiter.told) for waiter in waiters] == [1, 1, 1]
    assert len(queue.line) == 0
