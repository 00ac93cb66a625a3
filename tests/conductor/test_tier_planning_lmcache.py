"""The planner of a running conductor over LMCache servers, up to the orders that it hands to their executor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import numpy as np
import pytest
from cluster_factory import BLOCK, make_scheduler, request
from lmcache_server import chunk_hashes
from structlog.testing import capture_logs

from cache_index import CacheIndex, Holder, Tier, sequence_hashes
from cache_index.lmcache_directory import LMCacheDirectory, server_holder, shared_holder
from cache_index.lmcache_keys import KvRank, index_key
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch
from conductor.action_ledger import ActionRecord
from conductor.actions import ActionKind, Place
from conductor.catalogue import LLAMA_8B_H100
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.tier_services import make_planning, make_runner
from conductor.config import Config
from conductor.placement import PlacementRequest
from conductor.prefix_lookup import IndexLookup
from conductor.tier_room import TierRoom

TOKENS = 1100  # 68 blocks, 4 chunks
CHUNKED = 1024
GB = 1e9


class Serving:
    """Instances m0 and m1 with an LMCache server each, s0 and s1, and a store behind both."""

    def __init__(
        self, actions: list[str], stack: AsyncExitStack, sized: tuple[str, ...] = ("s0", "s1")
    ) -> None:
        self.now_s = 0.0
        index = CacheIndex()
        self.feeds = EventFeeds(index, self._clock)
        self.scheduler = make_scheduler("mm", lookup=IndexLookup(index, self.feeds.prompts), index=index)
        config = Config.model_validate(
            {
                "executors": {"lmcache_servers": {}},
                "tier_planner": {"actions": actions, "learns_from": 0},
                "tiers": {
                    "capacities": [
                        {"instance": f"lmcache:{name}", "tier": "host", "bytes": 10 * GB} for name in sized
                    ]
                },
            }
        )
        self.sent: dict[str, int] = {}
        client = httpx.AsyncClient(trust_env=False)
        stack.push_async_callback(client.aclose)
        stack.callback(self.feeds.close)
        runner = make_runner(config, self.scheduler.cluster, self.feeds, client, self._clock, stack)
        self.ledger = runner.ledger
        planning = make_planning(config, self.scheduler, runner, self.feeds, self._clock, "")
        assert planning is not None
        self.planning = planning
        for number in range(2):
            rank = self.scheduler.cluster[f"m{number}"].ranks[0]
            self.feeds.prompts.attach(rank.holder, f"10.0.0.{number}")
            self.feeds.lmcache.register(LMCacheServer(f"s{number}", f"10.0.0.{number}", 8080, 0.0), 0.0)
            self.tell(f"s{number}", np.arange(256, dtype=np.uint32) + number, "l2")

    def _clock(self) -> float:
        return self.now_s

    def tell(self, server: str, tokens: np.ndarray, *tiers: str, kind: str = "store") -> None:
        """A server has a prompt's chunks in its memory (l1), or in the store that both share (l2)."""
        rank = KvRank(1, 0, 1, 0).pack()
        keys = [index_key(each) for each in chunk_hashes(tokens.tolist())]
        objects = tuple(ChunkObject(key, "llama", rank) for key in keys)
        for tier in tiers:
            self.sent[server] = number = self.sent.get(server, 0) + 1
            backend = "cpu" if tier == "l1" else "fs"
            batch = ObjectBatch(server, 1, number, kind, tier, backend, tier == "l2", objects)  # type: ignore[arg-type]
            assert self.feeds.lmcache.apply(batch, self.now_s) == "applied"

    def place(self, asked: PlacementRequest) -> str:
        """The instance; the request has ended by then."""
        placement = self.scheduler.place(asked, self.now_s)
        self.scheduler.cancelled(placement.placement_id, self.now_s)
        return placement.prefill.instance_id

    def learn_returns(self) -> None:
        """Six conversations of four turns."""
        for turn in range(1, 5):
            for seed in range(6):
                whole = request(5 * TOKENS, seed=100 + seed).tokens
                self.place(PlacementRequest("r", "llama", whole[: turn * TOKENS], turn * TOKENS))
                self.now_s += 0.05

    async def plan_for(self, seconds: float) -> list[ActionRecord]:
        """All that was ordered."""
        for _ in range(int(seconds / 0.25)):
            self.now_s += 0.25
            await self.planning.plan()
        return self.ledger.records()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_a_next_turn_is_prefetched_into_the_memory_of_its_engines_server(stack: AsyncExitStack) -> None:
    serving = Serving(["prefetch"], stack)
    serving.learn_returns()
    asked = request(TOKENS, seed=1)
    serving.tell("s0", asked.tokens, "l2")
    name = serving.place(asked)
    [record] = await serving.plan_for(3.0)
    action = record.action
    assert action.kind is ActionKind.PREFETCH
    assert action.source == Place(shared_holder("fs"), Tier.REMOTE)
    assert action.target == Place(server_holder(name.replace("m", "s")), Tier.HOST)
    assert (action.start, action.stop) == (0, CHUNKED // BLOCK)
    assert action.prefix is not None and action.prefix.token_ids is not None
    assert np.array_equal(action.prefix.token_ids, asked.tokens)
    assert action.benefit_s > action.cost_s > 0.0


async def test_a_salted_prompt_is_found_under_its_salt(stack: AsyncExitStack) -> None:
    serving = Serving(["prefetch"], stack)
    serving.learn_returns()
    asked = request(TOKENS, seed=1, cache_salt="s")
    serving.tell("s0", asked.tokens, "l2")  # stored without one
    serving.place(asked)
    assert await serving.plan_for(3.0) == []


async def test_what_the_server_has_is_not_brought(stack: AsyncExitStack) -> None:
    serving = Serving(["prefetch"], stack)
    serving.learn_returns()
    asked = request(TOKENS, seed=1)
    serving.tell("s0", asked.tokens, "l1", "l2")
    assert serving.place(asked) == "m0"
    assert await serving.plan_for(3.0) == []
    serving.tell("s0", asked.tokens, "l1", kind="delete")
    name = serving.place(asked)
    [record] = await serving.plan_for(3.0)
    assert record.action.target == Place(server_holder(name.replace("m", "s")), Tier.HOST)


async def test_prompts_without_tokens_and_engines_without_servers_are_left_alone(
    stack: AsyncExitStack,
) -> None:
    serving = Serving(["prefetch", "replicate", "promote", "evict"], stack)
    serving.learn_returns()
    asked = request(TOKENS, seed=1)
    serving.tell("s0", asked.tokens, "l2")
    hashes = sequence_hashes(asked.tokens, BLOCK)
    none = np.empty(0, np.uint32)
    serving.place(PlacementRequest("r", "llama", none, TOKENS, hashes=hashes, hashes_block_size=BLOCK))
    assert await serving.plan_for(3.0) == []
    for name in ("s0", "s1"):
        serving.feeds.lmcache.deregister(name, serving.now_s)
    serving.place(asked)
    assert await serving.plan_for(3.0) == []


async def test_what_a_waiting_request_will_load_is_promoted_into_the_servers_memory(
    stack: AsyncExitStack,
) -> None:
    serving = Serving(["promote"], stack)
    asked = request(16_384 + 8 * BLOCK, seed=1)
    serving.tell("s0", asked.tokens, "l2")
    for seed in range(50, 60):  # both instances have work to do before it
        serving.scheduler.place(request(30_000, seed=seed), 0.0)
    placement = serving.scheduler.place(asked, 0.0)
    [record] = await serving.plan_for(0.5)
    action = record.action
    assert action.kind is ActionKind.PROMOTE
    assert action.target.holder == server_holder(placement.prefill.instance_id.replace("m", "s"))
    assert (action.start, action.stop) == (0, 16_384 // BLOCK)
    assert action.deadline_s <= placement.predicted_ttft_s


async def test_a_server_of_unknown_size_is_named_once_and_left_alone(stack: AsyncExitStack) -> None:
    serving = Serving(["prefetch"], stack, sized=("s0",))
    serving.learn_returns()
    asked = request(TOKENS, seed=1)
    serving.tell("s1", asked.tokens, "l2")
    with capture_logs() as logs:
        serving.scheduler.remove_instance("m0")
        assert serving.place(asked) == "m1"
        assert await serving.plan_for(3.0) == []
    [warning] = [each for each in logs if each["log_level"] == "warning"]
    assert warning["server"] == "lmcache:s1" and "tiers.capacities" in warning["remedy"]


def test_room_in_a_server_is_counted_in_its_chunks() -> None:
    index = CacheIndex()
    scheduler = make_scheduler("m", index=index)
    directory = LMCacheDirectory(index)
    rank = KvRank(1, 0, 1, 0).pack()
    keys = [index_key(each) for each in chunk_hashes(list(range(CHUNKED)))]
    objects = tuple(ChunkObject(key, "llama", rank) for key in keys)
    directory.apply(ObjectBatch("s0", 1, 1, "store", "l1", "cpu", False, objects), 0.0)
    room = TierRoom(scheduler.cluster, index, {("lmcache:s0", "host"): GB})
    held = CHUNKED * LLAMA_8B_H100.kv_bytes_per_token
    assert room.free_bytes(Place(Holder("lmcache:s0"), Tier.HOST)) == GB - held
