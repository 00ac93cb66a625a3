"""One simulated engine: exact times of simple cases, and the closed form against single steps."""

from __future__ import annotations

import heapq
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.cluster.engine import Leg, SimulatedEngine, Work
from simulator.cluster.kv_memory import Hashes, KvMemory

from conductor.catalogue import LLAMA_8B_H100

BLOCK = 512


class Silent:
    def stored(self, hashes: Hashes, parent: int) -> None:
        pass

    def removed(self, hashes: list[int]) -> None:
        pass


def engine(
    *, capacity: int = 412_160, chunk: int = 8_192, sequences: int = 256, step_by_step: bool = False
) -> SimulatedEngine:
    return SimulatedEngine(
        replace(LLAMA_8B_H100, chunk_tokens=chunk),
        KvMemory(capacity, BLOCK, Silent()),
        sequences=sequences,
        step_by_step=step_by_step,
    )


def work(number: int, prompt: int, output: int, *, leg: Leg = Leg.WHOLE, chain: int | None = None) -> Work:
    first = (number if chain is None else chain) * 10_000 + 1
    hashes = np.arange(first, first + prompt // BLOCK, dtype=np.uint64)
    return Work(number, leg, prompt, output, hashes, hashes.tolist())


def drive(simulated: SimulatedEngine, arrivals: list[tuple[float, Work]]) -> dict[int, tuple[float, ...]]:
    """Submit at those times; per request (begin, first token, end, itl, tbt, cached). Fetches take 0.1 s."""
    events = [(at_s, number, each) for number, (at_s, each) in enumerate(arrivals)]
    heapq.heapify(events)
    received: set[int] = set()
    seen: dict[int, tuple[float, ...]] = {}
    while events or simulated.end_s < inf:
        now_s = min(events[0][0] if events else inf, simulated.end_s)
        if simulated.end_s == now_s:
            progress = simulated.finish()
            for each in progress.prefilled:
                simulated.handed_off(each)
                seen[each.number] = (each.began_s, now_s, now_s, 0.0, 0.0, each.cached_tokens)
            for each in progress.finished:
                assert each.first_token_s <= now_s
                times = (each.first_token_s, now_s, each.itl_s, each.tbt_s, each.cached_tokens)
                seen[each.number] = (min(each.began_s, each.first_token_s), *times)
        while events and events[0][0] <= now_s:
            each = heapq.heappop(events)[2]
            if each.number in received:
                simulated.received(each)
            else:
                simulated.submit(each)
        simulated.begin(now_s)
        for each in simulated.take_fetches():
            received.add(each.number)
            heapq.heappush(events, (now_s + 0.1, 1_000 + each.number, each))
        simulated.memory.check_invariants()
    assert simulated.running == simulated.waiting == 0
    assert simulated.memory.used_tokens == 0
    return seen


@pytest.mark.parametrize("prompt", [1, 100, 8_192, 16_384, 60_000])
def test_a_prompt_alone_takes_what_the_instance_class_says(prompt: int) -> None:
    seen = drive(engine(), [(1.0, work(0, prompt, 1))])
    expected = LLAMA_8B_H100.prefill_s(prompt, np.zeros(1, np.int64))[0]
    assert seen[0][1] - 1.0 == pytest.approx(expected)


def test_a_step_reads_the_weights_however_short_its_chunk() -> None:
    seen = drive(engine(), [(0.0, work(0, 8_193, 1))])
    without = LLAMA_8B_H100.prefill_s(8_192, np.zeros(1, np.int64))[0]
    assert seen[0][1] == pytest.approx(without + LLAMA_8B_H100.decode_base_s)


def test_a_cached_prefix_is_not_computed_again() -> None:
    seen = drive(engine(), [(0.0, work(0, 5_120, 1, chain=7)), (9.0, work(1, 6_000, 1, chain=7))])
    assert seen[1][5] == 5_120
    expected = LLAMA_8B_H100.prefill_s(6_000, np.array([5_120]))[0]
    assert seen[1][1] - 9.0 == pytest.approx(expected)


def test_the_block_of_the_last_token_is_computed_again() -> None:
    seen = drive(engine(), [(0.0, work(0, 5_120, 1, chain=7)), (9.0, work(1, 5_120, 1, chain=7))])
    assert seen[1][5] == 5_120 - BLOCK


def test_decodes_alone_take_what_the_instance_class_says() -> None:
    prompt, output = 1_000, 50
    seen = drive(engine(), [(0.0, work(0, prompt, output))])
    contexts = np.arange(prompt + 1, prompt + output)
    gaps_s = LLAMA_8B_H100.decode_step_s(np.ones(output - 1, np.int64), contexts)
    _, first_s, end_s, itl_s, tbt_s, _ = seen[0]
    assert end_s - first_s == pytest.approx(gaps_s.sum())
    assert itl_s == pytest.approx(gaps_s.mean())
    assert tbt_s == pytest.approx(np.sort(gaps_s)[-5:].mean())


def test_a_prompt_chunk_is_a_gap_to_the_others() -> None:
    seen = drive(engine(), [(0.0, work(0, 1_000, 11)), (0.05, work(1, 8_000, 1))])
    tbt_s = seen[0][4]  # the longest of ten gaps
    assert tbt_s > LLAMA_8B_H100.prefill_s(8_000, np.zeros(1, np.int64))[0]


def test_what_does_not_fit_waits_for_others_to_end() -> None:
    seen = drive(engine(capacity=8_192), [(0.0, work(0, 5_000, 100)), (0.0, work(1, 5_000, 100))])
    assert seen[1][0] == seen[0][2]


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="never fit"):
        engine(capacity=8_192).submit(work(0, 8_000, 500))


def test_a_decode_leg_says_its_first_token_after_one_step() -> None:
    seen = drive(engine(), [(0.0, work(0, 4_000, 3, leg=Leg.DECODE))])
    step_s = LLAMA_8B_H100.decode_step_s(np.array([1]), np.array([4_000]))[0]
    assert seen[0][1] == pytest.approx(0.1 + step_s)


LEGS = st.sampled_from([Leg.WHOLE, Leg.WHOLE, Leg.DECODE, Leg.PREFILL])
ARRIVAL = st.tuples(st.floats(0.0, 3.0), st.integers(1, 20_000), st.integers(1, 300), LEGS, st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ARRIVAL, min_size=1, max_size=25),
    st.sampled_from([24_576, 65_536, 412_160]),
    st.sampled_from([512, 8_192]),
    st.sampled_from([3, 256]),
)
def test_closed_form_equals_single_steps(
    arrivals: list[tuple[float, int, int, Leg, int]], capacity: int, chunk: int, sequences: int
) -> None:
    def seen(*, step_by_step: bool) -> dict[int, tuple[float, ...]]:
        works = [
            (at_s, work(number, prompt, output, leg=leg, chain=chain))
            for number, (at_s, prompt, output, leg, chain) in enumerate(arrivals)
        ]
        return drive(
            engine(capacity=capacity, chunk=chunk, sequences=sequences, step_by_step=step_by_step), works
        )

    fast, slow = seen(step_by_step=False), seen(step_by_step=True)
    assert fast.keys() == slow.keys() == set(range(len(arrivals)))
    for number in fast:
        assert fast[number] == pytest.approx(slow[number], rel=1e-9, abs=1e-9)
