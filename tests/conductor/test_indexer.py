"""Mooncake's indexer API over real event streams."""

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from kv_publisher import KvPublisher

from cache_index import (
    CacheIndex,
    MooncakeEventSource,
    TrtllmEventSource,
    VllmEventSource,
    sequence_hashes,
)
from cache_index.lmcache import make_lmcache_router
from cache_index.lmcache_directory import LMCacheDirectory
from cache_index.lmcache_keys import chunk_hashes
from cache_index.prompt_match import PromptMatcher
from cache_index.push import make_push_router
from cache_index.push_ingest import PushIngest
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
        (
            "/register",
            {"endpoint": "tcp://x:65536", "modelname": "m", "instance_id": "a", "block_size": 16},
            "the port of tcp://x:65536 is not from 1 to 65535",
        ),
        (
            "/register",
            {
                "endpoint": "tcp://x:1",
                "modelname": "m",
                "instance_id": "a",
                "block_size": 16,
                "dp_rank": 10**30,
            },
            "dp_rank",
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


def test_a_body_is_json_whatever_its_content_type_says(api: TestClient) -> None:
    """`curl -d` names a form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = {"endpoint": "tcp://127.0.0.1:1", "modelname": "m", "instance_id": "a", "block_size": 16}
    assert api.post("/register", content=json.dumps(body), headers=form).status_code == 200
    removed = api.post("/unregister", content=b'{"instance_id": "a"}', headers=form).json()
    assert removed["removed_instances"] == ["a|default|0"]
    schema = api.get("/openapi.json").json()["paths"]["/register"]["post"]["requestBody"]
    assert "modelname" in schema["content"]["application/json"]["schema"]["properties"]


# --- stores beside the engines -------------------------------------------------------------------------


class Beside:
    """The whole service: engines that register, LMCache servers that report, stores that push."""

    def __init__(self) -> None:
        index = CacheIndex()
        self.events = VllmEventSource(index)
        self.polled = TrtllmEventSource(index, interval_s=0.01)
        self.mooncake = MooncakeEventSource(index)
        self.sources = (self.events, self.polled, self.mooncake)
        for source in self.sources:
            source.start()
        lmcache = LMCacheDirectory(index)
        kinds = {"vLLM": self.events, "TensorRT-LLM": self.polled, "Mooncake": self.mooncake}
        app = FastAPI()
        service = IndexerService(index, kinds, PromptMatcher(index, lmcache))
        app.include_router(make_indexer_router(service))
        app.include_router(make_lmcache_router(lmcache, lambda: 1.0), prefix="/lmcache")
        app.include_router(make_push_router(PushIngest(index, lambda: 1.0)))
        self.api = TestClient(app)

    def lmcache_holds(self, server: str, chunks: int, ip: str = "127.0.0.1") -> None:
        self.api.post("/lmcache/instances", json={"instance_id": server, "ip": ip, "http_port": 8080})
        key = {"model_name": "llama", "kv_rank": 0x01000100}
        hashes = chunk_hashes(np.array(LONG, np.uint32))[:chunks]
        entries = [{"key": {"chunk_hash_hex": each.hex(), **key}} for each in hashes]
        batch = {"instance_id": server, "incarnation": 1, "seq": 1, "event_type": "store", "tier": "l1"}
        answer = self.api.post(
            "/lmcache/events", json={"batches": [{**batch, "backend": "dram", "entries": entries}]}
        )
        assert answer.json()["applied"] == 1

    def ask(self, path: str = "/query", **fields: object) -> dict:
        body = {"model": "llama", "token_ids": LONG, "block_size": BLOCK} | fields
        answer = self.api.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["default"]


LONG = list(range(1000, 1000 + 600))  # two chunks of 256 tokens and a piece


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    with made.api:
        yield made
    for source in made.sources:
        source.close()


def test_what_an_lmcache_server_holds_counts_for_the_engines_of_its_host(
    beside: Beside, engine: KvPublisher
) -> None:
    _register(beside.api, engine)
    beside.lmcache_holds("mp-1", 2)
    beside.lmcache_holds("mp-far", 1, ip="10.9.9.9")
    merged = {"engine-0": _entry(0, 512, 512, r0=512)}
    assert beside.ask() == merged
    stores = {"lmcache:mp-1": _entry(0, 512, 512, r0=512), "lmcache:mp-far": _entry(0, 256, 256, r0=256)}
    assert beside.ask("/v1/cache/lookup") == merged | stores
    assert beside.ask("/v1/cache/lookup", instance_id="lmcache:mp-far") == {
        "lmcache:mp-far": stores["lmcache:mp-far"]
    }
    assert beside.ask(cache_salt="s") == {"engine-0": _entry(0, 0, 0, r0=0)}
    engine.stored([1], LONG[:BLOCK], BLOCK)
    _until(beside.api, {"default": {"engine-0": _entry(16, 512, 512, r0=512)}}, tokens=LONG)
    beside.api.post("/unregister", json={"instance_id": "engine-0"})
    assert beside.ask() == {}
    assert beside.ask("/v1/cache/lookup") == stores


def test_an_engine_may_name_its_lmcache_servers(beside: Beside, engine: KvPublisher) -> None:
    _register(beside.api, engine, lmcache_servers=["mp-far"])
    beside.lmcache_holds("mp-1", 2)
    beside.lmcache_holds("mp-far", 1, ip="10.9.9.9")
    assert beside.ask() == {"engine-0": _entry(0, 256, 256, r0=256)}


def test_who_pushes_events_is_in_the_answer(beside: Beside) -> None:
    pushed = {"event_id": 1, "event_type": "stored", "model_name": "llama", "block_size": BLOCK}
    pushed |= {"backend_id": "store-0", "medium": "cpu", "seq_hashes": [1], "token_ids": LONG[:BLOCK]}
    assert beside.api.post("/v1/events", json=pushed).status_code == 200
    assert beside.ask() == {"store-0": _entry(0, 16, 16, r0=16)}
    assert beside.ask(instance_id="other") == {}
    hashes = sequence_hashes(np.array(LONG, np.uint32), BLOCK).tolist()
    body = {"model": "llama", "seq_hashes": hashes, "block_size": BLOCK}
    assert beside.api.post("/query_by_hash", json=body).json()["default"] == {
        "store-0": _entry(0, 16, 16, r0=16)
    }


def test_registering_as_another_kind_ends_the_former_stream(beside: Beside, engine: KvPublisher) -> None:
    _register(beside.api, engine)
    body = {"endpoint": "http://127.0.0.1:1", "type": "TensorRT-LLM", "modelname": "llama"}
    body |= {"instance_id": "engine-0", "block_size": BLOCK}
    assert beside.api.post("/register", json=body).status_code == 200
    assert beside.events.stream_stats() == []
    assert len(beside.polled.stream_stats()) == 1


def test_a_mooncake_master_may_have_its_keys_listed(beside: Beside, engine: KvPublisher) -> None:
    _register(
        beside.api, engine, "pool", type="Mooncake", admin_endpoint="http://127.0.0.1:9003", reconcile_s=5
    )
    for field, value in (("admin_endpoint", "127.0.0.1:9003"), ("reconcile_s", 0), ("type", "vLLM")):
        body = {"endpoint": engine.endpoint, "type": "Mooncake", "modelname": "m", "instance_id": "pool"}
        body |= {"block_size": 16, "admin_endpoint": "http://127.0.0.1:9003", field: value}
        answer = beside.api.post("/register", json=body)
        assert answer.status_code == 422
        assert (field if field != "type" else "admin_endpoint") in answer.text
