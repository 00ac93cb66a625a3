"""Mooncake's indexer API over real event streams."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from kv_publisher import KvPublisher

from cache_index import CacheIndex, VllmEventSource, sequence_hashes
from conductor.indexer import IndexerService, make_indexer_router

BLOCK = 16
TOKENS = list(range(1000, 1000 + 6 * BLOCK))


@pytest.fixture
def api() -> Iterator[TestClient]:
    index = CacheIndex()
    events = VllmEventSource(index)
    events.start()
    app = FastAPI()
    app.include_router(make_indexer_router(IndexerService(index, {"vLLM": events})))
    with TestClient(app) as client:
        yield client
    events.close()


@pytest.fixture
def engine() -> Iterator[KvPublisher]:
    publisher = KvPublisher()
    yield publisher
    publisher.close()


def _register(api: TestClient, engine: KvPublisher, instance: str = "engine-0", **fields: object) -> None:
    body = {
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
        "type": "vLLM",
        "modelname": "llama",
        "instance_id": instance,
        "block_size": BLOCK,
        "dp_rank": 0,
    }
    answer = api.post("/register", json=body | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"status": "registered successfully", "instance_id": instance}


def _query(api: TestClient, tokens: list[int] = TOKENS, **fields: object) -> dict:
    answer = api.post("/query", json={"model": "llama", "token_ids": tokens, "block_size": BLOCK} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _until(api: TestClient, expected: dict, **fields: object) -> None:
    deadline_s = time.monotonic() + 10
    while (answer := _query(api, **fields)) != expected:
        assert time.monotonic() < deadline_s, answer
        time.sleep(0.01)


def _entry(gpu: int, cpu: int, disk: int, **ranks: int) -> dict:
    return {
        "longest_matched": disk,
        "GPU": gpu,
        "CPU": cpu,
        "DISK": disk,
        "DP": {name.removeprefix("r"): value for name, value in ranks.items()},
    }


def test_a_late_registration_learns_what_is_cached(api: TestClient, engine: KvPublisher) -> None:
    engine.stored([1, 2, 3, 4], TOKENS[: 4 * BLOCK], BLOCK)
    engine.removed([4])
    _register(api, engine)
    _until(api, {"default": {"engine-0": _entry(48, 48, 48, r0=48)}})


def test_tiers_are_cumulative(api: TestClient, engine: KvPublisher) -> None:
    _register(api, engine)
    engine.stored([1, 2], TOKENS[: 2 * BLOCK], BLOCK)
    engine.stored([1, 2, 3], TOKENS[: 3 * BLOCK], BLOCK, medium="cpu")
    engine.stored([4], TOKENS[3 * BLOCK : 4 * BLOCK], BLOCK, parent=3, medium="DISK")
    _until(api, {"default": {"engine-0": _entry(32, 48, 64, r0=64)}})


def test_hashes_ask_the_same_question(api: TestClient, engine: KvPublisher) -> None:
    _register(api, engine)
    engine.stored([1, 2], TOKENS[: 2 * BLOCK], BLOCK)
    _until(api, {"default": {"engine-0": _entry(32, 32, 32, r0=32)}})
    hashes = sequence_hashes(np.array(TOKENS, dtype=np.uint32), BLOCK)
    for given in (hashes.tolist(), hashes.astype(np.int64).tolist()):
        answer = api.post("/query_by_hash", json={"model": "llama", "seq_hashes": given, "block_size": BLOCK})
        assert answer.json() == {"default": {"engine-0": _entry(32, 32, 32, r0=32)}}


def test_ranks_are_told_apart_and_the_best_counts(api: TestClient, engine: KvPublisher) -> None:
    second = KvPublisher()
    try:
        _register(api, engine)
        _register(api, second, dp_rank=1)
        engine.stored([1], TOKENS[:BLOCK], BLOCK)
        second.stored([1, 2, 3], TOKENS[: 3 * BLOCK], BLOCK)
        _until(api, {"default": {"engine-0": _entry(48, 48, 48, r0=16, r1=48)}})
        answer = api.post("/unregister", json={"instance_id": "engine-0", "dp_rank": 1, "modelname": "llama"})
        assert answer.json()["removed_instances"] == ["engine-0|default|1"]
        _until(api, {"default": {"engine-0": _entry(16, 16, 16, r0=16)}})
    finally:
        second.close()


def test_contexts_do_not_mix(api: TestClient, engine: KvPublisher) -> None:
    _register(api, engine)
    _register(api, engine, tenant_id="acme")
    engine.stored([1], TOKENS[:BLOCK], BLOCK)
    _until(api, {"default": {"engine-0": _entry(16, 16, 16, r0=16)}})
    _until(api, {"acme": {"engine-0": _entry(16, 16, 16, r0=16)}}, tenant_id="acme")
    assert _query(api, model="mistral") == {"default": {}}
    assert _query(api, block_size=32) == {"default": {}}
    assert _query(api, instance_id="engine-1") == {"default": {}}
    assert _query(api, lora_name="adapter") == {"default": {"engine-0": _entry(0, 0, 0, r0=0)}}
    assert _query(api, cache_salt="s") == {"default": {"engine-0": _entry(0, 0, 0, r0=0)}}


def test_unregistering_forgets(api: TestClient, engine: KvPublisher) -> None:
    _register(api, engine)
    assert api.get("/instances").json()["instances"][0]["instance_id"] == "engine-0"
    assert api.post("/unregister", json={"instance_id": "engine-0"}).status_code == 200
    assert _query(api) == {"default": {}}
    assert api.get("/instances").json() == {"instances": []}
    again = api.post("/unregister", json={"instance_id": "engine-0"})
    assert again.status_code == 404
    assert "'engine-0' is not registered" in again.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/register", {"endpoint": "tcp://x:1", "modelname": "m", "instance_id": "a"}, "block_size"),
        (
            "/register",
            {"endpoint": "tcp://*:1", "modelname": "m", "instance_id": "a", "block_size": 16},
            "endpoint",
        ),
        (
            "/register",
            {
                "endpoint": "tcp://x:1",
                "modelname": "m",
                "instance_id": "a",
                "block_size": 16,
                "type": "TensorRT-LLM",
            },
            "must be http://host:port",
        ),
        ("/query", {"model": "m", "token_ids": [1, -1]}, "token_ids"),
        ("/query", {"token_ids": [1]}, "model"),
        ("/query_by_hash", {"model": "m", "seq_hashes": [2**64]}, "seq_hashes"),
        ("/unregister", {}, "instance_id"),
    ],
)
def test_bad_bodies_name_the_field(api: TestClient, path: str, body: dict, field: str) -> None:
    answer = api.post(path, json=body)
    assert answer.status_code == 422
    assert field in answer.text
