"""What a Mooncake pool is taken to hold: only what can be keyed, by events and by listings."""

from __future__ import annotations

from typing import Any

import numpy as np
from mooncake_pool import BLOCK, ENGINE, NAMESPACE, POOL, TOKENS, Pool, as_sent, recorded_frames

from cache_index import CacheIndex, Namespace, sequence_hashes
from cache_index.mooncake_events import decode_master_batch
from cache_index.mooncake_hints import MooncakeHints, name_of


def test_recorded_objects_cannot_be_keyed_and_are_counted() -> None:
    index = CacheIndex()
    index.register(POOL)
    hints = MooncakeHints(index, POOL, "tiny", BLOCK)
    present: set[int] = set()
    for frames in recorded_frames():
        for event in decode_master_batch(frames[-1]).events:
            hints.apply(event)
            change = present.update if event.kind == "stored" else present.difference_update
            change(event.names)
    assert (hints.counters.keyed, hints.counters.unresolved) == (0, 0)
    assert (hints.counters.unkeyed, hints.unkeyed) == (49, len(present))
    assert index.stats().blocks == 0


def test_an_object_is_the_block_that_an_engine_stored_under_its_hash() -> None:
    pool = Pool()
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102))
    assert pool.pooled() == 2
    pool.evict(103, 102, 101)
    assert pool.pooled() == 2  # the pool has them still
    pool.apply(as_sent(3, "removed", 102))
    assert pool.pooled() == 1


def test_an_object_may_be_told_before_the_engine_explains_it() -> None:
    pool = Pool()
    pool.apply(as_sent(1, "stored", 101))
    assert (pool.pooled(), pool.hints.unkeyed) == (0, 1)
    pool.explain([101], TOKENS[:4])
    pool.apply(as_sent(2, "stored", 999))
    assert (pool.pooled(), pool.hints.unkeyed) == (1, 1)


def test_tokens_key_an_object_by_themselves() -> None:
    pool = Pool()
    pool.apply(as_sent(1, "stored", 1, token_ids=TOKENS[:4], block_size=BLOCK))
    pool.apply(as_sent(2, "stored", 2, token_ids=TOKENS[4:8], parent_hash=1, base_block_idx=1))
    assert pool.pooled() == 2
    pool.apply(as_sent(3, "stored", 3, token_ids=TOKENS[8:], base_block_idx=2))
    pool.apply(as_sent(4, "stored", 4, token_ids=TOKENS[:3]))
    pool.apply(as_sent(5, "stored", 5, token_ids=TOKENS[8:], parent_hash=77))
    pool.apply(as_sent(6, "stored", 6, token_ids=TOKENS[:4], additional_salt="s"))
    pool.apply(as_sent(7, "stored", 7, model_name="other"))
    assert (pool.pooled(), pool.hints.counters.unkeyed) == (2, 4)


def test_a_repeated_object_is_one() -> None:
    pool = Pool()
    pool.explain([101], TOKENS[:4])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 101), as_sent(3, "removed", 101))
    assert pool.pooled() == 0
    pool.apply(as_sent(4, "removed", 101))
    assert pool.hints.counters.unresolved == 1


def test_cleared_voids_the_pool_only() -> None:
    pool = Pool()
    pool.explain([101], TOKENS[:4])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 5), as_sent(3, "cleared"))
    assert (pool.pooled(), pool.hints.unkeyed) == (0, 0)
    assert len(pool.index.residencies(ENGINE)) == 1


def test_the_oldest_hints_go_when_there_are_too_many() -> None:
    pool = Pool(max_blocks=2)
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(*(as_sent(i, "stored", 100 + i) for i in (1, 2, 3)))
    assert len(pool.hints) == 2
    assert pool.pooled() == 0
    pool.apply(*(as_sent(i, "stored", i) for i in (11, 12, 13, 14)))
    assert (pool.hints.unkeyed, pool.hints.counters.forgotten) == (2, 3)


def list_keys(pool: Pool, *keys: str, meanwhile: tuple[dict[str, Any], ...] = ()) -> None:
    """The master was asked and lists these keys; events come while it answers."""
    listing = pool.hints.begin_listing()
    present = {name for key in keys if (name := name_of(key)) is not None}
    pool.apply(*meanwhile)
    pool.hints.drop_unlisted([name for name in pool.hints.names() if name not in present], listing)
    pool.hints.learn_listed(present, listing)


def test_a_listing_drops_what_the_master_no_longer_has() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102), as_sent(3, "stored", 9))
    list_keys(pool, "101", "session/7")
    assert (pool.pooled(), pool.hints.unkeyed, pool.hints.counters.unlisted) == (1, 0, 1)
    list_keys(pool, "0x65")
    assert (pool.pooled(), pool.hints.counters.unlisted) == (1, 1)


def test_a_listing_brings_what_no_event_told_of() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    list_keys(pool, "101", "102", "77")
    assert (pool.pooled(), pool.hints.unkeyed, pool.hints.counters.learned) == (2, 1, 3)
    pool.explain([77], TOKENS[:4])  # the block itself is known by another name too
    list_keys(pool, "102", "77")
    assert (pool.pooled(), pool.hints.unkeyed, pool.hints.counters.learned) == (2, 0, 3)


def test_events_that_come_during_a_listing_know_better() -> None:
    pool = Pool()
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102))
    list_keys(pool, "101", "102", meanwhile=(as_sent(3, "removed", 102), as_sent(4, "stored", 103)))
    assert pool.hints.names() == [101, 103]


def test_a_listing_from_before_the_hints_were_voided_says_nothing() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    pool.apply(as_sent(1, "stored", 101))
    list_keys(pool, "102", meanwhile=(as_sent(2, "cleared"), as_sent(3, "stored", 101)))
    assert pool.hints.names() == [101]


def test_the_objects_of_a_prefix_are_found_by_its_hashes() -> None:
    pool = Pool()
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 103))
    hashes = sequence_hashes(np.array(TOKENS, np.uint32), BLOCK)
    assert pool.hints.names_of(NAMESPACE, hashes) == [101, None, 103]
    assert pool.hints.names_of(Namespace("other", BLOCK), hashes) == [None, None, None]
