"""What the index tells over REST: prefixes, ranges, occupancy."""

from collections.abc import Iterator

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cache_index import CacheIndex, Holder, Namespace, Tier, VllmEventSource, sequence_hashes
from conductor.cache_rest import make_cache_router

BLOCK = 16
TOKENS = list(range(700, 700 + 10 * BLOCK))
HASHES = sequence_hashes(np.array(TOKENS, np.uint32), BLOCK)
NAMESPACE = Namespace("llama", BLOCK)
A, B = Holder("a"), Holder("b", 1)


@pytest.fixture
def index() -> CacheIndex:
    """``a`` has six blocks in its device, ``b`` all ten in host memory, and the last four in its device."""
    made = CacheIndex(max_blocks=1000)
    for holder in (A, B):
        made.register(holder)
    made.store(A, Tier.DEVICE, NAMESPACE, HASHES[:6])
    made.store(B, Tier.HOST, NAMESPACE, HASHES)
    made.store(B, Tier.DEVICE, NAMESPACE, HASHES[6:], parent=int(HASHES[5]))
    return made


@pytest.fixture
def api(index: CacheIndex) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(make_cache_router(index, VllmEventSource(index)))
    with TestClient(app) as client:
        yield client


def _key(block: int) -> str:
    return f"{int(HASHES[block]) ^ NAMESPACE.domain:016x}"


def test_the_tree_from_the_roots_and_below_a_block(api: TestClient) -> None:
    whole = api.get("/v1/cache/tree").json()
    assert (whole["blocks"], whole["residencies"], whole["sampled"]) == (10, 20, False)
    assert [node["hash"] for node in whole["nodes"]] == [_key(block) for block in range(10)]
    below = api.get("/v1/cache/tree", params={"root": _key(7), "limit": 2}).json()["nodes"]
    assert [(node["hash"], node["parent"], node["depth"]) for node in below] == [
        (_key(7), _key(6), 7),
        (_key(8), _key(7), 8),
    ]
    tiers = sorted(holder["tier"] for holder in below[0]["holders"])
    assert tiers == ["device", "host"]


def test_hot_prefixes_lead_to_their_subtrees(api: TestClient, index: CacheIndex) -> None:
    for _ in range(3):
        index.match(NAMESPACE, HASHES[:8])
    index.match(NAMESPACE, HASHES[:2])
    prefixes = api.get("/v1/cache/hot", params={"limit": 1}).json()["prefixes"]
    (hottest,) = prefixes
    held_by = hottest.pop("held_by")
    assert hottest == {
        "hash": _key(7),
        "parent": _key(6),
        "above": None,
        "depth": 7,
        "matches": 3,
        "holders": 2,
    }
    assert sorted((place["instance"], place["rank"], place["tier"]) for place in held_by) == [
        ("b", 1, "device"),
        ("b", 1, "host"),
    ]
    subtree = api.get("/v1/cache/tree", params={"root": prefixes[0]["hash"]}).json()
    assert len(subtree["nodes"]) == 3
    above = {each["hash"]: each["above"] for each in api.get("/v1/cache/hot").json()["prefixes"]}
    assert above == {prefixes[0]["hash"]: _key(1), _key(1): None}


@pytest.mark.parametrize("prompt", [{"token_ids": TOKENS}, {"seq_hashes": HASHES.astype(np.int64).tolist()}])
def test_the_best_holder_of_a_range(api: TestClient, prompt: dict) -> None:
    body = {"model": "llama", "block_size": BLOCK, **prompt}
    tiers = api.post("/v1/cache/best-holder", json=body).json()["tiers"]
    assert tiers["device"] == {"instance": "a", "rank": 0, "blocks": 6, "tokens": 96}
    assert tiers["host"] == tiers["remote"] == {"instance": "b", "rank": 1, "blocks": 10, "tokens": 160}
    tiers = api.post("/v1/cache/best-holder", json={**body, "start_block": 5, "stop_block": 8}).json()[
        "tiers"
    ]
    assert tiers["device"] == {"instance": "a", "rank": 0, "blocks": 1, "tokens": 16}
    tiers = api.post("/v1/cache/best-holder", json={**body, "start_block": 7}).json()["tiers"]
    assert tiers["device"] == {"instance": "b", "rank": 1, "blocks": 3, "tokens": 48}
    assert api.post("/v1/cache/best-holder", json={**body, "tenant_id": "acme"}).json() == {"tiers": {}}
    assert api.post("/v1/cache/best-holder", json={**body, "start_block": 99}).json() == {"tiers": {}}


def test_a_salt_and_an_adapter_ask_for_another_cache(api: TestClient) -> None:
    body = {"model": "llama", "block_size": BLOCK, "token_ids": TOKENS}
    for other in ({"cache_salt": "s"}, {"lora_name": "adapter"}):
        assert api.post("/v1/cache/best-holder", json=body | other).json() == {"tiers": {}}


def test_occupancy_in_total_and_by_holder(api: TestClient, index: CacheIndex) -> None:
    found = api.get("/v1/cache/occupancy").json()
    assert found["tiers"] == {"device": 10, "host": 10, "disk": 0, "pod": 0, "remote": 0}
    assert found["holders"] == [
        {"instance": "a", "rank": 0, "tiers": {"device": 6}},
        {"instance": "b", "rank": 1, "tiers": {"device": 4, "host": 10}},
    ]
    assert (found["blocks"], found["residencies"], found["max_blocks"]) == (10, 20, 1000)
    assert found["dropped_residencies"] == 0 and found["index_bytes"] > 0
    index.clear(B)
    assert api.get("/v1/cache/occupancy").json()["residencies"] == 6


@pytest.mark.parametrize(
    ("path", "params", "status", "named"),
    [
        ("tree", {"limit": 0}, 422, "limit"),
        ("tree", {"root": "xyz"}, 422, "root"),
        ("tree", {"root": "0" * 17}, 422, "root"),
        ("tree", {"root": "12ab"}, 404, "root"),
        ("hot", {"limit": 5000}, 422, "limit"),
    ],
)
def test_bad_questions_are_answered_with_the_parameter(
    api: TestClient, path: str, params: dict, status: int, named: str
) -> None:
    answer = api.get(f"/v1/cache/{path}", params=params)
    assert answer.status_code == status
    assert named in answer.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "model"),
        ({"block_size": 0}, "block_size"),
        ({"token_ids": None}, "token_ids or seq_hashes"),
        ({"seq_hashes": [1]}, "token_ids or seq_hashes"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"start_block": -1}, "start_block"),
        ({"start_block": 4, "stop_block": 4}, "stop_block"),
        ({"stat_block": 4}, "stat_block"),
    ],
)
def test_bad_ranges_name_their_field(api: TestClient, change: dict, named: str) -> None:
    body = {"model": "llama", "block_size": BLOCK, "token_ids": TOKENS} | change
    answer = api.post("/v1/cache/best-holder", json={k: v for k, v in body.items() if v is not None})
    assert answer.status_code == 422
    assert named in answer.text


def test_the_api_documents_itself(api: TestClient) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    for path in ("tree", "hot", "occupancy", "streams"):
        assert paths[f"/v1/cache/{path}"]["get"]["summary"]
    fields = api.get("/openapi.json").json()["components"]["schemas"]["RangeQuery"]["properties"]
    assert {"model", "block_size", "token_ids", "seq_hashes", "start_block", "stop_block"} <= fields.keys()
