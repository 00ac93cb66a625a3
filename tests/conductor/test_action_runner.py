from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cache_index import Holder, Namespace, Tier
from conductor.action_ledger import ActionLedger, ActionRecord, ActionState, LedgerLimits
from conductor.action_metrics import ActionCollector
from conductor.action_runner import ActionRunner
from conductor.actions import ActionKind, ExecutionError, Executor, Place, Prefix, TierAction
from conductor.executors import DryRunExecutor

HERE, THERE = Place(Holder("a"), Tier.HOST), Place(Holder("b"), Tier.HOST)


def action(name: str, kind: ActionKind = ActionKind.REPLICATE) -> TierAction:
    return TierAction(
        action_id=name,
        kind=kind,
        prefix=Prefix(Namespace("m", 16), np.arange(1, 9, dtype=np.uint64)),
        start=0,
        stop=8,
        source=HERE,
        target=THERE,
        kv_bytes=800,
        benefit_s=0.5,
        cost_s=0.0,
        deadline_s=time.monotonic() + 60.0,
        reason="a test",
    )


class Carrier:
    """Does what it is told to."""

    def __init__(self, name: str, kind: ActionKind, work: Callable[[TierAction], Awaitable[int]]) -> None:
        self.name = name
        self._kind = kind
        self._work = work
        self.carried: list[str] = []

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        return kind is self._kind

    async def execute(self, action: TierAction) -> int:
        self.carried.append(action.action_id)
        return await self._work(action)


async def everything(action: TierAction) -> int:
    return action.blocks


async def nothing_ends(action: TierAction) -> int:
    await asyncio.Event().wait()
    return 0


@asynccontextmanager
async def running(*executors: Executor, ledger: ActionLedger | None = None) -> AsyncIterator[ActionRunner]:
    runner = ActionRunner(ledger or ActionLedger(), executors, time.monotonic)
    runner.start()
    try:
        yield runner
    finally:
        await runner.close()


def submit(runner: ActionRunner, order: TierAction) -> ActionRecord:
    return runner.ledger.submit(order, time.monotonic())


async def ended(record: ActionRecord) -> ActionState:
    async with asyncio.timeout(10):
        while not record.state.ended:
            await asyncio.sleep(0.005)
    return record.state


async def test_the_first_executor_that_can_does() -> None:
    pins, first, second = (
        Carrier("pins", ActionKind.PIN, everything),
        Carrier("first", ActionKind.REPLICATE, everything),
        Carrier("second", ActionKind.REPLICATE, everything),
    )
    async with running(pins, first, second) as runner:
        record = submit(runner, action("x"))
        assert await ended(record) is ActionState.DONE
        assert (record.executor, record.blocks_done) == ("first", 8)
        assert (pins.carried, second.carried) == ([], [])


async def test_nobody_can() -> None:
    async with running(Carrier("pins", ActionKind.PIN, everything)) as runner:
        record = submit(runner, action("x"))
        assert await ended(record) is ActionState.FAILED
        assert "no executor can replicate from a/host to b/host" in record.detail
        assert "pins: pin" in record.detail


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), asyncio.CancelledError(), TypeError("what")])
async def test_a_faulty_executor_costs_its_action_alone(error: BaseException) -> None:
    async def raises(action: TierAction) -> int:
        raise error

    healthy = Carrier("healthy", ActionKind.PIN, everything)
    async with running(Carrier("faulty", ActionKind.REPLICATE, raises), healthy) as runner:
        broken = submit(runner, action("x"))
        fine = submit(runner, action("y", ActionKind.PIN))
        assert (await ended(broken), await ended(fine)) == (ActionState.FAILED, ActionState.DONE)
        assert broken.detail


async def test_what_may_succeed_later_is_tried_again() -> None:
    tries = 0

    async def busy_twice(action: TierAction) -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ExecutionError("busy", retryable=True)
        return action.blocks

    ledger = ActionLedger(limits=LedgerLimits(backoff_s=0.01))
    async with running(Carrier("busy", ActionKind.REPLICATE, busy_twice), ledger=ledger) as runner:
        record = submit(runner, action("x"))
        assert await ended(record) is ActionState.DONE
        assert record.attempts == 3


async def test_a_fault_of_the_ledger_passes() -> None:
    asked = 0

    def free_bytes(place: Place) -> float | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ZeroDivisionError("oh")
        return None

    ledger = ActionLedger(free_bytes=free_bytes)
    async with running(Carrier("mover", ActionKind.REPLICATE, everything), ledger=ledger) as runner:
        record = submit(runner, action("x"))
        assert await ended(record) is ActionState.DONE
        assert runner.faults["ledger"] == 1


async def test_cancelling_stops_the_executor() -> None:
    stopped = asyncio.Event()

    async def waits(action: TierAction) -> int:
        try:
            return await nothing_ends(action)
        finally:
            stopped.set()

    carrier = Carrier("waits", ActionKind.REPLICATE, waits)
    async with running(carrier) as runner:
        record = submit(runner, action("x"))
        while not carrier.carried:
            await asyncio.sleep(0.005)
        runner.ledger.cancel("x", time.monotonic())
        async with asyncio.timeout(10):
            await stopped.wait()
        assert record.state is ActionState.CANCELLED


async def test_closing_lets_actions_end_and_then_stops_them() -> None:
    release = asyncio.Event()

    async def waits(action: TierAction) -> int:
        await release.wait()
        return action.blocks

    quick, endless = (
        Carrier("quick", ActionKind.REPLICATE, waits),
        Carrier("endless", ActionKind.PIN, nothing_ends),
    )
    runner = ActionRunner(ActionLedger(limits=LedgerLimits(max_running=2)), (quick, endless), time.monotonic)
    runner.start()
    finishes, never = submit(runner, action("x")), submit(runner, action("y", ActionKind.PIN))
    while not (quick.carried and endless.carried):
        await asyncio.sleep(0.005)
    waiting = submit(runner, action("z"))
    closing = asyncio.create_task(runner.close(grace_s=0.5))
    await asyncio.sleep(0)
    release.set()
    await closing
    assert finishes.state is ActionState.DONE
    assert never.state is waiting.state is ActionState.CANCELLED
    assert quick.carried == ["x"]


async def test_metrics() -> None:
    registry = CollectorRegistry()
    async with running(Carrier("carrier", ActionKind.REPLICATE, everything)) as runner:
        registry.register(ActionCollector(runner))
        await ended(submit(runner, action("x")))
        text = generate_latest(registry).decode()
    labels = '{executor="carrier",kind="replicate",outcome="done"}'
    assert f"conductor_actions_ended_total{labels} 1.0" in text
    assert f"conductor_action_moved_bytes_total{labels} 800.0" in text
    assert f"conductor_action_predicted_benefit_seconds_total{labels} 0.5" in text
    assert 'conductor_actions_under_way{state="planned"} 0.0' in text


async def test_a_dry_run_moves_nothing() -> None:
    async with running(DryRunExecutor()) as runner:
        record = submit(runner, action("x"))
        assert await ended(record) is ActionState.FAILED
        assert (record.blocks_done, record.detail) == (0, "dry run: nothing was moved")
