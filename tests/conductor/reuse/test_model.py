from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conductor.reuse import HORIZON_S, ReuseModel

BLOCK_TOKENS = 512


def prompt(first: int, blocks: int) -> NDArray[np.uint64]:
    return np.arange(first, first + blocks, dtype=np.uint64)


def conversations(
    model: ReuseModel,
    *,
    returning: float,
    blocks: int = 8,
    kind: int = 0,
    start_s: float = 0.0,
    count: int = 600,
    first_block: int = 1_000_000,
    seed: int = 0,
) -> float:
    """Conversations that begin every ten seconds and go on, with a chance, after about 100 s; when they ended."""
    source = np.random.default_rng(seed)
    turns: list[tuple[float, int, int]] = []
    for number in range(count):
        at_s, length = start_s + 10.0 * number, blocks
        turns.append((at_s, number, length))
        while source.random() < returning:
            at_s += float(source.lognormal(math.log(100.0), 0.3))
            length += 4
            turns.append((at_s, number, length))
    end_s = start_s + 10.0 * count
    for at_s, number, length in sorted(turns):
        if at_s <= end_s:
            model.observe(prompt(first_block + 1_000 * number, length), at_s, kind)
    return end_s


def test_nothing_is_known_of_blocks_that_never_came() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    assert model.known_blocks == 0
    assert model.retention_values(prompt(1, 3), 0.0).tolist() == [0.0, 0.0, 0.0]
    assert model.reuse_probabilities(prompt(1, 3), 100.0, 0.0).tolist() == [0.0, 0.0, 0.0]
    assert model.expected_return(prompt(1, 3), 0.0) is None


def test_turns_of_a_conversation_are_counted() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    first = model.observe(prompt(1, 5), 10.0)
    assert (first.turn, first.known_blocks, first.gap_s) == (1, 0, math.inf)
    second = model.observe(prompt(1, 9), 70.0)
    assert (second.turn, second.known_blocks, second.gap_s) == (2, 5, 60.0)
    third = model.observe(prompt(1, 12), 100.0)
    assert (third.turn, third.known_blocks, third.gap_s) == (3, 9, 30.0)


def test_what_many_prompts_begin_with_is_no_conversation() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    system = prompt(1, 3)
    for number in range(40):
        model.observe(np.concatenate([system, prompt(1_000 * (number + 1), 5)]), float(number))
    visit = model.observe(np.concatenate([system, prompt(500_000, 5)]), 40.0)
    assert (visit.turn, visit.known_blocks, visit.gap_s) == (1, 3, 1.0)


def test_learns_whether_and_when_conversations_return() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    now_s = conversations(model, returning=0.5)
    model.observe(prompt(1, 8), now_s)
    forecast = model.expected_return(prompt(1, 8), now_s, (0.1, 0.5, 0.9))
    assert forecast is not None
    assert forecast.probability == pytest.approx(0.5, abs=0.1)
    low_s, median_s, high_s = forecast.quantiles_s
    assert low_s == pytest.approx(68.0, rel=0.25)  # exp(ln 100 - 1.28 * 0.3)
    assert median_s == pytest.approx(100.0, rel=0.15)
    assert high_s == pytest.approx(147.0, rel=0.25)
    late = model.expected_return(prompt(1, 8), now_s + 400.0)
    assert late is not None
    assert late.probability < 0.15


def test_a_conversation_that_went_on_is_expected_by_its_new_prompt() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    model.observe(prompt(1, 8), 0.0)
    model.observe(prompt(1, 12), 50.0)
    assert model.expected_return(prompt(1, 8), 60.0) is None
    assert model.expected_return(prompt(1, 12), 60.0) is not None


def test_probabilities_follow_what_happened() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    now_s = conversations(model, returning=0.5)
    model.observe(prompt(1, 8), now_s)
    soon, later, much_later = (
        float(model.reuse_probabilities(prompt(1, 8), now_s + within_s, now_s)[0])
        for within_s in (20.0, 100.0, 600.0)
    )
    assert soon < 0.05
    assert later == pytest.approx(0.25, abs=0.08)
    assert much_later == pytest.approx(0.5, abs=0.1)


def test_what_is_never_asked_again_is_worth_less() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    conversations(model, returning=0.6, blocks=8)
    now_s = conversations(model, returning=0.0, blocks=100, start_s=6_000.0, first_block=50_000_000)
    model.observe(prompt(1, 8), now_s)
    model.observe(prompt(1_000, 100), now_s)
    assert (
        model.retention_values(prompt(1, 1), now_s)[0]
        > 5 * model.retention_values(prompt(1_000, 1), now_s)[0]
    )


def test_kinds_of_requests_are_told_apart() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    conversations(model, returning=0.7, kind=1)
    now_s = conversations(model, returning=0.0, kind=2, start_s=6_000.0, first_block=50_000_000)
    model.observe(prompt(1, 8), now_s, kind=1)
    model.observe(prompt(1_000, 8), now_s, kind=2)
    often, never = model.reuse_probabilities(
        np.array([1, 1_000], np.uint64), before_s=now_s + 1_000.0, now_s=now_s
    )
    assert often > 0.5
    assert never < 0.1


def test_what_was_learned_fades() -> None:
    model = ReuseModel(BLOCK_TOKENS, window=500)
    conversations(model, returning=0.7)
    now_s = conversations(model, returning=0.0, start_s=6_000.0, first_block=50_000_000)
    model.observe(prompt(1, 8), now_s)
    assert model.reuse_probabilities(prompt(1, 1), now_s + 1_000.0, now_s)[0] < 0.15


def test_beyond_the_horizon_nothing_is_expected() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    now_s = conversations(model, returning=0.5, count=50)
    model.observe(prompt(1, 8), now_s)
    assert model.retention_values(prompt(1, 8), now_s + HORIZON_S).tolist() == [0.0] * 8
    assert (
        model.reuse_probabilities(prompt(1, 8), now_s + 2 * HORIZON_S, now_s + HORIZON_S).tolist()
        == [0.0] * 8
    )


def test_a_time_that_goes_back_counts_as_the_latest() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    model.observe(prompt(1, 8), 100.0)
    assert model.observe(prompt(1, 12), 40.0).gap_s == 0.0
    assert model.observe(prompt(1, 16), 150.0).gap_s == 50.0
    early = model.retention_values(prompt(1, 4), 10.0)
    assert early.tolist() == model.retention_values(prompt(1, 4), 150.0).tolist()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"accesses": 127}, "accesses"),
        ({"window": 1}, "window"),
        ({"refresh_s": -1.0}, "refresh_s"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ReuseModel(**{"block_tokens": BLOCK_TOKENS, **arguments})  # type: ignore[arg-type]


def test_impossible_arguments_are_refused() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    with pytest.raises(ValueError, match="now_s"):
        model.observe(prompt(1, 2), math.nan)
    with pytest.raises(ValueError, match="kind"):
        model.observe(prompt(1, 2), 0.0, kind=-1)
    with pytest.raises(ValueError, match="quantile"):
        model.expected_return(prompt(1, 2), 0.0, (1.0,))


# A prompt: which of a few trees it is of, where it leaves that tree, and how long it is.
PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 40), st.floats(0.0, 500.0)), max_size=60
)


def branching(tree: int, leaves: int, number: int, blocks: int) -> NDArray[np.uint64]:
    shared = [1_000 * tree + depth for depth in range(min(leaves, blocks))]
    own = [100_000 * (number + 1) + depth for depth in range(len(shared), blocks)]
    return np.array(shared + own, np.uint64)


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_knows_the_prefixes_that_came_before(requests: list[tuple[int, int, int, float]]) -> None:
    model = ReuseModel(BLOCK_TOKENS)
    seen: set[int] = set()
    now_s = 0.0
    for number, (tree, leaves, blocks, after_s) in enumerate(requests):
        now_s += after_s
        each = branching(tree, leaves, number, blocks)
        known = 0
        while known < blocks and int(each[known]) in seen:
            known += 1
        assert model.observe(each, now_s).known_blocks == known
        seen.update(each.tolist())
        assert model.known_blocks == len(seen)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(1, 20), st.floats(0.0, 900.0))
def test_requests_observed_together_teach_the_same(
    requests: list[tuple[int, int, int, float]], together: int, back_s: float
) -> None:
    """The clock is set back now and then, too."""
    single, batch = ReuseModel(BLOCK_TOKENS, accesses=128), ReuseModel(BLOCK_TOKENS, accesses=128)
    prompts, times_s, now_s = [], [], 0.0
    for number, (tree, leaves, blocks, after_s) in enumerate(requests):
        now_s += after_s if number % 7 else -back_s
        prompts.append(branching(tree, leaves, number, blocks))
        times_s.append(now_s)
        single.observe(prompts[-1], now_s, number % 3)
    for start in range(0, len(prompts), together):
        some = prompts[start : start + together]
        stops = np.cumsum([len(each) for each in some])
        kinds = np.arange(start, start + len(some)) % 3
        batch.observe_all(np.concatenate(some), stops, np.array(times_s[start : start + len(some)]), kinds)
    for mine, other in zip(single.exported(), batch.exported(), strict=True):
        assert {name: np.asarray(each).tolist() for name, each in mine.items()} == {
            name: np.asarray(each).tolist() for name, each in other.items()
        }


def test_of_no_requests_nothing_is_learned_and_impossible_ones_are_refused() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    none = np.zeros(0, np.int64)
    model.observe_all(prompt(1, 0), none, np.zeros(0), none)
    assert model.known_blocks == 0
    one = np.array([2])
    with pytest.raises(ValueError, match="kinds"):
        model.observe_all(prompt(1, 2), one, np.zeros(1), np.array([1 << 31]))
    with pytest.raises(ValueError, match="times"):
        model.observe_all(prompt(1, 2), one, np.array([math.inf]), np.zeros(1, np.int64))
    assert model.known_blocks == 0


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_memory_is_bounded_and_answers_stay_in_range(requests: list[tuple[int, int, int, float]]) -> None:
    model, again = ReuseModel(BLOCK_TOKENS, accesses=128), ReuseModel(BLOCK_TOKENS, accesses=128)
    lately: list[int] = []
    now_s = 0.0
    for number, (tree, leaves, blocks, after_s) in enumerate(requests):
        now_s += after_s
        each = branching(tree, leaves, number, blocks)
        assert model.observe(each, now_s) == again.observe(each, now_s)
        lately = (lately + each.tolist())[-128:]
        assert model.known_blocks <= len(set(lately))
        values = model.retention_values(each, now_s)
        assert np.isfinite(values).all() and (values > 0.0).all(), "the newest prompt is known"
        assert (np.diff(values) <= 0.0).all(), "an end is of no use without its beginning"
        assert values.tolist() == again.retention_values(each, now_s).tolist()
        near = model.reuse_probabilities(each, now_s + 30.0, now_s)
        far = model.reuse_probabilities(each, now_s + 300.0, now_s)
        assert ((near >= 0.0) & (near <= far) & (far <= 1.0)).all()


def test_a_prompt_longer_than_the_memory_is_remembered_by_its_end() -> None:
    model = ReuseModel(BLOCK_TOKENS, accesses=128)
    model.observe(prompt(1, 500), 0.0)
    assert model.known_blocks == 128
    assert model.retention_values(prompt(300, 1), 0.0)[0] == 0.0
    assert model.retention_values(prompt(450, 1), 0.0)[0] > 0.0


def test_a_block_twice_in_a_prompt_counts_once() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    model.observe(np.array([1, 2, 1, 3], np.uint64), 0.0)
    assert model.known_blocks == 3


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(1, 20), st.sampled_from([0.5, 20.0, 400.0]), st.integers(0, 1)
        ),
        max_size=60,
    ),
    cut=st.integers(0, 60),
    later_s=st.sampled_from([0.0, -1e6, 300.0]),
)
def test_a_restored_model_says_and_learns_the_same(
    requests: list[tuple[int, int, float, int]], cut: int, later_s: float
) -> None:
    """Rings of 128 accesses are overrun on the way."""
    model, restored = ReuseModel(BLOCK_TOKENS, accesses=128), None
    now_s = 0.0
    for number, (user, blocks, pause_s, kind) in enumerate([*requests, (0, 3, 1.0, 0)]):
        if number == min(cut, len(requests)):
            facts, arrays = model.exported()
            restored = ReuseModel.restored(json.loads(json.dumps(facts)), arrays, later_s)
        now_s += pause_s
        visit = model.observe(prompt(1_000 * user, blocks), now_s, kind)
        if restored is None:
            continue
        then_s = now_s + later_s
        assert restored.observe(prompt(1_000 * user, blocks), then_s, kind) == visit
        assert restored.known_blocks == model.known_blocks
        asked = np.concatenate([prompt(1_000 * each, 20) for each in range(5)])
        mine = model.reuse_probabilities(asked, now_s + 60.0, now_s)
        assert restored.reuse_probabilities(asked, then_s + 60.0, then_s) == pytest.approx(mine, abs=1e-6)
    assert restored is not None
    asked, then_s = np.concatenate([prompt(1_000 * each, 20) for each in range(5)]), now_s + 10.0
    values = model.retention_values(asked, then_s)
    assert restored.retention_values(asked, then_s + later_s) == pytest.approx(values, abs=1e-6)


def test_what_is_no_export_is_refused() -> None:
    model = ReuseModel(BLOCK_TOKENS)
    model.observe(prompt(1, 5), 1.0)
    facts, arrays = model.exported()
    with pytest.raises(ValueError, match="laid out"):
        ReuseModel.restored({**facts, "layout": [1, 2, 3, 4]}, arrays, 0.0)
    with pytest.raises(LookupError):
        ReuseModel.restored(facts, {}, 0.0)
    with pytest.raises(ValueError, match="blocks instead of"):
        ReuseModel.restored(facts, {**arrays, "access_hash": np.zeros(5, np.uint64)}, 0.0)
    with pytest.raises(ValueError):
        ReuseModel.restored(facts, {**arrays, "access_hash": np.zeros(4, np.uint64)}, 0.0)
