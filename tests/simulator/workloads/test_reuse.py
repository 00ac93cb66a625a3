"""Hit rates of caches: against caches simulated the plain way, and against published traces."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workloads import (
    TraceRecord,
    belady_hits,
    block_accesses,
    lru_hits,
    next_uses,
    profile_trace,
    read_mooncake,
    unlimited_reuse,
)

REAL_TRACES = Path(__file__).parents[4] / "shared" / "traces"
ACCESSES = st.lists(st.integers(0, 6), max_size=14)


def most_hits(accesses: tuple[int, ...], capacity: int) -> int:
    """The best of all decisions what to keep, by trying all of them."""

    @cache
    def best(index: int, stored: frozenset[int]) -> int:
        if index == len(accesses):
            return 0
        block = accesses[index]
        offered = stored | {block}
        choices = [offered] if len(offered) <= capacity else [offered - {out} for out in offered]
        return (block in stored) + max(best(index + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(ACCESSES, st.integers(1, 4))
def test_belady_is_the_best_that_can_be_done(accesses: list[int], capacity: int) -> None:
    assert belady_hits(accesses, capacity, next_uses(accesses)) == most_hits(tuple(accesses), capacity)


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_lru_hits_blocks_used_since_few_others(accesses: list[int], capacity: int) -> None:
    """Stack distance: a hit, when fewer than ``capacity`` other blocks were used since."""
    expected = 0
    for index, block in enumerate(accesses):
        before = accesses[:index]
        if block in before:
            last = index - 1 - before[::-1].index(block)
            expected += len(set(accesses[last + 1 : index])) < capacity
    assert lru_hits(accesses, capacity) == expected


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 40))
def test_lru_belady_and_unlimited_are_in_order(accesses: list[int], capacity: int) -> None:
    unlimited = len(accesses) - len(set(accesses))
    best = belady_hits(accesses, capacity, next_uses(accesses))
    assert lru_hits(accesses, capacity) <= best <= unlimited
    if capacity >= len(set(accesses)):
        assert lru_hits(accesses, capacity) == best == unlimited


def test_unlimited_reuse_counts_prefixes() -> None:
    records = [
        TraceRecord(0.0, 1300, 1, (0, 1, 2)),
        TraceRecord(1.0, 1100, 1, (0, 1, 3)),
        TraceRecord(2.0, 700, 1, (7, 1)),  # its second block is known, its prefix is not
        TraceRecord(3.0, 600, 1, (0, 1)),
    ]
    found = unlimited_reuse(records)
    assert (found.block_accesses, found.unique_blocks, found.blocks_used_once) == (10, 5, 3)
    assert (found.block_hits, found.requests_with_hits) == (4, 2)
    assert found.token_hits == 1024 + 600
    assert found.token_hit_rate == pytest.approx(1624 / 3700)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_without_blocks_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity_blocks"):
        lru_hits([1], capacity)
    with pytest.raises(ValueError, match="capacity_blocks"):
        belady_hits([1], capacity, [0])


CAPACITIES = (1_000, 5_860, 10_000, 30_000, 50_000, 100_000)
# Block hit rates of the traces published with Mooncake (FAST'25), as measured with other programs.
PUBLISHED = {
    "conversation": (
        (0.3664, 0.3736),
        (0.045, 0.136, 0.211, 0.326, 0.355, 0.364),
        (0.191, 0.353, 0.366, 0.366, 0.366, 0.366),
    ),
    "synthetic": (
        (0.6396, 0.6512),
        (0.083, 0.309, 0.424, 0.624, 0.640, 0.640),
        (0.277, 0.550, 0.618, 0.640, 0.640, 0.640),
    ),
}


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces(name: str) -> None:
    unlimited, lru, best = PUBLISHED[name]
    records = list(read_mooncake(REAL_TRACES / f"{name}_trace.jsonl"))
    profile = profile_trace(records, CAPACITIES)
    found = profile.unlimited
    assert (found.block_hit_rate, found.token_hit_rate) == pytest.approx(unlimited, abs=5e-5)
    for row in profile.by_capacity:
        place = CAPACITIES.index(row.capacity_blocks)
        assert row.lru_hit_rate == pytest.approx(lru[place], abs=6e-4)
        assert row.belady_hit_rate == pytest.approx(best[place], abs=6e-4)
    assert len(profile.by_capacity) >= 5
    assert len(block_accesses(records)) == found.block_accesses
