"""Instances that fail requests are left alone, for longer and longer, and come back with one request that tries."""

from __future__ import annotations

import pytest
from cluster_factory import facts, make_scheduler, request

from conductor.circuit import SuspensionPolicy
from conductor.cluster import Health
from conductor.explanation import explain
from conductor.placement import FailureKind, InstanceFailure, NoInstanceError, Placement
from conductor.scheduler import Scheduler

PAUSE_S, LONGEST_S = 5.0, 20.0
POLICY = SuspensionPolicy(
    after_failures=3,
    pause_s=PAUSE_S,
    longest_pause_s=LONGEST_S,
    failure_rate=0.5,
    min_requests=8,
    window_s=10.0,
)


def scheduler(roles: str = "m") -> Scheduler:
    return make_scheduler(roles, suspension=POLICY)


def place(s: Scheduler, now_s: float, number: int = 0) -> Placement:
    return s.place(request(64, seed=number, request_id=f"r{number}"), now_s)


def fail(s: Scheduler, now_s: float, instance: str = "m0", kind: FailureKind = FailureKind.ERROR) -> None:
    s.failed(place(s, now_s).placement_id, now_s, InstanceFailure(instance, kind, "HTTP 500"))


def succeed(s: Scheduler, now_s: float) -> None:
    placement = place(s, now_s)
    s.first_token(placement.placement_id, now_s)
    s.cancelled(placement.placement_id, now_s)


def suspended(s: Scheduler, now_s: float = 0.0) -> Scheduler:
    for _ in range(POLICY.after_failures):
        fail(s, now_s)
    assert s.cluster["m0"].health is Health.SUSPENDED
    return s


def test_one_request_tries_after_the_pause_and_its_success_closes_the_circuit() -> None:
    s = suspended(scheduler())
    with pytest.raises(NoInstanceError, match="3 requests failed in a row, last: HTTP 500"):
        place(s, PAUSE_S - 0.1)
    probe = place(s, PAUSE_S)
    with pytest.raises(NoInstanceError, match="one request tries"):
        place(s, PAUSE_S + 1)
    s.first_token(probe.placement_id, PAUSE_S + 2)
    assert s.cluster["m0"].health is Health.UP
    for number in range(5):
        place(s, PAUSE_S + 2, number)


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.TIMEOUT])
def test_the_pause_doubles_while_the_instance_goes_on_failing(kind: FailureKind) -> None:
    s, now_s, pause_s = suspended(scheduler()), 0.0, PAUSE_S
    for _ in range(5):
        with pytest.raises(NoInstanceError):
            place(s, now_s + pause_s - 0.01)
        now_s += pause_s
        fail(s, now_s, kind=kind)
        pause_s = min(2 * pause_s, LONGEST_S)
    assert s.cluster["m0"].circuit.suspensions == 6


def test_the_pause_grows_for_one_that_fails_again_soon_and_not_for_one_that_worked_for_long() -> None:
    s = suspended(scheduler())
    succeed(s, PAUSE_S)
    suspended(s, PAUSE_S + 1)  # soon
    with pytest.raises(NoInstanceError):
        place(s, PAUSE_S + 1 + 2 * PAUSE_S - 0.1)
    later_s = PAUSE_S + 1 + 2 * PAUSE_S
    succeed(s, later_s)
    later_s += LONGEST_S + 1
    suspended(s, later_s)
    place(s, later_s + PAUSE_S)


def test_a_probe_that_tells_nothing_lets_another_one_try() -> None:
    s = suspended(scheduler())
    s.cancelled(place(s, PAUSE_S).placement_id, PAUSE_S + 1)
    again = place(s, PAUSE_S + 1)
    with pytest.raises(NoInstanceError):
        place(s, PAUSE_S + 1)
    s.first_token(again.placement_id, PAUSE_S + 2)
    place(s, PAUSE_S + 2)


def test_only_the_probe_decides_while_it_is_under_way() -> None:
    s = scheduler()
    before = [place(s, 0.0, number).placement_id for number in range(2)]
    suspended(s)
    s.first_token(before[0], 1.0)
    assert s.cluster["m0"].health is Health.SUSPENDED
    probe = place(s, PAUSE_S)
    s.failed(before[1], PAUSE_S + 1, InstanceFailure("m0", FailureKind.TIMEOUT, "slow"))
    s.first_token(probe.placement_id, PAUSE_S + 2)
    assert s.cluster["m0"].health is Health.UP


@pytest.mark.parametrize("failures", [3, 4])
def test_a_rate_of_failures_suspends_once_there_were_enough_requests(failures: int) -> None:
    s = scheduler()
    fates = [number % 2 == 0 for number in range(2 * failures)]  # never two in a row
    for number, works in enumerate(fates):
        assert s.cluster["m0"].health is Health.UP, number
        if works:
            succeed(s, 0.1 * number)
        else:
            fail(s, 0.1 * number)
    enough = 2 * failures >= POLICY.min_requests
    assert (s.cluster["m0"].health is Health.SUSPENDED) is enough
    assert ("4 of 8 requests failed within 10 s" in s.cluster["m0"].health_reason) is enough


def test_failures_that_are_long_ago_do_not_count() -> None:
    s = scheduler()
    for number in range(40):
        (succeed if number % 2 == 0 else fail)(s, 4.0 * number)  # five requests in any ten seconds
    assert s.cluster["m0"].health is Health.UP


def test_each_role_of_a_pair_is_tried_for_itself() -> None:
    s = scheduler("pd")
    for _ in range(POLICY.after_failures):
        fail(s, 0.0, "d1")
    assert (s.cluster["p0"].health, s.cluster["d1"].health) == (Health.UP, Health.SUSPENDED)
    probe = s.place(request(4096), PAUSE_S)
    s.prefill_finished(probe.placement_id, PAUSE_S + 1)
    assert s.cluster["d1"].health is Health.SUSPENDED
    s.first_token(probe.placement_id, PAUSE_S + 2)
    assert s.cluster["d1"].health is Health.UP


def test_an_instance_that_went_down_begins_anew() -> None:
    s = suspended(scheduler())
    s.instance_down("m0", "connection refused")
    s.instance_up("m0", facts())
    fail(s, 1.0)
    fail(s, 1.0)
    assert s.cluster["m0"].health is Health.UP
    assert s.cluster["m0"].circuit.suspensions == 1


def test_a_draining_instance_stays_one() -> None:
    s = scheduler("mm")
    held = s.place(request(excluded=frozenset({"m1"})), 0.0)
    s.drain_instance("m0")
    for _ in range(5):
        s.failed(held.placement_id, 1.0, InstanceFailure("m0", FailureKind.ERROR, "HTTP 500"))
    assert s.cluster["m0"].health is Health.DRAINING


@pytest.mark.parametrize("how", ["draining", "withheld"])
def test_who_is_to_get_no_requests_is_not_suspended_by_the_one_that_tries(how: str) -> None:
    """A suspension would end with another request."""
    s = suspended(scheduler("mm"))
    probe = s.place(request(excluded=frozenset({"m1"})), PAUSE_S)
    if how == "draining":
        s.drain_instance("m0")
    else:
        s.withhold_instance("m0", "its pod is not ready")
    s.failed(probe.placement_id, PAUSE_S + 1, InstanceFailure("m0", FailureKind.ERROR, "HTTP 500"))
    assert s.cluster["m0"].health == how
    assert s.place(request(), 10 * LONGEST_S).prefill.instance_id == "m1"
    s.check_invariants()


def test_a_placement_elsewhere_says_why() -> None:
    s = scheduler("mm")
    for number in range(POLICY.after_failures):
        placement = s.place(request(seed=number, excluded=frozenset({"m1"})), 0.0)
        s.failed(placement.placement_id, 0.0, InstanceFailure("m0", FailureKind.ERROR, "HTTP 500"))
    record = s.find(place(s, 1.0).placement_id)
    assert record is not None
    why = explain(record, 1.0)["excluded"]["m0"]
    assert why == "suspended: for 5 s: 3 requests failed in a row, last: HTTP 500"
