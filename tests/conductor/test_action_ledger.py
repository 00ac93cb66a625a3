from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index import Holder, Namespace, Tier
from conductor.action_ledger import ActionLedger, ActionState, LedgerLimits
from conductor.actions import ActionKind, Place, Prefix, TierAction
from conductor.link_budgets import Direction, Link, LinkBudget, LinkBudgets, links_of

PREFIX = Prefix(Namespace("m", 16), np.arange(1, 9, dtype=np.uint64))
HOST_A, HOST_B, HOST_C = (Place(Holder(name), Tier.HOST) for name in "abc")
_ids = itertools.count()


def action(
    kind: ActionKind = ActionKind.REPLICATE,
    *,
    source: Place | None = HOST_A,
    target: Place = HOST_B,
    kv_bytes: int = 100,
    benefit_s: float = 1.0,
    deadline_s: float = 100.0,
) -> TierAction:
    return TierAction(
        action_id=f"a{next(_ids)}",
        kind=kind,
        prefix=PREFIX,
        start=0,
        stop=8,
        source=source,
        target=target,
        kv_bytes=kv_bytes,
        benefit_s=benefit_s,
        cost_s=0.0,
        deadline_s=deadline_s,
        reason="a test",
    )


def ids(actions: Sequence[TierAction]) -> list[str]:
    return [each.action_id for each in actions]


def test_an_action_runs_and_is_done() -> None:
    ledger = ActionLedger()
    order = action()
    record = ledger.submit(order, 0.0)
    assert record.state is ActionState.PLANNED
    assert ledger.advance(1.0).start == [order]
    assert record.state is ActionState.RUNNING
    ledger.assigned(order.action_id, "mover")
    ledger.completed(order.action_id, 8, 3.0)
    assert (record.state, record.blocks_done, record.partial, record.moved_bytes) == (
        ActionState.DONE,
        8,
        False,
        100,
    )
    [(key, tally)] = ledger.tallies.items()
    assert key == (ActionKind.REPLICATE, "mover", ActionState.DONE)
    assert (tally.actions, tally.moved_bytes, tally.seconds, tally.benefit_s) == (1, 100, 2.0, 1.0)


def test_the_most_useful_go_first_and_a_persons_orders_before_them() -> None:
    ledger = ActionLedger(limits=LedgerLimits(max_running=2))
    small, large, mine = action(benefit_s=1.0), action(benefit_s=5.0), action(benefit_s=0.0)
    for each in (small, large):
        ledger.submit(each, 0.0)
    ledger.submit(mine, 0.0, ordered=True)
    assert ledger.advance(0.0).start == [mine, large]
    ledger.completed(mine.action_id, 8, 1.0)
    assert ledger.advance(1.0).start == [small]


def test_lost_blocks_are_told() -> None:
    ledger = ActionLedger()
    lost, part = action(), action()
    records = [ledger.submit(each, 0.0) for each in (lost, part)]
    ledger.advance(0.0)
    ledger.completed(lost.action_id, 0, 1.0)
    ledger.completed(part.action_id, 2, 1.0)
    assert [r.state for r in records] == [ActionState.FAILED, ActionState.DONE]
    assert "the source had lost them" in records[0].detail
    assert records[1].partial
    assert records[1].moved_bytes == 25
    assert records[1].detail == "6 of 8 blocks were not there at the source"
    pin = action(ActionKind.PIN, source=None)
    ledger.submit(pin, 1.0)
    ledger.advance(1.0)
    ledger.completed(pin.action_id, 0, 2.0)
    found = ledger.find(pin.action_id)
    assert found is not None and found.detail == "there was nothing to pin"


def test_retryable_failures_are_tried_again_until_the_deadline() -> None:
    ledger = ActionLedger(limits=LedgerLimits(backoff_s=1.0, max_backoff_s=4.0))
    order = action(deadline_s=8.0)
    record = ledger.submit(order, 0.0)
    assert ledger.advance(0.0).start
    ledger.failed(order.action_id, "busy", 0.0, retryable=True)
    assert not ledger.advance(0.9).start
    assert ledger.advance(1.0).start
    ledger.failed(order.action_id, "busy", 1.0, retryable=True)
    assert not ledger.advance(2.9).start
    assert ledger.advance(3.0).start
    ledger.failed(order.action_id, "busy", 4.5, retryable=True)  # the next try would be at 8.5
    assert (record.state, record.attempts, record.detail) == (ActionState.FAILED, 3, "busy")
    assert ledger.find(order.action_id) is record


def test_other_failures_are_final() -> None:
    ledger = ActionLedger()
    order = action()
    record = ledger.submit(order, 0.0)
    ledger.advance(0.0)
    ledger.failed(order.action_id, "unknown model", 1.0)
    assert (record.state, record.detail) == (ActionState.FAILED, "unknown model")
    assert not ledger.advance(50.0).start


def test_an_attempt_without_end_is_stopped() -> None:
    ledger = ActionLedger(limits=LedgerLimits(timeout_s=5.0))
    order = action()
    record = ledger.submit(order, 0.0)
    ledger.advance(0.0)
    assert not ledger.advance(4.9).stop
    assert ledger.advance(5.0).stop == [order.action_id]
    assert record.state is ActionState.FAILED
    ledger.completed(order.action_id, 8, 6.0)  # too late
    assert record.state is ActionState.FAILED


def test_deadlines_abandon_what_waits_and_what_runs() -> None:
    ledger = ActionLedger(free_bytes=lambda place: 50.0 if place == HOST_C else None)
    waiting, running = action(target=HOST_C, deadline_s=5.0), action(deadline_s=5.0)
    records = [ledger.submit(each, 0.0) for each in (waiting, running)]
    assert ids(ledger.advance(0.0).start) == [running.action_id]
    assert "room at c/host" in records[0].detail
    assert ledger.advance(5.0).stop == [running.action_id]
    assert [r.state for r in records] == [ActionState.ABANDONED] * 2
    assert "room at c/host" in records[0].detail
    assert ledger.submit(action(deadline_s=5.0), 6.0).state is ActionState.ABANDONED


def test_cancelling() -> None:
    ledger = ActionLedger(limits=LedgerLimits(max_running=1))
    running, planned = action(benefit_s=2.0), action()
    for each in (running, planned):
        ledger.submit(each, 0.0)
    ledger.advance(0.0)
    for each in (running, planned):
        assert ledger.cancel(each.action_id, 1.0).state is ActionState.CANCELLED
    assert ledger.advance(1.0) == ([], [running.action_id])
    assert ledger.cancel(running.action_id, 2.0).ended_s == 1.0
    with pytest.raises(KeyError):
        ledger.cancel("nobody", 2.0)


def test_a_holder_that_left_takes_its_actions_along() -> None:
    ledger = ActionLedger()
    from_a, to_a, others = (
        action(),
        action(source=HOST_B, target=HOST_A),
        action(target=HOST_C, source=HOST_B),
    )
    records = [ledger.submit(each, 0.0) for each in (from_a, to_a, others)]
    ledger.advance(0.0)
    ledger.holder_left("a", 1.0)
    assert [r.state for r in records] == [ActionState.CANCELLED] * 2 + [ActionState.RUNNING]
    assert sorted(ledger.advance(1.0).stop) == sorted([from_a.action_id, to_a.action_id])
    assert records[0].detail == "a is gone"


def test_the_room_of_the_target_counts_what_is_on_its_way() -> None:
    ledger = ActionLedger(free_bytes=lambda place: 250.0)
    orders = [action() for _ in range(3)]
    for each in orders:
        ledger.submit(each, 0.0)
    assert len(ledger.advance(0.0).start) == 2
    ledger.completed(orders[0].action_id, 8, 1.0)
    assert not ledger.advance(1.0).start  # its bytes are not in the report yet
    assert ledger.advance(3.1).start == [orders[2]]
    evict = action(ActionKind.EVICT, source=None)
    ledger.submit(evict, 3.1)
    assert ledger.advance(3.1).start == [evict]  # takes no room


def test_better_actions_are_not_overtaken_on_a_scarce_link() -> None:
    budgets = LinkBudgets(of={Link("b", Direction.IN): LinkBudget(concurrent_bytes=100)})
    ledger = ActionLedger(budgets)
    first, large, small = (
        action(kv_bytes=60, benefit_s=3.0),
        action(kv_bytes=80, benefit_s=2.0),
        action(kv_bytes=10, benefit_s=1.0),
    )
    elsewhere = action(kv_bytes=10, benefit_s=0.5, target=HOST_C)
    for each in (first, large, small, elsewhere):
        ledger.submit(each, 0.0)
    assert ledger.advance(0.0).start == [first, elsewhere]
    ledger.completed(first.action_id, 8, 1.0)
    assert ledger.advance(1.0).start == [large, small]


def test_what_no_budget_can_ever_carry_fails_at_once() -> None:
    ledger = ActionLedger(LinkBudgets(LinkBudget(concurrent_bytes=99)))
    record = ledger.submit(action(), 0.0)
    assert record.state is ActionState.FAILED
    assert "a (out)" in record.detail
    assert ledger.submit(action(ActionKind.PIN, source=None), 0.0).state is ActionState.PLANNED


def test_bounds_of_queue_and_history() -> None:
    ledger = ActionLedger(limits=LedgerLimits(max_waiting=2, history=3))
    records = [ledger.submit(action(), 0.0) for _ in range(6)]
    assert [r.state for r in records[2:]] == [ActionState.ABANDONED] * 4
    assert ledger.find(records[2].action.action_id) is None
    assert [r.state for r in ledger.records()] == [ActionState.PLANNED] * 2 + [ActionState.ABANDONED] * 3
    assert ledger.records(ActionState.PLANNED, limit=1) == [records[1]]
    with pytest.raises(ValueError, match="used twice"):
        ledger.submit(records[0].action, 0.0)


@pytest.mark.parametrize(
    ("field", "value"), [("bytes_per_s", 0.0), ("burst_bytes", -1.0), ("concurrent_bytes", 0.0)]
)
def test_budgets_without_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(LinkBudget(), **{field: value})


class _Step(NamedTuple):
    after_s: float
    kind: ActionKind
    source: int
    target: int
    kv_bytes: int
    lifetime_s: float
    end: int  # which running action ends before, and how
    how: str


_places = [Place(Holder(name), tier) for name in "ab" for tier in (Tier.DEVICE, Tier.HOST)]
_steps = st.lists(
    st.builds(
        _Step,
        st.floats(0, 3),
        st.sampled_from([ActionKind.REPLICATE, ActionKind.PREFETCH, ActionKind.EVICT]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 120),
        st.floats(0.5, 30),
        st.integers(0, 10),
        st.sampled_from(["done", "retry", "failed", "cancel", "gone", "nothing"]),
    ),
    max_size=40,
)


@given(
    steps=_steps,
    rate=st.none() | st.floats(1, 100),
    burst=st.floats(0, 150),
    at_once=st.none() | st.floats(50, 200),
    room=st.none() | st.integers(0, 300),
)
def test_budgets_are_never_exceeded(
    steps: list[_Step], rate: float | None, burst: float, at_once: float | None, room: int | None
) -> None:
    budget = LinkBudget(rate, burst, at_once)
    ledger = ActionLedger(
        LinkBudgets(budget), LedgerLimits(timeout_s=10.0, history=10), free_bytes=lambda place: room
    )
    now_s = 0.0
    running: dict[str, TierAction] = {}
    started: dict[Link, list[tuple[float, int]]] = {}
    for step in steps:
        if running:
            name = list(running)[step.end % len(running)]
            if step.how == "done":
                ledger.completed(name, 8, now_s)
            elif step.how in ("retry", "failed"):
                ledger.failed(name, "so", now_s, retryable=step.how == "retry")
            elif step.how == "cancel":
                ledger.cancel(name, now_s)
            elif step.how == "gone":
                ledger.holder_left(running[name].target.holder.instance_id, now_s)
        now_s += step.after_s
        ledger.submit(
            action(
                step.kind,
                source=_places[step.source],
                target=_places[step.target],
                kv_bytes=step.kv_bytes,
                deadline_s=now_s + step.lifetime_s,
            ),
            now_s,
        )
        orders = ledger.advance(now_s)
        ledger.check_invariants()
        for each in orders.start:
            running[each.action_id] = each
            for link in links_of(each):
                started.setdefault(link, []).append((now_s, each.kv_bytes))
        running = {
            name: each
            for name, each in running.items()
            if (record := ledger.find(name)) is not None and record.state is ActionState.RUNNING
        }
        for link in started:
            under_way = sum(each.kv_bytes for each in running.values() if link in links_of(each))
            assert at_once is None or under_way <= at_once
        if room is not None:
            for place in _places:
                coming = [a for a in running.values() if a.target == place and a.kind is not ActionKind.EVICT]
                assert sum(each.kv_bytes for each in coming) <= room
    if rate is not None:
        for starts in started.values():
            for i, (from_s, _) in enumerate(starts):
                for j in range(i, len(starts)):
                    before = sum(kv_bytes for _, kv_bytes in starts[i:j])
                    assert before <= burst + rate * (starts[j][0] - from_s) + 1e-6
