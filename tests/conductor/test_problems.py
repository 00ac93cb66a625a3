"""What is called a problem, and what is not."""

from __future__ import annotations

import dataclasses

import pytest
from cluster_factory import make_scheduler, request

from cache_index import Holder, StreamStats
from conductor.placement import FailureKind, InstanceFailure, PlacementError, Usage
from conductor.problems import Problem, Severity, problems
from conductor.scheduler import Scheduler

STREAM = StreamStats(Holder("p0"), "warm", 9, 10, 20, 0, 0, 0, 0, 0, 0, 1.0)


def found(scheduler: Scheduler, *streams: StreamStats, now_s: float = 10.0) -> dict[str, Problem]:
    return {problem.kind: problem for problem in problems(scheduler, streams, now_s, 120.0)}


def serve(scheduler: Scheduler, number: int, ttft_s: float = 0.1) -> None:
    placement = scheduler.place(request(512, seed=number), 5.0)
    scheduler.first_token(placement.placement_id, 5.0 + ttft_s)
    scheduler.finished(placement.placement_id, 6.0 + ttft_s, Usage(512, 101, 0))


def test_a_cluster_that_works_has_none() -> None:
    scheduler = make_scheduler("mm")
    for number in range(30):
        serve(scheduler, number)
    assert problems(scheduler, (STREAM,), 10.0, 120.0) == []


def test_instances_in_the_same_state_for_the_same_reason_are_one_problem() -> None:
    scheduler = make_scheduler("mmmm")
    for name in ("m0", "m2"):
        scheduler.instance_down(name, "connection refused")
    scheduler.instance_down("m1", "GET /health answered 500")
    listed = problems(scheduler, (), 10.0, 120.0)
    assert sorted(problem.instances for problem in listed) == [("m0", "m2"), ("m1",)]
    assert {problem.says for problem in listed} == {
        "m0, m2 are down: connection refused",
        "m1 is down: GET /health answered 500",
    }
    scheduler.instance_down("m3", "connection refused")
    first = problems(scheduler, (), 10.0, 120.0)[0]
    assert (first.kind, first.severity) == ("not ready", Severity.CRITICAL), "critical ones come first"


def test_many_names_are_cut_short() -> None:
    scheduler = make_scheduler("m" * 20)
    for number in range(19):
        scheduler.instance_down(f"m{number}", "away")
    problem = found(scheduler)["down"]
    assert problem.says.endswith("m7 and 11 others are down: away") and len(problem.instances) == 19


def test_an_instance_that_fails_requests() -> None:
    scheduler = make_scheduler("m")
    for number in range(2):
        placement = scheduler.place(request(64, seed=number), 1.0)
        scheduler.failed(placement.placement_id, 1.0, InstanceFailure("m0", FailureKind.ERROR, "500"))
    assert "500" in found(scheduler, now_s=2.0)["suspended"].says


def test_requests_that_fail_or_are_refused() -> None:
    scheduler = make_scheduler("mm")
    for number in range(40):
        serve(scheduler, number)
    nobody = frozenset({"m0", "m1"})
    for number in range(20):
        with pytest.raises(PlacementError):
            scheduler.place(request(64, seed=number, excluded=nobody), 6.0)
    refused = found(scheduler)["refused"]
    assert (refused.severity, refused.says.split(" in ")[0]) == (
        Severity.CRITICAL,
        "20 of 60 placements asked for",
    )
    for number in range(5):
        placement = scheduler.place(request(64, seed=number), 7.0)
        scheduler.failed(placement.placement_id, 7.0, InstanceFailure("m0", FailureKind.TIMEOUT, "60 s"))
    assert found(scheduler)["failing"].says.startswith("5 of 45 placements")


def test_an_objective_that_is_missed() -> None:
    scheduler = make_scheduler("mm")
    for number in range(30):
        serve(scheduler, number, ttft_s=3.0 if number % 3 == 0 else 0.1)
    assert found(scheduler, now_s=12.0)["TTFT objective"].says.startswith("67% of the requests")


def test_events_that_were_missed() -> None:
    scheduler = make_scheduler("pd")
    cold = dataclasses.replace(STREAM, state="cold")
    other = dataclasses.replace(cold, holder=Holder("d1", 1))
    assert found(scheduler, STREAM, cold, other)["events missed"].instances == ("d1", "p0")
    assert found(scheduler, dataclasses.replace(STREAM, state="connecting")) == {}
