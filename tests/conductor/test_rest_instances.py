"""Instances that join, are replaced, drained and removed over REST, over the real scheduler and index."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_factory import facts, hold, make_scheduler, request
from fastapi import FastAPI
from fastapi.testclient import TestClient

from conductor.cluster import InstanceState
from conductor.discovery import EventEndpoints
from conductor.membership import Membership
from conductor.placement import Usage
from conductor.rest import answers, make_rest_router
from conductor.scheduler import Scheduler

BODY: dict[str, Any] = {"url": "http://10.0.0.9:8000", "role": "prefill"}


class Watched:
    """Instances that are followed, and the endpoints that were given for them."""

    def __init__(self) -> None:
        self.instances: dict[str, InstanceState] = {}
        self.endpoints: dict[str, dict[int, EventEndpoints] | None] = {}

    def watch(self, instance: InstanceState, endpoints: dict[int, EventEndpoints] | None = None) -> None:
        self.instances[instance.instance_id] = instance
        self.endpoints[instance.instance_id] = endpoints

    def forget(self, instance_id: str) -> None:
        self.instances.pop(instance_id, None)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler("pd")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def membership(scheduler: Scheduler, clock: Clock, watched: Watched) -> Membership:
    membership = Membership(scheduler, clock)
    membership.watcher = watched
    return membership


@pytest.fixture
def api(scheduler: Scheduler, clock: Clock, membership: Membership) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(make_rest_router(scheduler, clock, membership=membership))
    with TestClient(app) as client:
        yield client


def test_instances_show_role_health_load_and_cache(api: TestClient, scheduler: Scheduler) -> None:
    wanted = request(1024)
    hold(scheduler, "p0", wanted.tokens)
    scheduler.place(wanted, 1.0)
    listed = api.get("/v1/instances").json()
    answers.Instances.model_validate(listed)
    instances = {i["id"]: i for i in listed["instances"]}
    assert instances["p0"]["role"] == "prefill"
    assert instances["p0"]["health"] == "up"
    assert instances["p0"]["ranks"][0]["cached_blocks"] == {"device": 64}
    assert instances["p0"]["ranks"][0]["pending_prefills"] == 1
    assert instances["d1"]["ranks"][0]["cached_blocks"] == {}
    assert api.get("/v1/instances/p0").json() == instances["p0"]
    assert api.get("/v1/instances/p9").status_code == 404


def test_an_instance_joins_and_takes_requests_once_it_is_up(
    api: TestClient, scheduler: Scheduler, watched: Watched
) -> None:
    stream = {"endpoint": "tcp://10.0.0.9:5557", "topic": "kv"}
    answer = api.put("/v1/instances/p9", json={**BODY, "location": "a/b/c/d", "kv_events": [stream]})
    assert answer.status_code == 201
    answers.Instance.model_validate(answer.json())
    assert (answer.json()["health"], answer.json()["location"]) == ("starting", "a/b/c/d")
    assert watched.endpoints["p9"] == {0: EventEndpoints("tcp://10.0.0.9:5557", None, "kv")}
    only_p9 = {"excluded": frozenset({"p0"})}
    assert scheduler.consider(request(64, **only_p9), 1.0).placement.prefill.instance_id == "d1"
    scheduler.instance_up("p9", facts())
    assert scheduler.place(request(4096, **only_p9), 1.0).prefill.instance_id == "p9"
    scheduler.check_invariants()


def test_the_same_description_again_changes_nothing(
    api: TestClient, scheduler: Scheduler, watched: Watched
) -> None:
    assert api.put("/v1/instances/p9", json=BODY).status_code == 201
    scheduler.instance_up("p9", facts())
    before = scheduler.cluster["p9"]
    assert api.put("/v1/instances/p9", json={**BODY, "id": "p9"}).status_code == 200
    assert scheduler.cluster["p9"] is before
    assert api.put("/v1/instances/p9", json={**BODY, "role": "mixed"}).status_code == 201
    assert scheduler.cluster["p9"] is watched.instances["p9"] is not before


def test_a_replaced_instance_forgets_its_cache_and_ends_its_placements(
    api: TestClient, scheduler: Scheduler
) -> None:
    wanted = request(4096)
    hold(scheduler, "p0", wanted.tokens)
    old = scheduler.place(wanted, 1.0)
    assert api.put("/v1/instances/p0", json={**BODY, "url": "http://10.0.0.7:8000"}).status_code == 201
    scheduler.instance_up("p0", facts())
    new = scheduler.place(wanted, 2.0)
    assert (old.overlap_tokens, new.overlap_tokens) == (4080, 0)
    assert new.prefill.url == "http://10.0.0.7:8000"
    scheduler.check_invariants()
    for placement in (old, new):
        scheduler.first_token(placement.placement_id, 2.5)
        scheduler.finished(placement.placement_id, 3.0, Usage(4096, 9, 0))
    assert scheduler.active_placements == 0
    scheduler.check_invariants()


def test_a_removed_instance_is_gone_at_once(
    api: TestClient, scheduler: Scheduler, watched: Watched, membership: Membership
) -> None:
    api.put("/v1/instances/p9", json=BODY)
    scheduler.instance_up("p9", facts())
    hold(scheduler, "p9", request(8192).tokens)
    placement = scheduler.place(request(8192), 1.0)
    assert placement.prefill.instance_id == "p9"
    gone = api.delete("/v1/instances/p9")
    answers.InstanceRemoval.model_validate(gone.json())
    assert gone.json() == {"id": "p9", "status": "removed", "placements_under_way": 1}
    assert api.get("/v1/instances/p9").status_code == 404
    assert api.delete("/v1/instances/p9").status_code == 404
    assert "p9" not in watched.instances
    assert scheduler.place(request(8192), 1.0).prefill.instance_id == "p0"
    scheduler.prefill_finished(placement.placement_id, 2.0)
    scheduler.first_token(placement.placement_id, 2.1)
    scheduler.finished(placement.placement_id, 3.0, Usage())
    scheduler.check_invariants()


def test_a_draining_instance_leaves_when_its_placements_have_ended(
    api: TestClient, scheduler: Scheduler, membership: Membership
) -> None:
    api.put("/v1/instances/p9", json=BODY)
    scheduler.instance_up("p9", facts())
    hold(scheduler, "p9", request(8192).tokens)
    placement = scheduler.place(request(8192), 1.0)
    answer = api.delete("/v1/instances/p9", params={"drain": True}).json()
    assert answer == {"id": "p9", "status": "draining", "placements_under_way": 1}
    assert api.get("/v1/instances/p9").json()["health"] == "draining"
    assert scheduler.place(request(8192), 1.0).prefill.instance_id == "p0"
    # Its health check goes on, and a restart does not bring it back as a candidate.
    scheduler.instance_up("p9", facts())
    membership.check_drained()
    assert api.get("/v1/instances/p9").json()["health"] == "draining"
    scheduler.prefill_finished(placement.placement_id, 2.0)
    membership.check_drained()
    assert scheduler.cluster.get("p9") is not None, "its KV cache is still on its way to the decode rank"
    scheduler.first_token(placement.placement_id, 2.1)
    membership.check_drained()
    assert scheduler.cluster.get("p9") is None
    scheduler.check_invariants()


@pytest.mark.parametrize("ends", ["deadline", "down"])
def test_draining_ends_at_the_deadline_or_with_the_instance(
    api: TestClient, scheduler: Scheduler, membership: Membership, clock: Clock, ends: str
) -> None:
    scheduler.place(request(8192), 1.0)
    api.delete("/v1/instances/p0", params={"drain": True, "deadline_s": 5})
    clock.now_s = 5.9
    membership.check_drained()
    assert scheduler.cluster.get("p0") is not None
    if ends == "down":
        scheduler.instance_down("p0", "connection refused")
    else:
        clock.now_s = 6.0
    membership.check_drained()
    assert scheduler.cluster.get("p0") is None


def test_putting_a_draining_instance_brings_it_back(api: TestClient, scheduler: Scheduler) -> None:
    api.put("/v1/instances/p9", json=BODY)
    scheduler.instance_up("p9", facts())
    scheduler.place(request(8192), 1.0)
    api.delete("/v1/instances/p9", params={"drain": True})
    assert api.put("/v1/instances/p9", json=BODY).status_code == 201
    assert not scheduler.cluster["p9"].draining


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "url"),
        ({"url": "ftp://x"}, "must look like http://host:port"),
        ({**BODY, "role": "both"}, "role"),
        ({**BODY, "instance_class": "tpu"}, "unknown instance class 'tpu'"),
        ({**BODY, "location": "a//b"}, "site/zone/rack/node"),
        ({**BODY, "ranks": 0}, "ranks"),
        ({**BODY, "ranks": 10**9}, "less than or equal to 1024"),
        ({**BODY, "block_size": 10**30}, "less than or equal to 65536"),
        ({"url": "http://x:99999"}, "'http://x:99999': Port out of range"),
        ({"url": "http://x:0"}, "no engine listens on port 0"),
        ({**BODY, "kv_events": []}, "0 entries for 1 ranks"),
        ({**BODY, "rolle": "mixed"}, "rolle"),
        ({**BODY, "id": "other"}, "'p0' in the path"),
    ],
)
def test_bad_descriptions_change_nothing(
    api: TestClient, scheduler: Scheduler, body: dict[str, Any], said: str
) -> None:
    before = scheduler.cluster["p0"]
    answer = api.put("/v1/instances/p0", json=body)
    assert (answer.status_code, said in answer.text) == (422, True), answer.text
    assert scheduler.cluster["p0"] is before
