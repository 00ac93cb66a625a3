"""Hybrid models publish each block once per KV cache group; one group decides what can be used again."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cache_index import CacheIndex, Holder, Namespace, StreamIngest, Tier, decode_batch, sequence_hashes
from cache_index.streams import EngineTraits

HOLDER = Holder("engine")
NAMESPACE = Namespace("hybrid", 4)
TOKENS = list(range(12))


class Stream:
    def __init__(self, *, compiled: bool) -> None:
        self.index = CacheIndex()
        self.index.register(HOLDER)
        self.ingest = StreamIngest(self.index, HOLDER, "hybrid", block_size=4)
        self._compiled = compiled

    def apply(self, *events: Any) -> None:
        payload = msgspec.msgpack.encode([1.0, list(events), 0])
        if self._compiled:
            assert self.ingest.apply_payloads([payload]) == []
        else:
            self.ingest.apply(decode_batch(payload))

    def prefix(self) -> int:
        """Blocks of the prompt that the engine can use again."""
        hashes = sequence_hashes(np.array(TOKENS, np.uint32), 4)
        return int(self.index.match(NAMESPACE, hashes)[0, 0])

    def copies(self) -> int:
        return self.index.stats().residencies


@pytest.fixture(params=["compiled", "decoded"])
def stream(request: pytest.FixtureRequest) -> Stream:
    stream = Stream(compiled=request.param == "compiled")
    # the namespace becomes known, so that everything else is read compiled
    stream.apply(stored([99], 0, "full_attention", tokens=[7, 7, 7, 7]))
    stream.apply(removed(99, group=0))
    stream.ingest.clear()
    stream.ingest.resume(EngineTraits())
    return stream


def stored(
    hashes: list[int], group: int | None, kind: str | None, tokens: list[int] = TOKENS, block_size: int = 4
) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
    event |= {"token_ids": tokens, "block_size": block_size, "lora_id": None, "medium": "GPU"}
    return event | {"lora_name": None, "group_idx": group, "kv_cache_spec_kind": kind}


def removed(engine_hash: int, group: int | None) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [engine_hash], "medium": "GPU", "group_idx": group}


def test_the_group_that_attends_to_the_whole_prefix_decides(stream: Stream) -> None:
    events = stream.ingest.counters.events
    stream.apply(
        stored([1, 2, 3], 0, "sliding_window"),
        stored([1, 2, 3], 1, "full_attention"),
        stored([2], 2, "mamba", tokens=TOKENS, block_size=2176),
    )
    assert (stream.prefix(), stream.copies()) == (3, 3)
    stream.apply(removed(1, group=0), removed(2, group=0), removed(2, group=2))  # out of the window
    assert stream.prefix() == 3
    stream.apply(removed(3, group=1))
    assert stream.prefix() == 2
    counters = stream.ingest.counters
    assert (counters.events - events, counters.other_group_events) == (7, 4)
    assert (counters.malformed_events, counters.unresolved_blocks) == (0, 0)


def test_blocks_freed_before_they_are_published_leave_fewer_hashes_than_tokens(stream: Stream) -> None:
    stream.apply(stored([3], 0, "sliding_window"), stored([1, 2, 3], 1, "mla_attention"))
    assert stream.prefix() == 3
    assert stream.ingest.counters.malformed_events == 0


def test_of_two_groups_for_whole_prefixes_one_is_followed(stream: Stream) -> None:
    """Else every block would count twice, and stay when one of its two halves has gone."""
    stream.apply(stored([1, 2, 3], 0, "full_attention"), stored([1, 2, 3], 1, "full_attention"))
    stream.apply(removed(3, group=0))
    assert stream.prefix() == 2
    stream.apply(removed(3, group=1), removed(2, group=1))
    assert stream.prefix() == 2


@pytest.mark.parametrize("kind", ["sink_full_attention", "a kind of the future"])
def test_kinds_that_are_not_known_to_be_partial_count(stream: Stream, kind: str) -> None:
    stream.apply(stored([1, 2, 3], 1, kind))
    assert stream.prefix() == 3


def test_without_kinds_the_first_group_counts(stream: Stream) -> None:
    stream.apply(stored([1, 2, 3], 0, None), stored([1, 2, 3], 1, None), removed(3, group=1))
    assert (stream.prefix(), stream.copies()) == (3, 3)
    stream.apply(removed(3, group=0))
    assert stream.prefix() == 2


def test_without_groups_every_event_counts(stream: Stream) -> None:
    stream.apply(stored([1, 2, 3], None, None), stored([3], None, None, tokens=[9, 9, 9, 9]))
    stream.apply(removed(3, group=None))
    assert stream.copies() == 3
    assert stream.ingest.counters.other_group_events == 0


def test_the_engine_may_come_back_with_other_groups(stream: Stream) -> None:
    stream.apply(stored([1, 2, 3], 0, "full_attention"))
    stream.apply({"type": "AllBlocksCleared"})
    stream.apply(stored([1, 2, 3], 0, "sliding_window"), stored([1, 2], 1, "full_attention", TOKENS[:8]))
    assert stream.prefix() == 2
    stream.apply(removed(1, group=0))
    assert stream.prefix() == 2


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "mamba"])
def test_without_a_group_for_whole_prefixes_the_first_one_is_followed(stream: Stream, kind: str) -> None:
    stream.apply(stored([1, 2, 3], 0, kind), stored([1, 2, 3], 1, kind))
    assert (stream.prefix(), stream.copies()) == (3, 3)
    stream.apply(removed(2, group=1))
    assert stream.prefix() == 3
    stream.apply(removed(1, group=0))  # out of the window: the engine could still use the rest
    assert stream.prefix() == 0
    assert stream.ingest.counters.other_group_events == 2


def test_a_group_for_whole_prefixes_takes_over_whenever_it_comes(stream: Stream) -> None:
    stream.apply(stored([1, 2, 3], 0, "sliding_window"), stored([9], None, None, tokens=[8, 8, 8, 8]))
    stream.apply(removed(3, group=0), stored([1, 2], 1, "full_attention", TOKENS[:8]), removed(1, group=0))
    assert (stream.prefix(), stream.copies()) == (2, 2)
    stream.apply(stored([3], 0, "sliding_window", tokens=[7, 7, 7, 7]))
    assert (stream.prefix(), stream.copies()) == (2, 2)
    assert stream.ingest.traits == EngineTraits(1, False)


def test_a_partial_group_with_blocks_of_its_own_is_not_followed(stream: Stream) -> None:
    """Its events are no faults, and another group of the stream may do."""
    stream.apply(stored([1], 0, "mamba", tokens=TOKENS, block_size=12))
    stream.apply(stored([2, 3], 0, "mamba", tokens=TOKENS, block_size=4))  # fewer hashes than tokens
    assert stream.copies() == 0
    stream.apply(stored([1, 2, 3], 1, "sliding_window"))
    assert stream.prefix() == 3
    counters = stream.ingest.counters
    assert (counters.malformed_events, counters.other_group_events) == (0, 2)


def test_groups_without_kinds_give_way_to_one_for_whole_prefixes(stream: Stream) -> None:
    stream.apply(stored([1, 2, 3], 0, None), stored([1], 1, "mamba", TOKENS[:4]))
    assert stream.prefix() == 3
    stream.apply(stored([1, 2], 2, "full_attention", TOKENS[:8]))
    assert stream.prefix() == 2


def test_taking_over_clears_only_what_the_stream_speaks_for() -> None:
    index = CacheIndex()
    index.register(HOLDER)
    ingest = StreamIngest(index, HOLDER, "hybrid", tiers={Tier.DEVICE})
    index.store(HOLDER, Tier.HOST, NAMESPACE, np.array([5], np.uint64))
    ingest.apply_payloads([msgspec.msgpack.encode([1.0, [stored([1, 2, 3], 0, "sliding_window")], 0])])
    ingest.apply_payloads([msgspec.msgpack.encode([1.0, [stored([1], 1, "full_attention", TOKENS[:4])], 0])])
    assert index.stats().residencies_by_holder[HOLDER] == {Tier.DEVICE: 1, Tier.HOST: 1}
    assert ingest.clears == 0
