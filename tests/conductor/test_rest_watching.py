"""What consoles ask again and again: rows of instances, history and problems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_factory import facts, hold, make_scheduler, request
from fastapi import FastAPI
from fastapi.testclient import TestClient

from conductor.cluster import EngineFacts
from conductor.outcomes import Outcomes
from conductor.placement import FailureKind, InstanceFailure, Usage
from conductor.rank import ReportedLoad
from conductor.rest import answers, make_rest_router
from conductor.scheduler import Scheduler


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler()


@pytest.fixture
def api(scheduler: Scheduler, clock: Clock) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(make_rest_router(scheduler, clock))
    with TestClient(app) as client:
        yield client


def loads(api: TestClient) -> dict[str, dict[str, Any]]:
    answer = api.get("/v1/cluster/load").json()
    answers.Loads.model_validate(answer)
    rows = [dict(zip(answer["fields"], row, strict=True)) for row in answer["instances"]]
    return {row["id"]: row for row in rows}


def test_a_row_has_what_its_instance_does(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    hold(scheduler, "p0", request(64).tokens)
    placement = scheduler.place(request(4096, seed=1), clock())
    name = placement.prefill.instance_id
    described = EngineFacts(facts().models, block_size=16, kv_capacity_blocks=1000, publishes_events=True)
    scheduler.instance_up(name, described)
    scheduler.report_load(name, 0, ReportedLoad(3, 2, 0.25, clock()))
    row = loads(api)[name]
    assert (row["pending_prefills"], row["placements"], row["role"]) == (1, 1, "prefill")
    assert row["queue_ms"] > 0
    assert (row["engine_running"], row["engine_waiting"], row["kv_usage"]) == (3, 2, 0.25)
    assert (row["kv_capacity_tokens"], row["block_size"]) == (16_000, 16)
    clock.now_s += 2
    assert loads(api)["p0"]["device_blocks"] == 4
    assert sum(row["active_decodes"] for row in loads(api).values()) == 1


def test_a_suspension_is_counted_down(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    for seed in range(2):
        placement = scheduler.place(request(64, seed=seed), clock())
        failure = InstanceFailure("d2", FailureKind.ERROR, "500")
        scheduler.failed(placement.placement_id, clock(), failure)
    clock.now_s += 2
    row = loads(api)["d2"]
    assert (row["health"], row["retry_in_s"], row["suspensions"]) == ("suspended", 3.0, 1)
    assert loads(api)["p0"]["retry_in_s"] is None


def test_an_answer_is_kept_for_a_second(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    assert loads(api)["p0"]["health"] == "up"
    scheduler.instance_down("p0", "away")
    clock.now_s += 0.9
    assert loads(api)["p0"]["health"] == "up"
    clock.now_s += 0.2
    assert loads(api)["p0"]["health"] == "down"


def serve(scheduler: Scheduler, at_s: float, ttft_s: float, seed: int) -> None:
    placement = scheduler.place(request(64, seed=seed), at_s)
    scheduler.first_token(placement.placement_id, at_s + ttft_s)
    scheduler.finished(placement.placement_id, at_s + ttft_s + 0.1, Usage(64, 11, 0))


def test_history_in_steps_of_any_length(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    for minute in range(100):
        serve(scheduler, 60.0 * minute + 1.0, 0.1 if minute % 2 else 3.0, minute)
    clock.now_s = 60.0 * 100
    short = api.get("/v1/cluster/history", params={"span_s": 300}).json()
    answers.History.model_validate(short)
    assert (short["step_s"], len(short["points"])) == (5, 60)
    assert sum(point["placed"] for point in short["points"]) == 4, "the step under way is one of the sixty"
    hour = api.get("/v1/cluster/history", params={"span_s": 3600}).json()
    assert (hour["step_s"], len(hour["points"])) == (60, 60)
    assert [point["placed"] for point in hour["points"]] == [1] * 59 + [0]
    assert [point["ttft_attainment"] for point in hour["points"][-5:]] == [0.0, 1.0, 0.0, 1.0, None]
    assert hour["points"][-3]["ttft_p99_ms"] == pytest.approx(3000, rel=0.03)
    ages = [point["age_s"] for point in hour["points"]]
    assert ages == sorted(ages, reverse=True) and ages[-1] == 0
    longest = api.get("/v1/cluster/history", params={"span_s": Outcomes.HISTORY_S}).json()
    assert (longest["step_s"], len(longest["points"])) == (300, 72)
    assert sum(point["placed"] for point in longest["points"]) == 100
    assert scheduler.outcomes.total().placed == 100
    assert api.get("/v1/cluster/history", params={"span_s": 5}).status_code == 422


def test_what_is_older_than_the_history_stays_in_the_total(scheduler: Scheduler) -> None:
    for hour in range(10):
        serve(scheduler, 3600.0 * hour, 0.1, hour)
    now_s = 3600.0 * 9 + 1
    steps = scheduler.outcomes.steps(now_s, 300, 72)
    assert sum(tally.placed for _, tally in steps) == 6
    assert scheduler.outcomes.total().placed == 10


def test_problems_are_listed(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    assert api.get("/v1/problems").json() == {"problems": []}
    scheduler.instance_down("p0", "connection refused")
    clock.now_s += 2
    answer = api.get("/v1/problems").json()
    answers.Problems.model_validate(answer)
    (problem,) = answer["problems"]
    assert (problem["severity"], problem["kind"], problem["instances"]) == ("warning", "down", ["p0"])


def test_placements_tell_what_they_reuse_by_tier(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    tokens = request(1024).tokens
    hold(scheduler, "p1", tokens[:512])
    scheduler.place(request(1024), clock())
    (listed,) = api.get("/v1/placements").json()["placements"]
    assert listed["reused_tokens"] == {"device": 512}
