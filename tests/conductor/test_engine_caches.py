"""Engines that come up are attached to LMCache servers, given room in the index, and found by look-ups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster_factory import BLOCK, facts, hold, make_scheduler, request
from fastapi import FastAPI
from fastapi.testclient import TestClient
from lmcache_server import chunk_hashes

from cache_index import CacheIndex, Holder, PromptMatcher
from cache_index.lmcache_directory import LMCacheDirectory
from cache_index.lmcache_keys import KvRank, index_key
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch
from conductor.cache_lookup import make_lookup_router
from conductor.engine_caches import EngineCaches
from conductor.instance_config import InstanceConfig
from conductor.prefix_lookup import IndexLookup

PROMPT = request(600)
CHUNKED = 512


class Serving:
    """Two mixed instances, m0 and m1, on hosts of their own; LMCache servers beside them."""

    def __init__(self, *configs: InstanceConfig) -> None:
        self.index = CacheIndex()
        self.lmcache = LMCacheDirectory(self.index)
        prompts = PromptMatcher(self.index, self.lmcache)
        self.scheduler = make_scheduler(
            "mm", aliases={"big": "llama"}, lookup=IndexLookup(self.index, prompts), index=self.index
        )
        self.caches = EngineCaches(
            self.scheduler.cluster, self.index, prompts, lambda: configs, self.scheduler.aliases
        )
        app = FastAPI()
        app.include_router(make_lookup_router(self.index, prompts, self.caches))
        self.api = TestClient(app)
        for instance in self.scheduler.cluster:
            self.caches.up(instance)

    def server(self, name: str, ip: str, *, model: str = "llama") -> None:
        self.lmcache.register(LMCacheServer(name, ip, 8080, 0.0), 0.0)
        rank = KvRank(1, 0, 1, 0).pack()
        keys = [index_key(each) for each in chunk_hashes(PROMPT.tokens.tolist())]
        objects = tuple(ChunkObject(key, model, rank) for key in keys)
        self.lmcache.apply(ObjectBatch(name, 1, 1, "store", "l1", "cpu", False, objects), 0.0)

    def overlaps(self) -> dict[str, int]:
        """Tokens of the prompt that each instance has or can load, as a placement sees them."""
        candidates = self.scheduler.consider(PROMPT, 0.0).candidates
        assert candidates is not None
        held = candidates.local_tokens[-1]
        return {r.holder.instance_id: int(n) for r, n in zip(candidates.ranks, held, strict=True)}

    def lookup(self, **fields: Any) -> dict[str, int]:
        body = {"model": "llama", "token_ids": PROMPT.tokens.tolist(), **fields}
        answer = self.api.post("/v1/cache/lookup", json=body)
        assert answer.status_code == 200, answer.text
        return {name: entry["longest_matched"] for name, entry in answer.json()["default"].items()}


def test_placements_see_what_the_server_of_a_host_has() -> None:
    serving = Serving()
    serving.server("mp-0", "10.0.0.1")
    assert serving.overlaps() == {"m0": 0, "m1": CHUNKED}
    assert serving.lookup() == {"m0": 0, "m1": CHUNKED, "lmcache:mp-0": CHUNKED}


def test_servers_may_be_configured() -> None:
    serving = Serving(InstanceConfig(id="m0", url="http://10.0.0.0:8000", lmcache_servers=["far"]))
    serving.server("far", "10.7.7.7")
    serving.server("near", "10.0.0.0")
    assert serving.overlaps() == {"m0": CHUNKED, "m1": 0}


def test_chunks_are_stored_under_the_root_of_a_model() -> None:
    serving = Serving()
    model = replace(facts().models[0], root="/models/llama")
    for instance in serving.scheduler.cluster:
        serving.scheduler.instance_up(instance.instance_id, replace(facts(), models=(model,)))
        serving.caches.up(instance)
    serving.server("mp-0", "10.0.0.0", model="/models/llama")
    assert serving.overlaps() == {"m0": CHUNKED, "m1": 0}


def test_an_instance_that_leaves_is_forgotten_and_its_row_given_away() -> None:
    serving = Serving()
    serving.server("mp-0", "10.0.0.0")
    assert serving.lookup()["m0"] == CHUNKED
    serving.caches.left(Holder("m0"))
    serving.scheduler.remove_instance("m0")
    assert serving.index.register(Holder("another")) == 0
    assert serving.overlaps() == {"m1": 0}
    assert serving.lookup() == {"m1": 0, "lmcache:mp-0": CHUNKED}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"model": "big"}, {"m0": 64, "m1": 0}),
        ({"block_size": BLOCK}, {"m0": 64, "m1": 0}),
        ({"block_size": 64}, {}),
        ({"model": "unheard of"}, {}),
        ({"model": "adapter"}, {"m0": 0, "m1": 32}),
        ({"lora_name": "adapter"}, {"m0": 0, "m1": 32}),
        ({"tenant_id": "default", "instance_id": "m0"}, {"m0": 64}),
        ({"cache_salt": "s"}, {"m0": 0, "m1": 0}),
    ],
)
def test_look_ups_find_the_caches_of_the_cluster(fields: dict[str, Any], found: dict[str, int]) -> None:
    serving = Serving()
    hold(serving.scheduler, "m0", PROMPT.tokens[:64])
    hold(serving.scheduler, "m1", PROMPT.tokens[:32], lora="adapter")
    assert serving.lookup(**fields) == found


def test_a_look_up_without_tokens_says_so() -> None:
    answer = Serving().api.post("/v1/cache/lookup", json={"model": "llama"})
    assert answer.status_code == 422
    assert "token_ids" in answer.text


def test_the_index_makes_room_for_what_the_engines_can_hold() -> None:
    serving = Serving()
    index = serving.index
    before = index.stats().bytes
    for number, blocks in enumerate((40_000, 50_000, 0)):
        instance = serving.scheduler.cluster[f"m{number % 2}"]
        serving.scheduler.instance_up(
            instance.instance_id, replace(facts(), kv_capacity_blocks=blocks or None)
        )
        serving.caches.up(instance)
    while index.reclaim():
        pass
    grown = index.stats().bytes
    assert grown > before + 90_000 * 36
