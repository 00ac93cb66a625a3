from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conductor.reuse import RetainedBlocks, ReuseModel
from simulator.workloads import TraceRecord, belady_hits, block_accesses, generate, lru_hits, next_uses


def hits(records: list[TraceRecord], capacity_blocks: int) -> int:
    model = ReuseModel(records[0].block_tokens)
    cache = RetainedBlocks(capacity_blocks, model)
    found = 0
    for record in records:
        prompt = np.array(record.hash_ids, np.uint64)
        found += sum(block in cache for block in record.hash_ids)
        model.observe(prompt, record.arrival_s)
        cache.keep(prompt, record.arrival_s)
    return found


@pytest.mark.parametrize("kind", ["chat", "coding", "agent", "rag", "burst"])
def test_between_lru_and_belady_on_every_kind_of_workload(kind: str) -> None:
    records = generate(kind, 1_500, 4.0, seed=1)
    accesses = block_accesses(records)
    capacity = max(64, len(set(accesses)) // 10)
    learned = hits(records, capacity)
    assert learned <= belady_hits(accesses, capacity, next_uses(accesses))
    assert learned >= lru_hits(accesses, capacity) - 0.005 * len(accesses)


def test_a_scan_does_not_wash_out_conversations() -> None:
    """Half of the conversations come back after 60 s; between them pass documents that nobody asks about again."""
    source = np.random.default_rng(0)
    records: list[TraceRecord] = []
    for number in range(800):
        at_s, blocks = 5.0 * number, tuple(range(1_000_000 + 100 * number, 1_000_000 + 100 * number + 6))
        records.append(TraceRecord(at_s, 6 * 512, 100, blocks))
        if source.random() < 0.5:
            more = tuple(range(blocks[0], blocks[0] + 9))
            records.append(TraceRecord(at_s + 60.0, 9 * 512, 100, more))
        document = tuple(range(50_000_000 + 100 * number, 50_000_000 + 100 * number + 60))
        records.append(TraceRecord(at_s + 1.0, 60 * 512, 100, document))
    records.sort(key=lambda record: record.arrival_s)
    accesses, capacity = (
        block_accesses(records),
        120,
    )  # a minute's conversations; documents fill it in ten seconds
    best = belady_hits(accesses, capacity, next_uses(accesses))
    assert lru_hits(accesses, capacity) < 0.05 * best
    assert hits(records, capacity) > 0.75 * best


def test_of_one_prompt_the_beginning_stays() -> None:
    model = ReuseModel(512)
    cache = RetainedBlocks(10, model)
    prompt = np.arange(1, 41, dtype=np.uint64)
    model.observe(prompt, 0.0)
    assert cache.keep(prompt, 0.0) == []
    assert cache.cached_prefix(prompt) == len(cache) == 10


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_blocks"):
        RetainedBlocks(0, ReuseModel(512))


def branch(tree: int, leaves: int, number: int, blocks: int) -> NDArray[np.uint64]:
    shared = [1_000 * tree + depth for depth in range(min(leaves, blocks))]
    return np.array(
        shared + [100_000 * (number + 1) + depth for depth in range(len(shared), blocks)], np.uint64
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 40), st.floats(0.0, 200.0)),
        max_size=50,
    ),
    st.integers(1, 120),
)
def test_stores_no_more_than_there_is_room_for_and_tells_what_went(
    requests: list[tuple[int, int, int, float]], capacity: int
) -> None:
    model = ReuseModel(512, accesses=256)
    cache = RetainedBlocks(capacity, model)
    stored: set[int] = set()
    now_s = 0.0
    for number, (tree, leaves, blocks, after_s) in enumerate(requests):
        now_s += after_s
        prompt = branch(tree, leaves, number, blocks)
        model.observe(prompt, now_s)
        fits = len(stored | set(prompt.tolist())) <= capacity
        dropped = cache.keep(prompt, now_s)
        assert set(dropped) <= stored
        stored -= set(dropped)
        stored |= {block for block in prompt.tolist() if block in cache}
        assert all(block in cache for block in stored)
        assert not any(block in cache for block in dropped)
        assert len(cache) == len(stored) <= capacity
        assert not fits or (not dropped and all(block in cache for block in prompt.tolist()))
        assert cache.cached_prefix(prompt) <= blocks
