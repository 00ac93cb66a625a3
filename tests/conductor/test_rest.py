"""The REST API over the real scheduler and index."""

from collections.abc import Iterator

import pytest
from cluster_factory import hold, make_scheduler, request
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cache_index import VllmEventSource
from conductor.cache_rest import make_cache_router
from conductor.metrics import ClusterCollector
from conductor.rest import make_rest_router


@pytest.fixture
def scheduler():
    return make_scheduler()


@pytest.fixture
def api(scheduler) -> Iterator[TestClient]:
    events = VllmEventSource(scheduler.index)
    app = FastAPI()
    app.include_router(make_rest_router(scheduler, scheduler.index, clock=lambda: 1.0))
    app.include_router(make_cache_router(scheduler.index, events))
    with TestClient(app) as client:
        yield client
    events.close()


def test_a_placement_can_be_asked_for_reported_on_and_explained(api: TestClient, scheduler) -> None:
    wanted = request(1024)
    hold(scheduler, "p1", wanted.tokens[:512])
    answer = api.post("/v1/placements", json={"model": "llama", "token_ids": wanted.tokens.tolist()})
    assert answer.status_code == 200
    placement = answer.json()
    assert placement["prefill_instance"] == "p1"
    assert placement["prefill_url"] == "http://10.0.0.1:8000"
    assert placement["overlap_tokens"] == 512
    path = f"/v1/placements/{placement['placement_id']}"
    assert scheduler.active_placements == 1
    done = {"first_token": True, "finished": True, "cached_tokens": 512}
    assert api.post(path, json=done).status_code == 200
    assert scheduler.active_placements == 0
    explained = api.get(path).json()
    assert explained["outcome"] == "finished"
    assert explained["observed"]["cached_tokens"] == 512
    assert len(explained["candidates"]) == 4
    assert api.get("/v1/placements").json()["placements"][0]["placement_id"] == placement["placement_id"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt-5", "token_ids": [1]}, 404, "served: llama"),
        ({"model": "llama", "token_ids": []}, 422, "token_ids"),
        ({"model": "llama", "token_ids": [-1]}, 422, "greater than or equal to 0"),
        ({"model": "llama"}, 422, "token_ids"),
        ({"model": "llama", "token_ids": [1], "modle": "x"}, 422, "modle"),
        ({"model": "llama", "token_ids": [1], "exclude": ["p0", "p1"]}, 503, "failed this request before"),
    ],
)
def test_bad_questions_are_answered_precisely(api: TestClient, body: dict, status: int, said: str) -> None:
    answer = api.post("/v1/placements", json=body)
    assert answer.status_code == status
    assert said in answer.text


def test_an_unknown_placement_is_404(api: TestClient) -> None:
    assert api.get("/v1/placements/none").status_code == 404
    assert api.post("/v1/placements/none", json={"finished": True}).status_code == 404


def test_instances_show_role_health_load_and_cache(api: TestClient, scheduler) -> None:
    wanted = request(1024)
    hold(scheduler, "p0", wanted.tokens)
    scheduler.place(wanted, 1.0)
    instances = {i["id"]: i for i in api.get("/v1/instances").json()["instances"]}
    assert instances["p0"]["role"] == "prefill"
    assert instances["p0"]["health"] == "up"
    assert instances["p0"]["ranks"][0]["cached_blocks"] == {"device": 64}
    assert instances["p0"]["ranks"][0]["pending_prefills"] == 1
    assert instances["p1"]["ranks"][0]["cached_blocks"] == {}


def test_the_tree_shows_prefixes_with_their_holders(api: TestClient, scheduler) -> None:
    hold(scheduler, "p0", request(64).tokens)
    hold(scheduler, "d2", request(64).tokens[:32])
    tree = api.get("/v1/cache/tree").json()
    assert (tree["blocks"], tree["residencies"]) == (4, 6)
    nodes = {node["depth"]: node for node in tree["nodes"]}
    assert sorted(h["instance"] for h in nodes[min(nodes)]["holders"]) == ["d2", "p0"]
    assert api.get("/v1/cache/tree", params={"limit": 1}).json()["nodes"].__len__() == 1
    assert api.get("/v1/cache/streams").json() == {"streams": []}


def test_cluster_metrics_are_scraped_from_live_state(scheduler) -> None:
    scheduler.place(request(1024), 1.0)
    scheduler.instance_down("d2", "gone")
    collector = ClusterCollector(scheduler, lambda: 1.0)
    samples = {
        (s.name, *s.labels.values()): s.value for family in collector.collect() for s in family.samples
    }
    assert samples["conductor_instance_up", "p0", "prefill"] == 1.0
    assert samples["conductor_instance_up", "d2", "decode"] == 0.0
    assert samples["conductor_active_placements",] == 1
    assert sum(v for k, v in samples.items() if k[0] == "conductor_pending_prefills") == 1
