"""Continuous batching: what is scheduled when, and that no block or token is lost."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import (
    PROFILES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Engine,
    EngineLimits,
    KvCache,
    RemoteKv,
    Submission,
)
from simulator.engine import StepOutput
from simulator.sequence import Sequence, State

PERFORMANCE = PROFILES["llama-3.1-8b-h100"]
SIZE = 4


def engine_of(blocks: int = 64, **limits: float) -> Engine:
    return Engine(PERFORMANCE, KvCache(blocks, SIZE), EngineLimits(**limits))  # type: ignore[arg-type]


def step(engine: Engine, now_s: float = 0.0) -> StepOutput:
    assert engine.schedule(now_s) is not None
    return engine.finish_step(now_s)


def run(engine: Engine, steps: int = 1000) -> list[Sequence]:
    """Step until nothing is left; every token produced, in order."""
    produced = []
    for _ in range(steps):
        if engine.schedule(0.0) is None:
            return produced
        produced += engine.finish_step(0.0).produced
    raise AssertionError("the engine does not come to an end")


def test_a_request_produces_exactly_its_output() -> None:
    engine = engine_of()
    sequence = engine.submit(Submission("a", range(10), [7, 8, 9]))
    assert [each.request_id for each in run(engine)] == ["a"] * 3
    assert sequence.finished
    assert sequence.tokens == [*range(10), 7, 8, 9]
    assert engine.cache.used_blocks == 0


def test_prefill_and_decode_take_as_long_as_the_model_says() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(10), [7, 8]))
    assert engine.schedule(0.0) == pytest.approx(PERFORMANCE.step_s(0, 0, PERFORMANCE.prefill_s(10)))
    engine.finish_step(0.0)
    assert engine.schedule(0.0) == pytest.approx(PERFORMANCE.step_s(1, 11))


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(12), [7]))
    run(engine)
    again = engine.submit(Submission("b", range(12), [7]))
    duration_s = engine.schedule(0.0)
    # All 12 tokens are cached, and still the last block is computed.
    assert again.cached_tokens == 8
    assert duration_s == pytest.approx(PERFORMANCE.step_s(0, 0, PERFORMANCE.prefill_s(4, 8)))
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (24, 8)


def test_an_aligned_cached_prompt_stores_a_second_copy() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(8), [7]))
    first = step(engine).events
    engine.submit(Submission("b", range(8), [7]))
    second = step(engine).events
    assert isinstance(first[0], BlockStored) and isinstance(second[0], BlockStored)
    assert second[0].digests == first[0].digests[1:]
    assert sorted(engine.cache.residency().values()) == [1, 2]


def test_a_salt_keeps_tenants_apart() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(12), [7], salt="one"))
    run(engine)
    other = engine.submit(Submission("b", range(12), [7], salt="two"))
    run(engine)
    assert other.cached_tokens == 0


def test_blocks_completed_by_decoding_are_stored() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(6), [20, 21, 22, 23]))
    run(engine)
    follow_up = engine.submit(Submission("b", [*range(6), 20, 21, 22, 23], [9]))
    run(engine)
    assert follow_up.cached_tokens == 8


def test_long_prompts_are_prefilled_in_chunks() -> None:
    engine = engine_of(step_tokens=8)
    sequence = engine.submit(Submission("a", range(20), [7]))
    assert step(engine).produced == []
    assert step(engine).produced == []
    assert step(engine).produced == [sequence]


def test_decodes_share_the_budget_with_a_prefill() -> None:
    engine = engine_of(step_tokens=8)
    engine.submit(Submission("a", range(4), [7] * 9))
    step(engine)
    waiting = engine.submit(Submission("b", range(50, 64), [7]))
    step(engine)
    assert waiting.computed == 7  # the decode took one of eight


def test_no_more_sequences_than_allowed() -> None:
    engine = engine_of(sequences=2)
    for name in "abc":
        engine.submit(Submission(name, range(4), [7, 7]))
    step(engine)
    assert (engine.running, engine.waiting) == (2, 1)


def test_the_youngest_is_preempted_and_still_finishes() -> None:
    engine = engine_of(blocks=6)
    older = engine.submit(Submission("a", range(8), range(100, 112)))
    younger = engine.submit(Submission("b", range(50, 58), range(200, 212)))
    run(engine)
    assert engine.counters.preemptions > 0
    assert older.tokens == [*range(8), *range(100, 112)]
    assert younger.tokens == [*range(50, 58), *range(200, 212)]
    assert younger.cached_tokens == 0  # as first admitted, whatever was reused after the preemption
    assert engine.counters.generated == 24
    assert engine.cache.used_blocks == 0


def test_an_abort_frees_blocks_even_within_a_step() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(8), [7, 7]))
    engine.schedule(0.0)
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.finish_step(0.0).produced == []
    assert engine.cache.used_blocks == 0
    assert engine.schedule(0.0) is None


def test_a_lease_holds_blocks_until_released_or_expired() -> None:
    engine = engine_of(lease_s=30.0)
    for name in "ab":
        engine.submit(Submission(name, range(10), [7], lease_kv=True))
    step(engine, now_s=100.0)
    lease = engine.lease("a")
    assert lease is not None and lease.tokens == 10 and len(lease.blocks) == 3
    assert not engine.cache.reset()
    assert engine.release_lease("a") and not engine.release_lease("a")
    assert engine.cache.used_blocks == 3
    assert engine.next_expiry_s == 130.0
    assert engine.schedule(129.9) is None and engine.lease("b")
    assert engine.schedule(130.0) is None and not engine.lease("b")
    assert engine.cache.used_blocks == 0
    assert engine.counters.expired_leases == 1


def test_a_pulled_cache_leaves_one_token_to_compute() -> None:
    engine = engine_of()
    sequence = engine.submit(Submission("a", range(10), [7, 8], remote=RemoteKv(10, cached_tokens=6)))
    assert engine.schedule(0.0) is None
    assert engine.take_pulls() == [sequence] and engine.take_pulls() == []
    assert sequence.pull_tokens == 10 and sequence.state is State.PULLING
    assert engine.cache.used_blocks == 3
    engine.pull_finished("a")
    assert engine.schedule(0.0) == pytest.approx(PERFORMANCE.step_s(1, 10))
    output = engine.finish_step(0.0)
    assert output.produced == [sequence]
    assert [len(event.digests) for event in output.events if isinstance(event, BlockStored)] == [2]
    assert sequence.cached_tokens == 6
    run(engine)
    assert engine.cache.used_blocks == 0


def test_only_missing_tokens_are_pulled() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(8), [7]))
    run(engine)
    sequence = engine.submit(Submission("b", range(10), [7], remote=RemoteKv(10)))
    engine.schedule(0.0)
    assert sequence.pull_tokens == 2
    assert sequence.cached_tokens == 8


def test_a_failed_pull_frees_its_blocks() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(10), [7], remote=RemoteKv(10)))
    engine.schedule(0.0)
    assert engine.abort("a")
    engine.pull_finished("a")  # too late, no effect
    assert engine.cache.used_blocks == 0
    assert engine.cache.drain_events() == []


def test_hits_are_reported_again_on_request() -> None:
    engine = engine_of()
    engine.submit(Submission("a", range(9), [7]))
    run(engine)
    engine.submit(Submission("b", range(9), [7], report_hits=True))
    events = step(engine).events
    assert [len(event.digests) for event in events if isinstance(event, BlockStored)] == [2]


def test_what_can_never_run_is_refused() -> None:
    engine = engine_of(blocks=4)
    with pytest.raises(ValueError, match="does not fit"):
        engine.submit(Submission("a", range(14), [7] * 3))
    with pytest.raises(ValueError, match="needs a prompt"):
        engine.submit(Submission("a", [], [7]))
    engine.submit(Submission("a", [1], [7]))
    with pytest.raises(ValueError, match="in use"):
        engine.submit(Submission("a", [1], [7]))


REQUESTS = st.fixed_dictionaries(
    {
        "prefix": st.integers(0, 2),
        "prompt_tokens": st.integers(1, 40),
        "output_tokens": st.integers(1, 20),
        "kind": st.sampled_from(["plain", "plain", "lease", "remote"]),
        "fate": st.sampled_from(["finish", "finish", "abort"]),
        "gap_steps": st.integers(0, 3),
    }
)


@settings(max_examples=120, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=12), st.integers(16, 40), st.integers(4, 32))
def test_no_token_and_no_block_is_lost(
    requests: list[dict[str, int | str]], blocks: int, step_tokens: int
) -> None:
    engine = engine_of(blocks=blocks, step_tokens=step_tokens, sequences=4, lease_s=1.0)
    believed: Counter[bytes] = Counter()
    produced: Counter[str] = Counter()
    pulling: list[str] = []
    submitted: dict[str, Sequence] = {}
    now_s = 0.0

    def advance() -> bool:
        nonlocal now_s
        duration_s = engine.schedule(now_s)
        pulling.extend(sequence.request_id for sequence in engine.take_pulls())
        now_s += duration_s or 0.3
        if duration_s is not None:
            output = engine.finish_step(now_s)
            produced.update(sequence.request_id for sequence in output.produced)
            for event in output.events:
                match event:
                    case BlockStored(digests):
                        believed.update(digests)
                    case BlockRemoved(digests):
                        believed.subtract(digests)
                    case AllBlocksCleared():
                        believed.clear()
            assert dict(+believed) == engine.cache.residency() and not -believed
        if pulling:
            engine.pull_finished(pulling.pop(0))
        engine.check_invariants()
        return duration_s is not None or engine.waiting > 0

    for index, request in enumerate(requests):
        prompt = [int(request["prefix"])] * int(request["prompt_tokens"])
        name = str(index)
        submitted[name] = engine.submit(
            Submission(
                name,
                prompt,
                [index] * int(request["output_tokens"]),
                lease_kv=request["kind"] == "lease",
                remote=RemoteKv(len(prompt)) if request["kind"] == "remote" else None,
            )
        )
        for _ in range(int(request["gap_steps"])):
            advance()
        if request["fate"] == "abort":
            engine.abort(name)
    for _ in range(3000):
        if not advance():
            break
    assert (engine.running, engine.waiting) == (0, 0)
    engine.schedule(now_s + 10.0)  # the last leases expire
    assert engine.cache.used_blocks == 0
    for name, sequence in submitted.items():
        if sequence.finished:
            assert produced[name] == len(sequence.submission.output) == sequence.produced
            assert sequence.tokens == [*sequence.submission.prompt, *sequence.submission.output]
    assert engine.counters.generated == produced.total()
