"""Requests held until a rank is about to run dry: who waits, who goes next, and what becomes of the others."""

from typing import Any

import pytest
from cluster_factory import make_scheduler, request
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.admission import WaitingRoom
from conductor.dispatcher import Dispatcher
from conductor.placement import Held, Placement, RejectedError, Released, UnknownModelError, Usage

LONG = 65_536  # tokens; seconds of prefill


def make_dispatcher(
    roles: str = "m", *, capacity: int = 10, ageing: float | None = None, **options: Any
) -> Dispatcher:
    return Dispatcher(make_scheduler(roles), WaitingRoom(capacity, ageing=ageing), **options)


def placed(outcome: Placement | Held) -> Placement:
    assert isinstance(outcome, Placement)
    return outcome


def held(outcome: Placement | Held) -> int:
    assert isinstance(outcome, Held)
    return outcome.ticket


def test_without_a_room_everything_is_placed_at_once() -> None:
    dispatcher = Dispatcher(make_scheduler("m"))
    for seed in range(3):
        placed(dispatcher.arrive(request(LONG, seed=seed), 0.0))
    assert dispatcher.release(0.0) == []
    assert dispatcher.next_wakeup_s(0.0) is None


def test_an_idle_rank_takes_the_first_and_the_next_waits_until_it_is_nearly_done() -> None:
    dispatcher = make_dispatcher(deadline_s=100.0)
    first = placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    ticket = held(dispatcher.arrive(request(LONG, seed=2), 0.1))
    assert dispatcher.release(0.2) == []
    assert dispatcher.next_wakeup_s(0.2) is not None
    dispatcher._scheduler.first_token(first.placement_id, 3.0)
    (released,) = dispatcher.release(3.0)
    assert released.ticket == ticket
    assert isinstance(released.outcome, Placement)
    record = dispatcher._scheduler.records.get(released.outcome.placement_id)
    assert record is not None
    assert record.held_s == pytest.approx(2.9)
    assert dispatcher.next_wakeup_s(3.0) is None


def test_it_wakes_when_the_rank_is_predicted_to_run_dry() -> None:
    dispatcher = make_dispatcher(deadline_s=100.0, hold_above_s=0.02)
    first = placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    held(dispatcher.arrive(request(LONG, seed=2), 0.1))
    dry_s = first.plan.prefill_s - 0.02
    assert dispatcher.next_wakeup_s(0.1) == pytest.approx(dry_s)
    assert dispatcher.release(0.2) == []
    assert dispatcher.next_wakeup_s(0.2) == pytest.approx(dry_s)
    assert dispatcher.release(dry_s - 1e-6) == []
    assert dispatcher.next_wakeup_s(dry_s - 1e-6) == pytest.approx(dry_s - 1e-6 + 1e-3)  # not at once again
    assert len(dispatcher.release(dry_s + 1e-6)) == 1


def test_of_several_that_wait_the_first_that_may_go_wakes() -> None:
    dispatcher = make_dispatcher("mm", deadline_s=100.0)
    dry_s = [
        placed(dispatcher.arrive(request(tokens, seed=seed), 0.0)).plan.prefill_s
        for seed, tokens in enumerate((LONG, LONG // 2))
    ]
    for seed in (2, 3):
        held(dispatcher.arrive(request(LONG, seed=seed), 0.0))
    assert dispatcher.release(0.1) == []
    assert dispatcher.next_wakeup_s(0.1) == pytest.approx(min(dry_s) - 0.01)


def test_it_is_placed_anyway_when_it_would_be_late() -> None:
    dispatcher = make_dispatcher(deadline_s=4.0)
    placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    ticket = held(dispatcher.arrive(request(1024, seed=2), 0.0))
    assert dispatcher.release(3.0) == []
    (released,) = dispatcher.release(4.0)
    assert released.ticket == ticket
    assert isinstance(released.outcome, Placement)


def test_what_cannot_meet_its_objective_anyway_is_not_held() -> None:
    dispatcher = make_dispatcher()
    placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    ticket = held(dispatcher.arrive(request(LONG, seed=2), 0.1))
    assert [r.ticket for r in dispatcher.release(0.1)] == [ticket]


def test_shortest_first_where_asked() -> None:
    dispatcher = make_dispatcher(ageing=0.0, deadline_s=100.0)
    first = placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    long, short = (held(dispatcher.arrive(request(n, seed=n), 0.0)) for n in (32_768, 8192))
    dispatcher._scheduler.first_token(first.placement_id, 3.0)
    (released,) = dispatcher.release(3.0)
    assert released.ticket == short
    assert isinstance(released.outcome, Placement)
    dispatcher._scheduler.first_token(released.outcome.placement_id, 3.3)
    assert [r.ticket for r in dispatcher.release(3.3)] == [long]


def test_a_higher_priority_goes_first() -> None:
    dispatcher = make_dispatcher(deadline_s=100.0)
    first = placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    held(dispatcher.arrive(request(8192, seed=2), 0.0))
    urgent = held(dispatcher.arrive(request(8192, seed=3, priority=1), 0.1))
    dispatcher._scheduler.first_token(first.placement_id, 3.0)
    assert [r.ticket for r in dispatcher.release(3.0)] == [urgent]


def test_a_full_room_turns_the_newcomer_away_with_a_time_to_come_back() -> None:
    dispatcher = make_dispatcher(capacity=1, deadline_s=100.0)
    placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    held(dispatcher.arrive(request(1024, seed=2), 0.0))
    with pytest.raises(RejectedError) as rejected:
        dispatcher.arrive(request(1024, seed=3), 0.0)
    assert rejected.value.stage == "queue"
    assert rejected.value.retry_after_s >= 1.0
    assert len(dispatcher) == 1


def test_a_higher_priority_takes_the_place_of_a_lower() -> None:
    dispatcher = make_dispatcher(capacity=1, deadline_s=100.0)
    placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    lower = held(dispatcher.arrive(request(1024, seed=2), 0.0))
    held(dispatcher.arrive(request(1024, seed=3, priority=1), 0.0))
    (released,) = dispatcher.release(0.0)
    assert released.ticket == lower
    assert isinstance(released.outcome, RejectedError)


def test_who_leaves_is_not_placed() -> None:
    dispatcher = make_dispatcher(deadline_s=100.0)
    first = placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    dispatcher.leave(held(dispatcher.arrive(request(1024, seed=2), 0.0)))
    dispatcher._scheduler.first_token(first.placement_id, 3.0)
    assert dispatcher.release(3.0) == []
    dispatcher.leave(99)


def test_a_retry_does_not_wait_again() -> None:
    dispatcher = make_dispatcher()
    placed(dispatcher.arrive(request(LONG, seed=1), 0.0))
    placed(dispatcher.arrive(request(1024, seed=2, retry_of="1"), 0.0))


def test_an_unknown_model_is_refused_at_once() -> None:
    with pytest.raises(UnknownModelError):
        make_dispatcher().arrive(request(16, model="nope"), 0.0)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(16, 20_000), st.floats(0.0, 0.3), st.integers(0, 2)), min_size=1, max_size=25
    )
)
def test_everyone_is_answered_once(arrivals: list[tuple[int, float, int]]) -> None:
    dispatcher = make_dispatcher("mm", capacity=5)
    scheduler = dispatcher._scheduler
    now_s, answered, waiting = 0.0, 0, set()
    under_way: list[Placement] = []

    def take(released: list[Released]) -> None:
        nonlocal answered
        for each in released:
            waiting.remove(each.ticket)
            answered += 1
            if isinstance(each.outcome, Placement):
                under_way.append(each.outcome)

    for seed, (tokens, gap_s, priority) in enumerate(arrivals):
        now_s += gap_s
        try:
            outcome = dispatcher.arrive(request(tokens, seed=seed, priority=priority), now_s)
        except RejectedError:
            answered += 1
        else:
            if isinstance(outcome, Held):
                waiting.add(outcome.ticket)
            else:
                answered += 1
                under_way.append(outcome)
        if under_way and seed % 2:
            scheduler.finished(under_way.pop(0).placement_id, now_s, Usage())
        take(dispatcher.release(now_s))
    while waiting:
        now_s += 0.5
        take(dispatcher.release(now_s))
        assert now_s < 100, "somebody waits for ever"
    assert answered == len(arrivals)
    scheduler.check_invariants()
