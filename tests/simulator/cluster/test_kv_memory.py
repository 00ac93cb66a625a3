"""The memory of a simulated engine: what it tells is what can be found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster.kv_memory import Hashes, KvMemory

BLOCK = 16


class Mirror:
    """What a listener knows to be cached."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def stored(self, hashes: Hashes, parent: int) -> None:
        new = set(hashes.tolist())
        assert not new & self.held, "told twice"
        assert parent == 0 or parent in self.held, "told without what is before it"
        self.held |= new

    def removed(self, hashes: list[int]) -> None:
        assert self.held >= set(hashes), "gone before it was there"
        self.held -= set(hashes)


def chain(number: int, blocks: int) -> Hashes:
    """Chains share their beginning with the chain of half their number."""
    hashes = np.arange(1, blocks + 1, dtype=np.uint64)
    own = min(blocks, 2 + number % 3)
    hashes[own:] += np.uint64(1_000 * number)
    return hashes


def test_ends_of_chains_are_evicted_first() -> None:
    mirror = Mirror()
    memory = KvMemory(4 * BLOCK, BLOCK, mirror)
    hashes = np.arange(1, 5, dtype=np.uint64)
    assert memory.take(hashes.tolist(), 0, 4 * BLOCK)
    memory.commit(hashes.tolist(), hashes, 0, 4)
    memory.release(hashes.tolist(), 4, 0)
    assert memory.take([], 0, BLOCK + 1)
    assert mirror.held == {1, 2}


def test_a_memory_holds_a_block() -> None:
    with pytest.raises(ValueError, match="does not hold a block"):
        KvMemory(BLOCK - 1, BLOCK, Mirror())


STEP = st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 12), st.integers(0, 40))


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(1, 30))
def test_listeners_know_what_is_found(steps: list[tuple[bool, int, int, int]], capacity: int) -> None:
    mirror = Mirror()
    memory = KvMemory(capacity * BLOCK, BLOCK, mirror)
    open_: list[tuple[list[int], int, int]] = []
    for begin, number, blocks, answer in steps:
        if begin:
            hashes = chain(number, blocks)
            keys = hashes.tolist()
            matched = memory.matched_blocks(keys, blocks - 1)
            expected = next((i for i, key in enumerate(keys[:-1]) if key not in mirror.held), blocks - 1)
            assert matched == expected
            used, held = memory.used_tokens, set(mirror.held)
            if not memory.take(keys, matched, blocks * BLOCK + answer):
                assert (memory.used_tokens, mirror.held) == (used, held)
                continue
            memory.commit(keys, hashes, matched, blocks)
            open_.append((keys, blocks, answer))
        elif open_:
            keys, committed, loose = open_.pop(number % len(open_))
            memory.release(keys, committed, loose)
        memory.check_invariants()
        assert len(mirror.held) == memory.cached_blocks
        assert mirror.held >= {key for keys, _, _ in open_ for key in keys}
    for keys, committed, loose in open_:
        memory.release(keys, committed, loose)
    assert memory.used_tokens == 0
