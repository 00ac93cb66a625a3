"""Instances that register over REST: they stay by heartbeats, fall silent, come back, and leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_factory import facts, make_scheduler, request
from fastapi import FastAPI
from fastapi.testclient import TestClient

from conductor.cluster import Health
from conductor.discovery.discovered import Discovered
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership
from conductor.rest import answers, make_rest_router
from conductor.scheduler import Scheduler

BODY: dict[str, Any] = {"url": "http://10.0.0.9:8000", "role": "mixed"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


class Service:
    """The REST API over a cluster with the instance `m0` of the configuration."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.scheduler: Scheduler = make_scheduler("m")
        given = [InstanceConfig(id="m0", url="http://10.0.0.0:8000")]
        self.membership = Membership(self.scheduler, self.clock, given)
        self.discovered = Discovered.by_registration(self.membership, self.clock)
        app = FastAPI()
        app.include_router(
            make_rest_router(
                self.scheduler, self.clock, membership=self.membership, discovered=self.discovered
            )
        )
        self.http = TestClient(app)

    def register(self, instance_id: str, ttl_s: float = 10.0, **fields: Any) -> Any:
        return self.http.put(f"/v1/instances/{instance_id}", params={"ttl_s": ttl_s}, json={**BODY, **fields})

    def pass_s(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.discovered.registrations.expire()
        self.membership.check_drained()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    with service.http:
        yield service


def test_a_registered_instance_stays_by_heartbeats(service: Service) -> None:
    answer = service.register("e")
    assert answer.status_code == 201
    answers.Instance.model_validate(answer.json())
    assert (answer.json()["source"], answer.json()["registration_expires_in_s"]) == ("registration", 10.0)
    service.scheduler.instance_up("e", facts())
    for _ in range(30):
        service.pass_s(9.0)
        beat = service.http.post("/v1/instances/e/heartbeat")
        answers.Heartbeat.model_validate(beat.json())
        assert (beat.status_code, beat.json()) == (200, {"id": "e", "expires_in_s": 10.0})
    assert service.scheduler.cluster["e"].health is Health.UP
    before = service.scheduler.cluster["e"]
    assert service.register("e").status_code == 200, "registering again is a heartbeat, too"
    assert service.scheduler.cluster["e"] is before
    assert service.register("e", role="decode").status_code == 201
    assert service.scheduler.cluster["e"] is not before


def test_silence_withholds_and_then_removes(service: Service) -> None:
    service.register("e")
    service.scheduler.instance_up("e", facts())
    service.pass_s(10.0)
    instance = service.scheduler.cluster["e"]
    assert instance.health is Health.WITHHELD
    assert instance.health_reason == "registered for 10 s, and no heartbeat since"
    assert service.scheduler.place(request(64), 1.0).decode.instance_id == "m0"
    service.http.post("/v1/instances/e/heartbeat")
    assert instance.health is Health.UP
    service.pass_s(69.9)
    assert instance.health is Health.WITHHELD
    service.pass_s(0.2)
    assert service.scheduler.cluster.get("e") is None
    gone = service.http.post("/v1/instances/e/heartbeat")
    assert gone.status_code == 404
    assert "register it again" in gone.text
    assert service.register("e").status_code == 201


def test_an_instance_leaves_by_itself(service: Service) -> None:
    service.register("e")
    service.scheduler.instance_up("e", facts())
    left = service.http.delete("/v1/instances/e", params={"drain": True, "deadline_s": 30})
    assert left.json() == {"id": "e", "status": "draining", "placements_under_way": 0}
    assert service.http.post("/v1/instances/e/heartbeat").status_code == 404
    service.membership.check_drained()
    assert service.scheduler.cluster.get("e") is None


def test_leaving_takes_out_no_instance_of_another_source(service: Service) -> None:
    refused = service.http.delete("/v1/instances/m0", params={"registered": True, "drain": True})
    assert (refused.status_code, "of the source configuration" in refused.text) == (409, True)
    assert not service.scheduler.cluster["m0"].draining
    service.register("e")
    assert service.http.delete("/v1/instances/e", params={"registered": True}).json()["status"] == "removed"
    assert service.http.delete("/v1/instances/e", params={"registered": True}).status_code == 404


def test_nobody_registers_as_another(service: Service) -> None:
    taken = service.register("m0")
    assert (taken.status_code, "another source (configuration)" in taken.text) == (409, True)
    same_url = service.register("e", url="http://10.0.0.0:8000")
    assert (same_url.status_code, "in the cluster already, as 'm0'" in same_url.text) == (409, True)
    assert service.scheduler.cluster["m0"].health is Health.UP
    assert service.http.get("/v1/discovery").json()["sources"][0]["refused"] == {}


@pytest.mark.parametrize(
    ("ttl_s", "fields", "said"),
    [
        (0, {}, "ttl_s"),
        (4_000, {}, "ttl_s"),
        (10, {"location": "a//b"}, "site/zone/rack/node"),
        (10, {"rolle": "mixed"}, "rolle"),
        (10, {"url": "http://x/y"}, "must look like http://host:port"),
    ],
)
def test_bad_registrations_change_nothing(
    service: Service, ttl_s: float, fields: dict[str, Any], said: str
) -> None:
    answer = service.register("e", ttl_s, **fields)
    assert (answer.status_code, said in answer.text) == (422, True), answer.text
    assert service.scheduler.cluster.get("e") is None
    service.register("e")
    assert service.register("e", ttl_s, **fields).status_code == 422
    assert service.scheduler.cluster["e"].url == BODY["url"]


def test_putting_without_a_time_to_live_makes_an_instance_permanent(service: Service) -> None:
    service.register("e")
    service.scheduler.instance_up("e", facts())
    service.pass_s(10.0)
    assert service.scheduler.cluster["e"].health is Health.WITHHELD
    assert service.http.put("/v1/instances/e", json=BODY).status_code == 200
    service.pass_s(1_000.0)
    assert service.scheduler.cluster["e"].health is Health.UP
    shown = service.http.get("/v1/instances/e").json()
    assert (shown["source"], shown["registration_expires_in_s"]) == ("rest", None)


def test_the_sources_are_shown(service: Service) -> None:
    service.register("e")
    shown = service.http.get("/v1/discovery").json()
    answers.Discovery.model_validate(shown)
    (source,) = shown["sources"]
    assert source["source"] == "registration"
    assert source["instances"] == ["e"]
    assert source["changes"] == {"added": 1}
    assert source["synced_s_ago"] == 0.0
