"""Engines: exact times of simple cases, and a plain model of them as the oracle of random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
import pytest
from engine_drive import Drive, Ended, Sent
from engine_oracle import Engine, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import DEFAULT_LINKS, Distance
from conductor.placement import Role
from simulator.cluster import ClusterSpec, InstanceSpec, Request

BLOCK = 16
DECODE_STEP_S = LLAMA_8B_H100.decode_step_s


def request(number: int, arrival_s: float, prompt: int, output: int, chain: int | None = None) -> Request:
    """Requests of one chain begin alike, as far as the shorter one goes."""
    first = ((number if chain is None else chain) + 1) * 10_000
    return Request(
        number, arrival_s, prompt, output, np.arange(first, first + prompt // BLOCK, dtype=np.uint64)
    )


def mixed(*, capacity: int = 400_000, chunk: int = 8_192, sequences: int = 256) -> ClusterSpec:
    speeds = replace(LLAMA_8B_H100, chunk_tokens=chunk)
    return ClusterSpec((InstanceSpec("m0", Role.MIXED, speeds, capacity, sequences=sequences),))


def pair(
    *, first: int = 400_000, last: int = 400_000, chunk: int = 8_192, sequences: int = 256
) -> ClusterSpec:
    speeds = replace(LLAMA_8B_H100, chunk_tokens=chunk)
    return ClusterSpec(
        (
            InstanceSpec("p0", Role.PREFILL, speeds, first, sequences=sequences),
            InstanceSpec("d0", Role.DECODE, speeds, last, sequences=sequences),
        )
    )


def ended(
    cluster: ClusterSpec, requests: Sequence[Request], *, step_by_step: bool = False
) -> dict[int, Ended]:
    decode_engine = len(cluster.instances) - 1 or -1
    sent = [Sent(each, decode_engine=decode_engine) for each in requests]
    drive = Drive(cluster, sent, block_tokens=BLOCK, step_by_step=step_by_step)
    drive.run()
    drive.engines.check_invariants()
    assert drive.engines.idle
    gauges = drive.engines.gauges(drive.now_s)
    assert not gauges.running.any() and not gauges.waiting.any() and not gauges.kv_usage.any()
    return drive.ended


@pytest.mark.parametrize("prompt", [1, 100, 8_192, 16_384, 60_000])
def test_a_prompt_alone_takes_what_the_instance_class_says(prompt: int) -> None:
    seen = ended(mixed(), [request(0, 1.0, prompt, 1)])[0]
    expected_s = LLAMA_8B_H100.prefill_s(prompt, np.zeros(1, np.int64))[0]
    assert seen.first_s - 1.0 == pytest.approx(expected_s)
    assert (seen.began_s, seen.end_s, seen.itl_s, seen.tbt_s) == (1.0, seen.first_s, 0.0, 0.0)


def test_a_step_reads_the_weights_however_short_its_chunk() -> None:
    seen = ended(mixed(), [request(0, 0.0, 8_193, 1)])[0]
    without_s = LLAMA_8B_H100.prefill_s(8_192, np.zeros(1, np.int64))[0]
    assert seen.first_s == pytest.approx(without_s + LLAMA_8B_H100.decode_base_s)


def test_a_cached_prefix_is_not_computed_again() -> None:
    seen = ended(mixed(), [request(0, 0.0, 5_120, 1, 7), request(1, 9.0, 6_000, 1, 7)])[1]
    assert seen.cached_tokens == 5_120
    assert seen.first_s - 9.0 == pytest.approx(LLAMA_8B_H100.prefill_s(6_000, np.array([5_120]))[0])


def test_the_block_of_the_last_token_is_computed_again() -> None:
    seen = ended(mixed(), [request(0, 0.0, 5_120, 1, 7), request(1, 9.0, 5_120, 1, 7)])[1]
    assert seen.cached_tokens == 5_120 - BLOCK


def test_decodes_alone_take_what_the_instance_class_says() -> None:
    prompt, output = 1_000, 50
    seen = ended(mixed(), [request(0, 0.0, prompt, output)])[0]
    gaps_s = DECODE_STEP_S(np.ones(output - 1, np.int64), np.arange(prompt + 1, prompt + output))
    assert seen.end_s - seen.first_s == pytest.approx(gaps_s.sum())
    assert seen.itl_s == pytest.approx(gaps_s.mean())
    assert seen.tbt_s == pytest.approx(np.sort(gaps_s)[-5:].mean())


def test_a_prompt_chunk_is_a_gap_to_the_others() -> None:
    seen = ended(mixed(), [request(0, 0.0, 1_000, 11), request(1, 0.05, 8_000, 1)])
    assert seen[0].tbt_s > LLAMA_8B_H100.prefill_s(8_000, np.zeros(1, np.int64))[0]


def test_what_does_not_fit_waits_for_others_to_end() -> None:
    seen = ended(mixed(capacity=8_192), [request(0, 0.0, 5_000, 100), request(1, 0.0, 5_000, 100)])
    assert seen[1].began_s == pytest.approx(seen[0].end_s)


def test_no_more_requests_than_a_batch_holds() -> None:
    seen = ended(mixed(sequences=2), [request(number, 0.0, 100, 10 + number) for number in range(3)])
    assert seen[1].began_s == 0.0 and seen[2].began_s == seen[0].end_s


def test_a_preempted_request_is_computed_again_and_that_is_a_gap() -> None:
    even = replace(  # 1 ms for a token of a prompt, and for a step without
        LLAMA_8B_H100,
        prefill_s_per_token=1e-3,
        prefill_s_per_token_squared=0.0,
        prefill_base_s=0.0,
        prefill_s_per_cached_token=0.0,
        decode_base_s=1e-3,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=0.0,
    )
    # With both prompts of 160 tokens, and the first token of each, 78 are left: 39 steps.
    cluster = ClusterSpec((InstanceSpec("m0", Role.MIXED, even, 400),))
    seen = ended(cluster, [request(number, 0.0, 160, 60) for number in range(2)])
    assert (seen[0].preemptions, seen[1].preemptions) == (0, 1)
    # The second has said 40 tokens, and waits until the first has said the 20 that it lacks. Of its 200 tokens
    # 144 are cached still: all blocks but that of the last token of its prompt.
    paused_s = 0.32 + 0.039
    assert seen[0].end_s == pytest.approx(paused_s + 0.02)
    assert seen[1].end_s == pytest.approx(paused_s + 0.02 + 0.056 + 0.019)
    assert seen[1].itl_s == pytest.approx((seen[1].end_s - 0.32) / 59)
    assert seen[1].tbt_s == pytest.approx((0.02 + 0.056 + 5 * 0.001) / 6)  # the longest 6 of 59 gaps
    assert seen[1].cached_tokens == 0


def test_a_decode_engine_says_the_first_token_after_one_step() -> None:
    seen = ended(pair(), [request(0, 0.0, 4_000, 3)])[0]
    prefill_s = LLAMA_8B_H100.prefill_s(4_000, np.zeros(1, np.int64))[0]
    move_s = LLAMA_8B_H100.hand_off_s(np.array(4_000)) + DEFAULT_LINKS[Distance.RACK].latency_s
    assert seen.prefilled_s == pytest.approx(prefill_s)
    assert seen.received_s == pytest.approx(prefill_s + move_s)
    assert seen.first_s == pytest.approx(prefill_s + move_s + DECODE_STEP_S(np.array(1), np.array(4_000)))


def test_gauges_within_a_run() -> None:
    drive = Drive(mixed(capacity=16_000), [Sent(request(0, 0.0, 1_000, 500)), Sent(request(1, 0.0, 600, 1))])
    drive.run(until_s=1e-6)
    gauges = drive.engines.gauges(drive.now_s)
    assert gauges.running.tolist() == [2] and gauges.waiting.tolist() == [0]
    assert gauges.kv_usage[0] == pytest.approx((1_001 + 601) / 16_000)
    drive.run(until_s=1.0)
    gauges = drive.engines.gauges(drive.now_s)
    first_s = LLAMA_8B_H100.prefill_s(1_000, np.zeros(1, np.int64)) + LLAMA_8B_H100.prefill_s(
        600, np.zeros(1, np.int64)
    )
    ends_s = first_s + np.cumsum(DECODE_STEP_S(np.ones(499, np.int64), np.arange(1_001, 1_500)))
    said = 1 + int((ends_s <= 1.0).sum())
    assert 1 < said < 500
    assert (gauges.running[0], gauges.kv_usage[0]) == (1, pytest.approx((1_000 + said) / 16_000))


def test_many_requests_and_long_logs_lose_nothing() -> None:
    # More than 256 rows of work, and more than 64 runs with nobody done: the first answer outlasts all others.
    short = [request(number, 0.02 * number, 40, 2 + number % 3) for number in range(1, 600)]
    queued = [request(number, 1.0, 40, 2) for number in range(600, 1_000)]
    requests = sorted([request(0, 0.0, 64, 4_000), *short, *queued], key=lambda each: each.arrival_s)
    fast, slow = (ended(mixed(sequences=8), requests, step_by_step=each) for each in (False, True))
    assert fast.keys() == slow.keys() == set(range(1_000))
    for number, each in fast.items():
        assert times(each) == pytest.approx(times(slow[number]), rel=1e-9)


@pytest.mark.parametrize("prompts", [3, 15, 17, 60])
def test_the_longest_gaps_are_found_among_few_runs_and_among_many(prompts: int) -> None:
    """Each prompt that comes cuts a run of the long answer short, and is a run by itself."""
    short = [request(number, 0.03 * number, 40 * number, 1) for number in range(1, prompts + 1)]
    requests = [request(0, 0.0, 64, 600), *short]
    expected = simulate(requests, [Engine(LLAMA_8B_H100, 400_000, BLOCK, 256)], DEFAULT_LINKS[Distance.RACK])
    assert times(ended(mixed(), requests)[0]) == pytest.approx(astuple(expected[0]), rel=1e-9)


def times(seen: Ended) -> tuple[float, ...]:
    return (
        seen.began_s,
        seen.first_s,
        seen.end_s,
        seen.itl_s,
        seen.tbt_s,
        seen.cached_tokens,
        seen.preemptions,
    )


ASKED = st.tuples(
    st.floats(0.0, 0.5), st.integers(1, 300), st.integers(1, 60), st.integers(0, 4)
)  # at, prompt, output, chain
BATCHES = st.sampled_from([(64, 256), (512, 256), (512, 3), (33, 2), (8_192, 256)])  # chunk, sequences


def asked(drawn: list[tuple[float, int, int, int]]) -> list[Request]:
    return [
        request(number, at_s, prompt, output, chain)
        for number, (at_s, prompt, output, chain) in enumerate(sorted(drawn))
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(ASKED, min_size=1, max_size=14), st.sampled_from([368, 512, 1_000, 4_000]), BATCHES)
def test_an_engine_does_what_the_plain_model_does(
    drawn: list[tuple[float, int, int, int]], capacity: int, batch: tuple[int, int]
) -> None:
    chunk, sequences = batch
    requests = asked(drawn)
    speeds = replace(LLAMA_8B_H100, chunk_tokens=chunk)
    expected = simulate(requests, [Engine(speeds, capacity, BLOCK, sequences)], DEFAULT_LINKS[Distance.RACK])
    for step_by_step in (False, True):
        found = ended(
            mixed(capacity=capacity, chunk=chunk, sequences=sequences), requests, step_by_step=step_by_step
        )
        assert found.keys() == expected.keys()
        for number, seen in found.items():
            assert times(seen) == pytest.approx(astuple(expected[number]), rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(ASKED, min_size=1, max_size=14),
    st.sampled_from([368, 1_000, 4_000]),
    st.sampled_from([368, 512, 4_000]),
    BATCHES,
)
def test_a_pair_does_what_the_plain_model_does(
    drawn: list[tuple[float, int, int, int]], first: int, last: int, batch: tuple[int, int]
) -> None:
    chunk, sequences = batch
    requests = asked(drawn)
    speeds = replace(LLAMA_8B_H100, chunk_tokens=chunk)
    engines = [Engine(speeds, capacity, BLOCK, sequences) for capacity in (first, last)]
    expected = simulate(requests, engines, DEFAULT_LINKS[Distance.RACK])
    for step_by_step in (False, True):
        cluster = pair(first=first, last=last, chunk=chunk, sequences=sequences)
        found = ended(cluster, requests, step_by_step=step_by_step)
        assert found.keys() == expected.keys()
        for number, seen in found.items():
            assert times(seen) == pytest.approx(astuple(expected[number]), rel=1e-9, abs=1e-9)
