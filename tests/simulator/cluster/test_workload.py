"""Requests of traces, and generated conversations."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.cluster import BLOCK_TOKENS, block_tokens_of, requests_of
from simulator.workloads import TraceRecord


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


def test_blocks_may_have_another_size_but_only_one() -> None:
    small = TraceRecord(0.0, 50, 1, (7, 8, 9, 10), block_tokens=16)
    (request,) = requests_of([small])
    assert len(request.hashes) == 3, "the last block is not full"
    assert block_tokens_of([small, small]) == 16
    assert block_tokens_of([]) == BLOCK_TOKENS
    mixed = [small, TraceRecord(1.0, 512, 1, (7,))]
    for read in (block_tokens_of, lambda records: list(requests_of(records))):
        with pytest.raises(ValueError, match=r"request 1 has blocks of 512 tokens, those before it of 16"):
            read(mixed)


def test_a_long_trace_is_read_as_its_requests_alone_are() -> None:
    ids = iter(range(10_000_000))
    records = [
        TraceRecord(float(n), blocks * BLOCK_TOKENS + 1, n, tuple(next(ids) for _ in range(blocks + 1)))
        for n, blocks in enumerate(np.random.default_rng(3).integers(0, 5, 2_500).tolist())
    ]
    requests = list(requests_of(iter(records), speed=2.0))
    assert [r.number for r in requests] == list(range(2_500))
    assert [r.arrival_s for r in requests] == [n / 2 for n in range(2_500)]
    for request, record in zip(requests, records, strict=True):
        (alone,) = requests_of([record])
        assert request.hashes.tolist() == alone.hashes.tolist()
        assert (request.prompt_tokens, request.output_tokens) == (alone.prompt_tokens, alone.output_tokens)
