"""Parts of traces, and traces scaled in time or cut into other blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workloads import (
    Selection,
    TraceRecord,
    at_rate,
    faster,
    in_blocks_of,
    prompt_tokens,
    select,
    trace_span_s,
    unlimited_reuse,
)

RECORDS = [TraceRecord(float(n), 100 * (n + 1), n, (n, n + 50)[: 1 + (n > 4)], "s", 2.0) for n in range(10)]


@pytest.mark.parametrize(
    ("selection", "inputs"),
    [
        (Selection(), [100 * (n + 1) for n in range(10)]),
        (Selection(limit=2), [100, 200]),
        (Selection(start_s=3.0, end_s=5.0), [400, 500]),
        (Selection(min_input_tokens=800, limit=2), [800, 900]),
        (Selection(max_input_tokens=200), [100, 200]),
        (Selection(min_output_tokens=4, max_output_tokens=5), [500, 600]),
    ],
)
def test_what_passes(selection: Selection, inputs: list[int]) -> None:
    assert [record.input_tokens for record in select(RECORDS, selection)] == inputs


def test_a_window_begins_at_its_start() -> None:
    [first, *_] = select(RECORDS, Selection(start_s=2.5))
    assert first.arrival_s == 0.5


def test_faster_divides_delays_too() -> None:
    last = list(faster(RECORDS, 4.0))[-1]
    assert (last.arrival_s, last.delay_s) == (9 / 4, 0.5)


@given(st.floats(0.01, 1000.0))
def test_a_rate_is_met_over_the_span(rate: float) -> None:
    scaled = at_rate(RECORDS, rate)
    assert len(scaled) / trace_span_s(scaled) == pytest.approx(rate)


def test_a_trace_without_times_gets_poisson_arrivals() -> None:
    still = [TraceRecord(0.0, 10, 1, (n,)) for n in range(4000)]
    moved = at_rate(still, 20.0, seed=3)
    assert moved == at_rate(still, 20.0, seed=3) != at_rate(still, 20.0, seed=4)
    assert [record.hash_ids for record in moved] == [record.hash_ids for record in still]
    assert 4000 / trace_span_s(moved) == pytest.approx(20.0, rel=0.06)
    assert moved[0].arrival_s == 0.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_factors_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        list(faster(RECORDS, wrong))
    with pytest.raises(ValueError, match="must be positive"):
        at_rate(RECORDS, wrong)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6))
def test_larger_blocks_share_exactly_what_whole_blocks_shared(prompts: list[list[int]]) -> None:
    small = [TraceRecord(0.0, 16 * len(ids), 1, tuple(ids), block_tokens=16) for ids in prompts]
    merged = list(in_blocks_of(small, 64))
    for one, one_merged in zip(small, merged, strict=True):
        assert len(one_merged.hash_ids) == -(-len(one.hash_ids) // 4)
        assert one_merged.input_tokens == one.input_tokens
        for other, other_merged in zip(small, merged, strict=True):
            for block in range(min(len(one_merged.hash_ids), len(other_merged.hash_ids))):
                equal = one.hash_ids[: 4 * block + 4] == other.hash_ids[: 4 * block + 4]
                assert (one_merged.hash_ids[block] == other_merged.hash_ids[block]) == equal
    assert unlimited_reuse(merged).token_hits <= sum(record.input_tokens for record in small)


def test_blocks_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="blocks of 512 tokens do not make blocks of 16"):
        list(in_blocks_of(RECORDS, 16))


def test_prompts_of_small_blocks() -> None:
    tokens = prompt_tokens(TraceRecord(0.0, 40, 1, (3, 4, 5), block_tokens=16))
    longer = prompt_tokens(TraceRecord(0.0, 48, 1, (3, 4, 6), block_tokens=16))
    assert len(tokens) == 40
    assert tokens[:32].tolist() == longer[:32].tolist()
    assert tokens[32:].tolist() != longer[32:40].tolist()
