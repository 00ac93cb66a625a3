"""Conversations that each continue the one before, at an exact rate whatever their number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.cluster import BLOCK_TOKENS
from simulator.workloads import TraceRecord


def conversations(
    count: int, *, requests_per_s: float, seed: int = 0, turns: int = 4, turn_tokens: int = 3_000
) -> Iterator[TraceRecord]:
    """``count`` requests of conversations that each continue the one before; Poisson arrivals in all.

    Every turn adds an exponential number of prompt tokens to the conversation (mean ``turn_tokens``), answers are
    geometric (mean 340 tokens), a tenth of the arrivals or so begins anew. All share their first block.
    """
    random = np.random.default_rng(seed)
    open_ids: list[list[int]] = []
    lengths: list[int] = []
    next_id, now_s = 1, 0.0
    for _ in range(count):
        now_s += float(random.exponential(1 / requests_per_s))
        if len(open_ids) < 8 or random.random() < 1 / turns:
            open_ids.append([0])
            lengths.append(BLOCK_TOKENS)
        # The latest conversations go on.
        at = len(open_ids) - 1 - min(int(random.exponential(30)), len(open_ids) - 1)
        prompt = lengths[at] + 1 + int(random.exponential(turn_tokens))
        output = int(random.geometric(1 / 340))
        ids = open_ids[at]
        full = lengths[at] // BLOCK_TOKENS
        blocks = -(-prompt // BLOCK_TOKENS)
        ids = ids[:full] + list(range(next_id, next_id + blocks - full))
        next_id += blocks - full
        open_ids[at], lengths[at] = ids, prompt
        yield TraceRecord(now_s, prompt, output, tuple(ids))
        if prompt > 40 * turn_tokens:
            del open_ids[at], lengths[at]
