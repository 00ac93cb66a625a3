"""TensorRT-LLM's polled events, over real HTTP and one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from waiting import wait_for

from cache_index import (
    CacheIndex,
    Holder,
    MalformedEventError,
    Namespace,
    StreamConfig,
    StreamStats,
    Tier,
    sequence_hashes,
)
from cache_index.trtllm import TrtllmEventSource
from cache_index.trtllm_events import decode_event
from cache_index.trtllm_ingest import TrtllmIngest

HOLDER = Holder("trt")
BLOCK = 4
NAMESPACE = Namespace("tiny", BLOCK)


def block(name: int | str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
        "cache_level": 0,
        "priority": 35,
        **fields,
    }


def event(
    event_id: int, kind: str, *, window: int = 4096, rank: int | None = None, **data: Any
) -> dict[str, Any]:
    made = {"event_id": event_id, "data": {"type": kind, **data}, "window_size": window}
    return made if rank is None else {**made, "attention_dp_rank": rank}


def created(event_id: int = 0, **options: Any) -> dict[str, Any]:
    return event(event_id, "created", num_blocks_per_cache_level=[100, 50], **options)


def stored(event_id: int, parent: int | None, *blocks: dict[str, Any], **options: Any) -> dict[str, Any]:
    return event(event_id, "stored", parent_hash=parent, blocks=list(blocks), **options)


def removed(event_id: int, *names: int, **options: Any) -> dict[str, Any]:
    return event(event_id, "removed", block_hashes=list(names), **options)


def moved(event_id: int, name: int, old: int, new: int) -> dict[str, Any]:
    level = {"type": "event_diff", "new_value": new, "old_value": old}
    return event(event_id, "updated", block_hash=name, cache_level=level, priority=None)


def prefix(
    index: CacheIndex, tokens: list[int], tier: Tier = Tier.DEVICE, *, holder: Holder = HOLDER, **options: Any
) -> int:
    row = index.holder_id(holder)
    assert row is not None
    hashes = sequence_hashes(np.array(tokens, np.uint32), BLOCK, **options)
    return int(index.match(NAMESPACE, hashes)[row, tier])


class Rank:
    """An index fed with events directly."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.index.register(HOLDER)
        self.ingest = TrtllmIngest(self.index, HOLDER, "tiny", BLOCK)

    def apply(self, *events: dict[str, Any]) -> None:
        for each in events:
            self.ingest.apply(decode_event(each))


TOKENS = list(range(12))


@pytest.fixture
def rank() -> Rank:
    made = Rank()
    made.apply(created(), stored(1, None, block(11, TOKENS[:4]), block(12, TOKENS[4:8])))
    return made


def test_chains_grow_and_shrink(rank: Rank) -> None:
    rank.apply(stored(2, 12, block(13, TOKENS[8:])))
    assert prefix(rank.index, TOKENS) == 3
    assert rank.ingest.complete
    rank.apply(removed(3, 13, 12))
    assert prefix(rank.index, TOKENS) == 1
    assert rank.ingest.counters.unresolved_blocks == 0


def test_blocks_change_their_tier(rank: Rank) -> None:
    rank.apply(moved(2, 12, 0, 1))
    assert (prefix(rank.index, TOKENS), prefix(rank.index, TOKENS, Tier.HOST)) == (1, 2)
    rank.apply(removed(3, 12))
    assert prefix(rank.index, TOKENS, Tier.HOST) == 1
    rank.apply(moved(4, 11, 0, 1), moved(5, 11, 1, 0))
    assert {tier for _, tier in rank.index.residencies(HOLDER)} == {Tier.DEVICE}


def test_a_block_may_be_stored_in_host_memory_at_once(rank: Rank) -> None:
    rank.apply(stored(2, 12, block(13, TOKENS[8:], cache_level=1)))
    assert (prefix(rank.index, TOKENS), prefix(rank.index, TOKENS, Tier.HOST)) == (2, 3)


def test_a_repeated_store_is_one_copy(rank: Rank) -> None:
    rank.apply(stored(2, None, block(11, TOKENS[:4])), removed(3, 11))
    assert prefix(rank.index, TOKENS) == 0


def test_partial_blocks_are_not_indexed(rank: Rank) -> None:
    rank.apply(stored(2, 12, block(13, TOKENS[8:10])), removed(3, 13))
    assert (prefix(rank.index, TOKENS), rank.ingest.counters.unresolved_blocks) == (2, 0)
    rank.apply(stored(4, 13, block(14, TOKENS[8:])))
    assert rank.ingest.counters.unresolved_blocks == 1


def test_an_unknown_parent_is_counted_and_never_a_root(rank: Rank) -> None:
    rank.apply(stored(2, 99, block(14, [7] * 4)), removed(3, 98))
    assert rank.ingest.counters.unresolved_blocks == 2
    assert prefix(rank.index, [7] * 4) == 0


def test_salts_adapters_and_extra_ids_separate(rank: Rank) -> None:
    salted = block(21, [1] * 4, cache_salt="s")
    adapted = block(22, [2] * 4, lora_id=5)
    extra = block(23, [3] * 4)
    extra["tokens"][0]["token_extra_id"] = 9
    seen = block(24, [4] * 4, mm_keys=[{"type": "mm_key", "hash": "ab", "start_offset": 0}])
    rank.apply(*(stored(2 + i, None, each) for i, each in enumerate((salted, adapted, extra, seen))))
    assert [prefix(rank.index, [token] * 4) for token in (1, 2, 3, 4)] == [0, 0, 0, 0]
    assert prefix(rank.index, [1] * 4, cache_salt="s") == 1
    assert len(rank.index.residencies(HOLDER)) == 6


def test_digests_as_texts_and_negative_hashes_are_names(rank: Rank) -> None:
    rank.apply(stored(2, None, block("ff" * 32, [5] * 4)), removed(3, -1))
    assert prefix(rank.index, [5] * 4) == 0
    assert rank.ingest.counters.unresolved_blocks == 0


def test_only_the_widest_window_counts() -> None:
    rank = Rank()
    rank.apply(created(0, window=128), created(1, window=4096))
    rank.apply(stored(2, None, block(11, TOKENS[:4]), window=4096))
    rank.apply(stored(3, None, block(12, [5] * 4), window=128), removed(4, 11, window=128))
    assert (prefix(rank.index, TOKENS), prefix(rank.index, [5] * 4)) == (1, 0)
    assert rank.ingest.complete


def test_a_gap_voids_and_is_cold(rank: Rank) -> None:
    rank.apply(stored(5, None, block(30, [9] * 4)))
    assert (prefix(rank.index, TOKENS), prefix(rank.index, [9] * 4)) == (0, 1)
    assert (rank.ingest.gaps, rank.ingest.complete) == (1, False)


@pytest.mark.parametrize("first", [0, 1])
def test_an_id_that_steps_back_is_a_restart(rank: Rank, first: int) -> None:
    rank.apply(stored(first, None, block(30, [9] * 4)))
    assert (prefix(rank.index, TOKENS), prefix(rank.index, [9] * 4)) == (0, 1)
    assert (rank.ingest.restarts, rank.ingest.complete) == (1, first == 0)


def test_a_cache_created_anew_is_a_restart(rank: Rank) -> None:
    rank.apply(created(2))
    assert (prefix(rank.index, TOKENS), rank.ingest.restarts) == (0, 1)


def test_joining_late_is_cold() -> None:
    rank = Rank()
    rank.apply(stored(40, None, block(1, TOKENS[:4])))
    assert (prefix(rank.index, TOKENS), rank.ingest.complete, rank.ingest.gaps) == (1, False, 0)


def test_cleared_priorities_and_unknown_events(rank: Rank) -> None:
    priority = event(2, "updated", block_hash=11, cache_level=None, priority={"new_value": 1, "old_value": 2})
    rank.apply(priority, event(3, "compacted"), {"event_id": 4, "data": 7}, event(5, "stored", blocks=None))
    assert prefix(rank.index, TOKENS) == 2
    counters = rank.ingest.counters
    assert (counters.unknown_events, counters.malformed_events, counters.events) == (1, 2, 3)
    rank.apply(event(6, "all_cleared"))
    assert prefix(rank.index, TOKENS) == 0
    assert rank.ingest.complete


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (7, "event"),
        ({}, "event_id"),
        ({"event_id": True}, "event_id"),
        ({"event_id": -1}, "event_id"),
        ({"event_id": 1, "attention_dp_rank": "x"}, "attention_dp_rank"),
    ],
)
def test_what_cannot_be_placed_is_an_error(item: object, field: str) -> None:
    with pytest.raises(MalformedEventError) as caught:
        decode_event(item)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (None, "data"),
        ({"type": "stored", "blocks": [7]}, "data.blocks"),
        ({"type": "stored", "blocks": [block(1, [])], "parent_hash": []}, "data.parent_hash"),
        ({"type": "stored", "blocks": [block([], [])]}, "data.blocks.block_hash"),
        ({"type": "stored", "blocks": [{**block(1, []), "tokens": None}]}, "data.blocks.tokens"),
        ({"type": "stored", "blocks": [{**block(1, []), "tokens": [1]}]}, "data.blocks.tokens"),
        ({"type": "stored", "blocks": [block(1, [2**32])]}, "data.blocks.tokens"),
        ({"type": "stored", "blocks": [block(1, [], cache_level=9)]}, "data.blocks.cache_level"),
        ({"type": "removed", "block_hashes": 5}, "data.block_hashes"),
        ({"type": "removed", "block_hashes": ["xyz"]}, "data.block_hashes"),
        ({"type": "updated", "block_hash": 1, "cache_level": {}}, "data.cache_level.new_value"),
    ],
)
def test_malformed_data_names_its_field(data: object, field: str) -> None:
    found = decode_event({"event_id": 0, "data": data}).data
    assert isinstance(found, MalformedEventError)
    assert found.field == field


# --- over HTTP -----------------------------------------------------------------------------------------


class Server:
    """A server that gives each event once, on a thread of its own."""

    def __init__(self, *, port: int = 0, method: str = "POST") -> None:
        self.events: list[Any] = []
        self.body: str | None = None
        self.status = 200
        self.polls = 0
        self._method = method
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = self._call(self._start(port))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _start(self, port: int) -> int:
        app = web.Application()
        app.router.add_route(self._method, "/kv_cache_events", self._drain)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        return self._runner.addresses[0][1]

    async def _drain(self, request: web.Request) -> web.Response:
        self.polls += 1
        if self.body is not None:
            return web.Response(text=self.body, status=self.status)
        taken, self.events = self.events, []
        return web.json_response(taken, status=self.status)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def config(self, holder: Holder = HOLDER) -> StreamConfig:
        return StreamConfig(holder, "tiny", self.url, None, block_size=BLOCK)

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._runner.cleanup())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Setup:
    def __init__(self) -> None:
        self.index = CacheIndex()
        self.source = TrtllmEventSource(self.index, interval_s=0.01, retry_s=0.02)
        self.source.start()
        self.servers: list[Server] = []

    def server(self, **options: Any) -> Server:
        self.servers.append(Server(**options))
        return self.servers[-1]

    def stats(self, holder: Holder = HOLDER) -> StreamStats:
        return next(each for each in self.source.stream_stats() if each.holder == holder)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.source.close()
    for server in made.servers:
        server.close()


def test_events_are_polled(setup: Setup) -> None:
    server = setup.server()
    server.events = [created(), stored(1, None, block(11, TOKENS[:4]))]
    setup.source.add_stream(server.config())
    wait_for(lambda: prefix(setup.index, TOKENS) == 1)
    server.events = [stored(2, 11, block(12, TOKENS[4:8]))]
    wait_for(lambda: prefix(setup.index, TOKENS) == 2)
    stats = setup.stats()
    assert (stats.state, stats.last_seq, stats.batches, stats.gaps) == ("warm", 2, 2, 0)
    assert stats.last_event_at_s is not None


def test_a_server_that_serves_get(setup: Setup) -> None:
    server = setup.server(method="GET")
    server.events = [created(), stored(1, None, block(11, TOKENS[:4]))]
    setup.source.add_stream(server.config())
    wait_for(lambda: prefix(setup.index, TOKENS) == 1)


def test_ranks_of_one_server_are_polled_once_and_kept_apart(setup: Setup) -> None:
    server = setup.server()
    ranks = [Holder("trt", 0), Holder("trt", 1)]
    for holder in ranks:
        setup.source.add_stream(server.config(holder))
    server.events = [
        stored(0, None, block(11, TOKENS[:4]), rank=0),
        stored(0, None, block(12, [5] * 4), rank=1),
        stored(0, None, block(12, [6] * 4), rank=7),
    ]
    wait_for(lambda: prefix(setup.index, [5] * 4, holder=ranks[1]) == 1)
    assert prefix(setup.index, TOKENS, holder=ranks[0]) == 1
    assert prefix(setup.index, [5] * 4, holder=ranks[0]) == 0
    setup.source.remove_stream(ranks[0])
    server.events = [stored(1, None, block(13, [7] * 4), rank=1)]
    wait_for(lambda: prefix(setup.index, [7] * 4, holder=ranks[1]) == 1)
    assert prefix(setup.index, TOKENS, holder=ranks[0]) == 0


def test_a_restarted_server_leaves_nothing_stale(setup: Setup) -> None:
    old = setup.server()
    old.events = [created(), stored(1, None, block(11, TOKENS[:4]))]
    setup.source.add_stream(old.config())
    wait_for(lambda: prefix(setup.index, TOKENS) == 1)
    old.close()
    wait_for(lambda: setup.stats().state == "connecting")
    assert prefix(setup.index, TOKENS) == 0
    new = setup.server(port=old.port)
    new.events = [created(), stored(1, None, block(11, [8] * 4))]
    wait_for(lambda: prefix(setup.index, [8] * 4) == 1)
    assert setup.stats().state == "warm"


def test_bad_answers_are_counted_and_the_stream_goes_on(setup: Setup) -> None:
    server = setup.server()
    setup.source.add_stream(server.config())
    for body, status in (("{", 200), ("{}", 200), ("no", 500)):
        server.body, server.status = body, status
        before = server.polls
        wait_for(lambda b=before: server.polls > b + 1)
    server.body, server.status = None, 200
    server.events = [7, created(), stored(1, None, block(11, TOKENS[:4]))]
    wait_for(lambda: prefix(setup.index, TOKENS) == 1)
    assert setup.stats().malformed_frames >= 4
    assert setup.stats().state == "warm"


def test_what_somebody_cleared_is_restored_by_a_resync(setup: Setup) -> None:
    """An engine that failed a health check is cleared; its server repeats nothing when it is back."""
    server = setup.server()
    on_host = block(13, TOKENS[8:12], cache_level=1)
    server.events = [created(), stored(1, None, block(11, TOKENS[:4]), block(12, TOKENS[4:8]), on_host)]
    setup.source.add_stream(server.config())
    wait_for(lambda: len(setup.index.residencies(HOLDER)) == 3)
    before = setup.index.residencies(HOLDER)
    setup.index.clear(HOLDER)
    setup.source.resync(HOLDER)
    assert setup.index.residencies(HOLDER) == before
    setup.source.resync(HOLDER)  # nothing is there twice
    server.events = [removed(2, 12)]
    wait_for(lambda: prefix(setup.index, TOKENS) == 1)
    assert setup.stats().state == "warm"


def test_one_server_may_be_followed_for_several_tenants(setup: Setup) -> None:
    server = setup.server()
    server.events = [created(), stored(1, None, block(11, TOKENS[:4]))]
    holders = [HOLDER, Holder("acme|trt")]
    for holder in holders:
        setup.source.add_stream(server.config(holder))
    server.events += [stored(2, 11, block(12, TOKENS[4:8]))]
    wait_for(lambda: all(setup.stats(holder).last_seq == 2 for holder in holders))
    setup.source.remove_stream(holders[0])
    server.events = [stored(3, 12, block(13, TOKENS[8:12]))]
    wait_for(lambda: setup.stats(holders[1]).last_seq == 3)


def test_a_block_size_that_cannot_be_is_noticed(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    server = setup.server()
    server.events = [created(), *(stored(i, None, block(10 + i, [7] * 8)) for i in (1, 2))]
    setup.source.add_stream(server.config())
    wait_for(lambda: setup.stats().last_seq == 2)
    assert capsys.readouterr().out.count("set block_size") == 1


def test_an_unregistered_holder_does_not_stop_the_thread(setup: Setup) -> None:
    server = setup.server()
    setup.source.add_stream(server.config())
    setup.index.unregister(HOLDER)
    server.events = [created(), stored(1, None, block(11, TOKENS[:4]))]
    wait_for(lambda: setup.stats().last_seq == 1)
    setup.source.add_stream(server.config())
    server.events = [stored(2, None, block(11, TOKENS[:4]))]
    wait_for(lambda: prefix(setup.index, TOKENS) == 1)


def test_streams_may_be_added_before_the_start_and_close_is_idempotent(setup: Setup) -> None:
    server = setup.server()
    server.events = [created(), stored(1, None, block(11, TOKENS[:4]))]
    index = CacheIndex()
    source = TrtllmEventSource(index, interval_s=0.01)
    source.add_stream(server.config())
    assert source.stream_stats()[0].state == "connecting"
    source.start()
    wait_for(lambda: source.stream_stats()[0].state == "warm")
    source.close()
    source.close()
    TrtllmEventSource(index).close()
