"""Requests of traces, and generated conversations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from simulator.cluster import BLOCK_TOKENS, conversations, requests_of, reuse_bound
from simulator.workloads import TraceRecord


def test_conversations_are_a_trace() -> None:
    records = list(conversations(500, requests_per_s=5.0, seed=3))
    assert records == list(conversations(500, requests_per_s=5.0, seed=3))
    assert records != list(conversations(500, requests_per_s=5.0, seed=4))
    assert all(first.arrival_s < second.arrival_s for first, second in pairwise(records))
    assert all(len(r.hash_ids) == -(-r.input_tokens // BLOCK_TOKENS) for r in records)
    assert records[-1].arrival_s == pytest.approx(100.0, rel=0.2)
    # A block has one predecessor: ids name prefixes.
    before: dict[int, int] = {}
    for record in records:
        for previous, block in pairwise(record.hash_ids):
            assert before.setdefault(block, previous) == previous
    seen: set[int] = set()
    known = total = 0
    for record in records:
        known += len(seen.intersection(record.hash_ids))
        total += len(record.hash_ids)
        seen.update(record.hash_ids)
    assert 0.3 < known / total < 0.9


def test_only_full_blocks_have_hashes() -> None:
    records = [TraceRecord(0.0, 2 * BLOCK_TOKENS + 1, 5, (0, 1, 2)), TraceRecord(0.0, 3, 5, (0,))]
    first, second = requests_of(records)
    assert (len(first.hashes), len(second.hashes)) == (2, 0)
    assert first.hashes.all(), "0 stands for no block"


def test_equal_ids_have_equal_hashes_and_others_do_not() -> None:
    ids = tuple(range(1_000))
    records = [TraceRecord(0.0, 1_000 * BLOCK_TOKENS, 1, ids)] * 2
    first, second = requests_of(records)
    assert (first.hashes == second.hashes).all()
    assert len(np.unique(first.hashes)) == 1_000


def test_nothing_reuses_more_than_a_cache_without_limit() -> None:
    records = [
        TraceRecord(0.0, 3 * BLOCK_TOKENS, 1, (0, 1, 2)),
        TraceRecord(0.0, 4 * BLOCK_TOKENS, 1, (0, 1, 7, 2)),
        TraceRecord(0.0, 3 * BLOCK_TOKENS, 1, (0, 1, 2)),  # its last block is computed again
    ]
    assert reuse_bound(requests_of(records)) == 4 / 10
