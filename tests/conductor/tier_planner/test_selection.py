"""Which proposals are taken where room is short: those that gain most together."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import Holder, Namespace, Tier
from conductor.actions import ActionKind, Place, Prefix
from conductor.tier_planner.outlook import Proposal
from conductor.tier_planner.selection import select

MIB = 1 << 20
PLACES = [Place(Holder(name), Tier.HOST) for name in "ab"]
PREFIX = Prefix(Namespace("m", 16), np.array([1], np.uint64))


def proposal(target: int, mib: int, gain_s: float) -> Proposal:
    return Proposal(
        ActionKind.PREFETCH, PREFIX, 0, 1, None, PLACES[target], mib * MIB, gain_s + 1.0, 1.0, 9.0, "test"
    )


def test_all_are_taken_where_there_is_room() -> None:
    proposals = [proposal(0, 5, 1.0), proposal(1, 500, 0.1)]
    assert select(proposals, lambda place: None) == proposals


def test_two_small_ones_may_be_worth_more_than_a_large_one() -> None:
    large, one, other = proposal(0, 10, 1.5), proposal(0, 5, 1.0), proposal(0, 5, 0.9)
    assert select([large, one, other], lambda place: 10.0 * MIB) == [one, other]


def test_what_moves_nothing_is_always_taken() -> None:
    drop = proposal(0, 0, 0.0)
    assert select([drop, proposal(0, 9, 1.0)], lambda place: 0.0) == [drop]


cases = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 20), st.integers(1, 50)),
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(cases, st.integers(0, 40))
def test_no_other_choice_that_fits_gains_more(drawn: list[tuple[int, int, int]], room_mib: int) -> None:
    proposals = [proposal(target, mib, gain / 10) for target, mib, gain in drawn]

    def fits(chosen: tuple[Proposal, ...] | list[Proposal]) -> bool:
        return all(
            sum(each.kv_bytes for each in chosen if each.target == place) <= room_mib * MIB
            for place in PLACES
        )

    def gain_s(chosen: tuple[Proposal, ...] | list[Proposal]) -> float:
        return sum(each.benefit_s - each.cost_s for each in chosen)

    taken = select(proposals, lambda place: room_mib * MIB)
    assert fits(taken)
    best = max(
        gain_s(some)
        for count in range(len(proposals) + 1)
        for some in combinations(proposals, count)
        if fits(some)
    )
    assert gain_s(taken) >= best - 1e-6
