"""The server executor against answers as LMCache 0.5.6 gave them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_actions import host, order, prefix_of

from cache_index import CacheIndex, Holder, Tier
from cache_index.lmcache_directory import LMCacheDirectory, server_holder, shared_holder
from cache_index.lmcache_keys import KvRank
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch
from conductor.actions import ActionKind, ExecutionError, Place
from conductor.executors import LMCacheServerExecutor

TOKENS = list(range(1101))
Answer = Callable[[httpx.Request], httpx.Response]


def place(name: str, tier: Tier = Tier.HOST) -> Place:
    return Place(server_holder(name), tier)


def a_directory(world: int = 1) -> LMCacheDirectory:
    """Servers a and b on one shared store, c without; the model's chunks have ``world`` shards."""
    directory = LMCacheDirectory(CacheIndex())
    for name in "abc":
        directory.register(LMCacheServer(name, f"10.0.0.{ord(name)}", 8080, 0.0), 0.0)
    for name in "ab":
        shards = tuple(
            ChunkObject(key=7, model="stored-name", kv_rank=KvRank(world, rank, world, rank).pack())
            for rank in range(world)
        )
        directory.apply(ObjectBatch(name, 1, 1, "store", "l2", "s3", True, shards), 0.0)
    return directory


class Store:
    """An LMCache server that answers as it is told, and remembers what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self._answers = answers

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = orjson.loads(request.content) if request.content else None
        self.asked.append((request.method, str(request.url), body))
        name = [*request.url.path.split("/"), "config"][2]  # the config's path has one part
        answer = self._answers[name]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, json=content)

    def executor(self, directory: LMCacheDirectory | None = None, **options: Any) -> LMCacheServerExecutor:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return LMCacheServerExecutor(
            client, directory or a_directory(), stored_name=lambda model: f"stored-{model}", **options
        )


CONFIG = {"mp": {"chunk_size": 256, "hash_algorithm": "blake3"}}


def prefetched(found: int, total: int) -> list[Any]:
    return [
        (202, {"request_id": "r1", "chunks": 4, "status": "submitted"}),
        {"request_id": "r1", "status": "pending"},
        {"request_id": "r1", "status": "completed", "found_keys": found, "total_keys": total},
    ]


@pytest.mark.parametrize(
    ("kind", "source", "target", "able"),
    [
        (ActionKind.PREFETCH, Place(shared_holder("s3"), Tier.REMOTE), place("a"), True),
        (ActionKind.PREFETCH, place("a", Tier.DISK), place("a"), True),
        (ActionKind.PREFETCH, None, place("a"), True),
        (ActionKind.REPLICATE, place("b"), place("a"), True),  # through the store that they share
        (ActionKind.REPLICATE, place("c"), place("a"), False),
        (ActionKind.PREFETCH, Place(shared_holder("s3"), Tier.REMOTE), place("c"), False),
        (ActionKind.PREFETCH, None, place("a", Tier.DISK), False),
        (ActionKind.PREFETCH, None, place("nobody"), False),
        (ActionKind.DEMOTE, place("a"), place("a", Tier.DISK), False),
        (ActionKind.EVICT, None, place("a"), True),
        (ActionKind.EVICT, None, Place(shared_holder("s3"), Tier.REMOTE), True),
        (ActionKind.EVICT, None, Place(shared_holder("elsewhere"), Tier.REMOTE), False),
        (ActionKind.PIN, None, place("a", Tier.DISK), False),
        (ActionKind.EVICT, None, host("a"), False),  # an engine of that name
    ],
)
def test_what_it_can(kind: ActionKind, source: Place | None, target: Place, able: bool) -> None:
    assert Store().executor().can(kind, source, target) is able


async def test_it_asks_for_the_whole_prompt_and_counts_blocks_of_the_range() -> None:
    store = Store(prefetches=prefetched(4, 4), config=CONFIG)
    action = order(ActionKind.PREFETCH, prefix_of(TOKENS, "name"), place("a"), start=10, stop=66)
    assert (
        await store.executor().execute(action) == 54
    )  # four chunks are 64 blocks, of which 10 are not meant
    method, url, body = store.asked[1]
    assert (method, url) == ("POST", "http://10.0.0.97:8080/cache/prefetches")
    assert body == {
        "model_name": "stored-name",
        "world_size": 1,
        "token_ids": TOKENS[: 66 * 16],
        "cache_salt": "",
        "source_tier": "l2",
        "target_tier": "l1",
    }
    assert len(store.asked) == 4


class Holding:
    """A server that finds these chunks, of ``world`` shards each."""

    def __init__(self, held: Collection[int], world: int) -> None:
        self.held, self.world = held, world
        self.prefetches = 0
        self._asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/config":
            return httpx.Response(200, json=CONFIG)
        if request.method == "POST":
            self.prefetches += 1
            self._asked = len(orjson.loads(request.content)["token_ids"]) // 256
            return httpx.Response(202, json={"request_id": "r", "status": "submitted"})
        found = self.world * sum(chunk in self.held for chunk in range(self._asked))
        total = self.world * self._asked
        return httpx.Response(200, json={"status": "completed", "found_keys": found, "total_keys": total})


@settings(deadline=None)
@given(held=st.sets(st.integers(0, 15)), world=st.integers(1, 2))
async def test_chunks_behind_a_gap_do_not_count(held: set[int], world: int) -> None:
    server = Holding(held, world)
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as client:
        executor = LMCacheServerExecutor(
            client, LMCacheDirectory(CacheIndex()), urls={"a": "http://a"}, world_size=world
        )
        action = order(ActionKind.PREFETCH, prefix_of(range(16 * 256), "name"), place("a"))
        usable = next((chunk for chunk in range(16) if chunk not in held), 16)
        assert await executor.execute(action) == usable * 16
        if usable == len(held):
            assert server.prefetches <= 2


async def test_eviction_names_every_shard_of_whole_chunks() -> None:
    store = Store(objects={"deleted": 4, "skipped": 0, "ok": True}, config=CONFIG)
    action = order(ActionKind.EVICT, prefix_of(TOKENS, "name"), place("a", Tier.DISK), start=1, stop=48)
    assert await store.executor(a_directory(world=2)).execute(action) == 32
    keys = store.asked[1][2]["keys"]
    assert len(keys) == 4
    assert {key["kv_rank"] for key in keys} == {0x02000200, 0x02010201}
    assert store.asked[1][2]["tier"] == "l2"


@pytest.mark.parametrize(("held", "blocks"), [(4, 64), (2, 32), (0, 0)])
async def test_pins_are_the_coordinators_of_what_is_in_l2(held: int, blocks: int) -> None:
    def result(chunk: int, shard: int) -> dict[str, Any]:
        tier = "l2" if chunk < held or (chunk == held and shard == 0) else "l1"
        key = {"chunk_hash_hex": f"{chunk:064x}", "model_name": "stored-name", "kv_rank": shard}
        return {"key": key, "placements": [{"instance_id": "a", "tier": tier}]}

    results = [result(chunk, shard) for chunk in range(4) for shard in range(2)]
    store = Store(lookup={"chunks": 4, "results": results}, pins={"affected": 8, "status": "pinned"})
    executor = store.executor(a_directory(world=2), coordinator_url="http://coordinator:9300")
    target = Place(shared_holder("s3"), Tier.REMOTE)
    assert executor.can(ActionKind.PIN, None, target)
    assert await executor.execute(order(ActionKind.PIN, prefix_of(TOKENS, "name"), target)) == blocks
    pinned = [len(body["token_ids"]) for _, url, body in store.asked if url.endswith("/cache/pins")]
    assert pinned == [held * 256] * bool(held)
    assert await executor.execute(order(ActionKind.UNPIN, prefix_of(TOKENS, "name"), target)) == 64
    assert store.asked[-1][:2] == ("DELETE", "http://coordinator:9300/cache/pins")


@pytest.mark.parametrize(
    ("answer", "retryable", "says"),
    [
        ((503, {"detail": "no layout registered for model_name='m'"}), False, "no layout"),
        ((502, {"detail": "server unreachable"}), False, "502"),
        ((400, {"detail": "token cap exceeded"}), False, "token cap"),
        ((500, {"detail": "oh"}), True, "500"),
        (httpx.ConnectError("refused"), True, "refused"),
        ((202, {"request_id": "r1", "status": "completed"}), False, "found_keys"),
    ],
)
async def test_troubles(answer: Any, retryable: bool, says: str) -> None:
    store = Store(prefetches=[answer], config=CONFIG)
    with pytest.raises(ExecutionError, match=says) as error:
        await store.executor().execute(order(ActionKind.PREFETCH, prefix_of(TOKENS, "name"), place("a")))
    assert error.value.retryable is retryable


async def test_what_cannot_be_named() -> None:
    executor = Store(config=CONFIG).executor()
    short = order(ActionKind.PREFETCH, prefix_of(TOKENS[:160], "name"), place("a"))
    with pytest.raises(ExecutionError, match="no whole chunk of 256"):
        await executor.execute(short)
    adapter = order(ActionKind.PREFETCH, prefix_of(TOKENS, "name", lora="sql"), place("a"))
    with pytest.raises(ExecutionError, match="LoRA"):
        await executor.execute(adapter)
    prefix = prefix_of(TOKENS, "name")
    unknown = order(ActionKind.PREFETCH, type(prefix)(prefix.namespace, prefix.hashes), place("a"))
    with pytest.raises(ExecutionError, match="by tokens"):
        await executor.execute(unknown)
    gone = order(ActionKind.PREFETCH, prefix, Place(Holder("lmcache:gone"), Tier.HOST))
    with pytest.raises(ExecutionError, match="no LMCache server"):
        await executor.execute(gone)
