"""How many of the requests aboard a prefill would make miss their TBT objective."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_work import begin_decode, end_decode, place

from conductor.catalogue import LLAMA_8B_H100
from conductor.cluster import Cluster, make_instance
from conductor.costs import Floats
from conductor.costs import tables as t
from conductor.placement import Role
from conductor.rank import RankState

STEP_S = 0.01  # whatever is aboard
EVEN = replace(
    LLAMA_8B_H100,
    name="even",
    decode_base_s=STEP_S,
    decode_s_per_sequence=0.0,
    decode_s_per_context_token=0.0,
)
OBJECTIVE_S, SHARE, TOKENS = 0.05, 0.1, 100
SPARE_S = SHARE * (OBJECTIVE_S - STEP_S)  # of prefill, earned by each token
CLUSTER = Cluster()
NOBODY = 0


def empty() -> RankState:
    number = len(CLUSTER)
    instance = make_instance(
        instance_id=f"i{number}",
        url=f"http://engine-{number}",
        role=Role.MIXED,
        instance_class=EVEN,
        protocol="vllm-nixl",
    )
    CLUSTER.add(instance)
    return instance.ranks[0]


def put(
    rank: RankState,
    ticket: int,
    now_s: float = 0.0,
    *,
    prefill_s: float | None = None,
    tokens: int = TOKENS,
    objective_s: float = OBJECTIVE_S,
    long: bool = False,
) -> None:
    place(
        rank,
        ticket,
        now_s,
        prefill_s=prefill_s,
        decodes=True,
        output_tokens=tokens,
        tbt_objective_s=objective_s,
        long_steps=long,
    )


def aboard(*began_s: float, tokens: int = TOKENS) -> RankState:
    rank = empty()
    for ticket, each in enumerate(began_s, start=1):
        put(rank, ticket, tokens=tokens)
        begin_decode(rank, ticket, each)
    return rank


def harm(rank: RankState, now_s: float = 0.0, *, share: float = SHARE) -> Floats:
    """As it is written by the next change there."""
    begin_decode(rank, NOBODY, now_s, tbt_share=share)
    return CLUSTER.tables.loads[rank.row, t.HARM : t.REPORTED_RUNNING].copy()


def test_nobody_aboard_is_nobody_harmed() -> None:
    assert harm(empty()).tolist() == [0.0] * len(t.HARM_AT_S)


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
    rank = aboard(0.0)
    before = harm(rank)
    put(rank, 2, prefill_s=3.0, long=True)
    begin_decode(rank, 2, 3.0, prefilled=True)
    end_decode(rank, 2, 3.0)
    assert (harm(rank, now_s=3.0) < 0.01 * before).all()


def test_what_waits_in_the_queue_counts_as_borne_but_has_taken_no_time_yet() -> None:
    rank, now_s = aboard(0.0), 500 * STEP_S
    put(rank, 2, now_s, prefill_s=2.0, long=True)
    assert end_decode(rank, 2, now_s) == 0.0, "nothing of it has run"
    # 500 tokens bear 2 s, which the queue takes: as if it were fresh.
    assert rank.queue_s(now_s) == 2.0
    assert harm(rank, now_s) == pytest.approx(harm(aboard(0.0)))


def test_prefills_in_steps_within_the_objective_are_not_borne() -> None:
    rank = aboard(0.0)
    put(rank, 2, prefill_s=0.03)
    begin_decode(rank, 2, 0.03, prefilled=True)
    end_decode(rank, 2, 0.03)
    assert harm(rank, 0.03) == pytest.approx(harm(aboard(0.0)))


def test_all_gaps_bear_more_than_the_longest_tenth() -> None:
    assert (harm(aboard(0.0), share=1.0) < harm(aboard(0.0))).all()


def test_nobody_is_harmed_where_the_step_alone_is_too_long() -> None:
    rank = empty()
    put(rank, 1, objective_s=STEP_S / 2)
    assert harm(rank).tolist() == [0.0] * len(t.HARM_AT_S)


def test_what_ran_beside_an_answer_is_told_at_its_end() -> None:
    rank = empty()
    for ticket, prefill_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
        put(rank, ticket, prefill_s=prefill_s, long=True)
    begin_decode(rank, 1, 1.0, prefilled=True)
    begin_decode(rank, 2, 3.0, prefilled=True)
    assert end_decode(rank, 1, 4.0) == pytest.approx(3.0)
    assert end_decode(rank, 2, 4.0) == pytest.approx(1.0)
    assert end_decode(rank, 2, 4.0) == 0.0
    begin_decode(rank, NOBODY, 4.0)
    assert rank.active_decodes == 1


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
    rank = empty()
    for ticket, (prefill_s, tokens, objective_s) in enumerate(placed):
        put(rank, ticket, prefill_s=prefill_s, tokens=tokens, objective_s=objective_s, long=prefill_s > 0.02)
    ended = data.draw(st.sets(st.integers(0, 19)))
    for ticket in ended:
        end_decode(rank, ticket, 0.0)
    left = len(placed) - len([ticket for ticket in ended if ticket < len(placed)])
    assert rank.active_decodes == left
    told = harm(rank)
    assert (np.diff([0.0, *told]) >= -1e-12).all()
    assert told[-1] <= left + 1e-12
