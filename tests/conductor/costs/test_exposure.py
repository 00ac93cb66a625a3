"""How many of the requests aboard a prefill would make miss their TBT objective."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import ClusterTables, Exposure, Floats, Topology
from conductor.costs import tables as t

STEP_S = 0.01  # whatever is aboard
TABLES = ClusterTables(Topology().link_table())
TABLES.make_row(0)
TABLES.ranks[0, t.CLASS] = TABLES.class_id(
    replace(
        LLAMA_8B_H100,
        name="even",
        decode_base_s=STEP_S,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=0.0,
    )
)
OBJECTIVE_S, SHARE, TOKENS = 0.05, 0.1, 100
SPARE_S = SHARE * (OBJECTIVE_S - STEP_S)  # of prefill, earned by each token


def harm(exposure: Exposure, now_s: float = 0.0, *, queue_s: float = 0.0, share: float = SHARE) -> Floats:
    load = TABLES.loads[0]
    load[t.PENDING_PREFILLS] = load[t.HEAD_OBSERVED] = queue_s > 0.0
    load[t.HEAD_SINCE_S], load[t.HEAD_PREDICTED_S] = now_s, queue_s
    exposure.write(TABLES, 0, share, now_s)
    return load[t.HARM : t.REPORTED_RUNNING].copy()


def aboard(*began_s: float, tokens: int = TOKENS) -> Exposure:
    exposure = Exposure()
    for number, each in enumerate(began_s):
        exposure.placed(f"r{number}", 0.0, tokens, OBJECTIVE_S, long=False)
        exposure.began(f"r{number}", 0.0, each)
    return exposure


def test_nobody_aboard_is_nobody_harmed() -> None:
    assert harm(Exposure()).tolist() == [0.0] * len(t.HARM_AT_S)


def test_a_fresh_answer_survives_if_it_becomes_long_enough() -> None:
    expected = [1 - np.exp(-at_s / SPARE_S / TOKENS) for at_s in t.HARM_AT_S]
    assert harm(aboard(0.0)) == pytest.approx(expected)
    assert harm(aboard(0.0, 0.0)) == pytest.approx(2 * np.array(expected))


def test_a_longer_answer_bears_more() -> None:
    assert (harm(aboard(0.0, tokens=1000)) < harm(aboard(0.0))).all()


def test_an_answer_that_is_long_already_has_room() -> None:
    tokens = 500  # by now, which bear 2 s
    assert harm(aboard(0.0), now_s=tokens * STEP_S) == pytest.approx(
        [0.0, 0.0, 0.0, 1 - np.exp(-(t.HARM_AT_S[3] / SPARE_S - tokens) / TOKENS)]
    )


def test_who_has_borne_too_much_can_hardly_be_harmed_any_more() -> None:
    exposure = aboard(0.0)
    before = harm(exposure)
    exposure.placed("long", 3.0, TOKENS, OBJECTIVE_S, long=True)
    exposure.ended("long", 0.0)
    assert (harm(exposure, now_s=3.0) < 0.01 * before).all()


def test_what_waits_in_the_queue_counts_as_borne_but_has_taken_no_time_yet() -> None:
    exposure = aboard(0.0)
    exposure.placed("behind", 2.0, TOKENS, OBJECTIVE_S, long=True)
    now_s = 500 * STEP_S
    then = exposure.ended("behind", 2.0)
    assert then == 0.0, "nothing of it has run"
    # 500 tokens bear 2 s, which the queue takes: as if it were fresh.
    assert harm(exposure, now_s, queue_s=2.0) == pytest.approx(harm(aboard(0.0)))


def test_prefills_in_steps_within_the_objective_are_not_borne() -> None:
    exposure = aboard(0.0)
    exposure.placed("short", 0.03, TOKENS, OBJECTIVE_S, long=False)
    exposure.ended("short", 0.0)
    assert harm(exposure, 0.03) == pytest.approx(harm(aboard(0.0)))


def test_all_gaps_bear_more_than_the_longest_tenth() -> None:
    assert (harm(aboard(0.0), share=1.0) < harm(aboard(0.0))).all()


def test_nobody_is_harmed_where_the_step_alone_is_too_long() -> None:
    exposure = Exposure()
    exposure.placed("r", 0.0, TOKENS, STEP_S / 2, long=False)
    assert harm(exposure).tolist() == [0.0] * len(t.HARM_AT_S)


def test_what_ran_beside_an_answer_is_told_at_its_end() -> None:
    exposure = Exposure()
    exposure.placed("first", 1.0, TOKENS, OBJECTIVE_S, long=True)
    exposure.placed("second", 2.0, TOKENS, OBJECTIVE_S, long=True)
    exposure.placed("third", 4.0, TOKENS, OBJECTIVE_S, long=True)
    exposure.began("first", 6.0, 1.0)
    exposure.began("second", 4.0, 3.0)
    assert exposure.ended("first", 3.0) == pytest.approx(3.0)
    assert exposure.ended("second", 3.0) == pytest.approx(1.0)
    assert exposure.ended("second", 3.0) == 0.0
    exposure.began("unknown", 0.0, 0.0)
    assert len(exposure) == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(1, 2000), st.sampled_from([0.03, 0.05, 0.2])), max_size=20
    ),
    st.data(),
)
def test_harm_is_bounded_and_grows_with_the_prefill(
    placed: list[tuple[float, int, float]], data: st.DataObject
) -> None:
    exposure = Exposure()
    for number, (prefill_s, tokens, objective_s) in enumerate(placed):
        exposure.placed(f"r{number}", prefill_s, tokens, objective_s, long=prefill_s > 0.02)
    ended = data.draw(st.sets(st.integers(0, 19)))
    for number in ended:
        exposure.ended(f"r{number}", 0.0)
    left = len(placed) - len([number for number in ended if number < len(placed)])
    assert len(exposure) == left
    told = harm(exposure)
    assert (np.diff([0.0, *told]) >= -1e-12).all()
    assert told[-1] <= left + 1e-12
