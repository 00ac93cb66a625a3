"""Dynamo's cost in blocks, by hand.

Blocks of 16 tokens, a prompt of 10 blocks. Rank 0 has 4 of them on its device, 2 more on the host, 2 on disk and
2 in the shared pool: credit 4 + 0.75 * 2 + 0.25 * 2 + 0.5 * 2 = 7. It still has 2 blocks to prefill and holds 20:
cost max(0, 2 + 10 - 7) + 20 + 10 = 35. Rank 1 has nothing: cost 10 + its blocks + 10.
"""

from collections import Counter
from typing import Any

import pytest
from candidate_factory import make_candidates

from conductor.policies import Candidates, make_policy


def _candidates(rank_1_blocks: float, **arrays: Any) -> Candidates:
    return make_candidates(
        "mm",
        prompt_tokens=160,
        local_tokens=[[64, 0], [96, 0], [128, 0], [128, 0], [160, 0]],
        pending_tokens=[32, 0],
        context_tokens=[320, int(16 * rank_1_blocks)],
        **arrays,
    )


@pytest.mark.parametrize(
    ("parameters", "rank_1_costs_less", "rank_1_costs_more"),
    [
        ({}, 14.5, 15.5),  # 35 against 34.5 and 35.5
        ({"overlap_score_credit_decay": 1.0}, 15.5, 16.0),  # device credit 4 / 1.2: 35.667
        ({"overlap_score_credit": 0.5}, 16.5, 17.5),  # 37
        ({"host_cache_hit_weight": 0.25}, 15.5, 16.5),  # 36
        ({"disk_cache_hit_weight": 0.75}, 13.5, 14.5),  # 34
        ({"shared_cache_multiplier": 0.0}, 15.5, 16.5),  # 36
        ({"prefill_load_scale": 2.0}, 9.5, 10.5),  # 40 against 20 + 10 + blocks
        ({"overlap_score_credit": 10.0}, 9.5, 10.5),  # prefill 0: 30
    ],
)
def test_the_least_cost_wins(
    parameters: dict[str, object], rank_1_costs_less: float, rank_1_costs_more: float
) -> None:
    policy = make_policy("dynamo", parameters)
    for blocks, expected in ((rank_1_costs_less, 1), (rank_1_costs_more, 0)):
        choice = policy.choose(_candidates(blocks))
        assert choice is not None and choice.prefill == expected


def test_active_requests_can_be_charged() -> None:
    c = _candidates(16.5, active_decodes=[2, 0])  # 36.5
    free, charged = make_policy("dynamo"), make_policy("dynamo", {"decode_active_request_weight": 1.0})
    assert (free.choose(c), charged.choose(c)) != (None, None)
    assert getattr(free.choose(c), "prefill", None) == 0, "35"
    assert getattr(charged.choose(c), "prefill", None) == 1, "37"


def test_a_decode_rank_is_chosen_by_load_alone() -> None:
    c = make_candidates(
        "ppdd",
        prompt_tokens=160,
        overlap_tokens=[144, 0, 144, 0],
        pending_tokens=[0, 0, 0, 9999],
        context_tokens=[0, 0, 176, 160],
    )
    choice = make_policy("dynamo").choose(c)
    assert choice is not None and (choice.prefill, choice.decode) == (0, 3)


def test_ties_fall_at_random() -> None:
    policy, c = make_policy("dynamo", seed=1), make_candidates("mmm", context_tokens=[16, 16, 32])
    counts = Counter(choice.prefill for _ in range(200) if (choice := policy.choose(c)) is not None)
    assert counts.keys() == {0, 1}


def test_temperature_samples_by_softmax_of_scaled_costs() -> None:
    """Costs scaled to 0 and 1 at temperature 1: e^0 / (e^0 + e^-1) = 0.731."""
    policy = make_policy("dynamo", {"router_temperature": 1.0}, seed=2)
    c = _candidates(16.0)
    drawn = Counter(choice.prefill for _ in range(4000) if (choice := policy.choose(c)) is not None)
    assert abs(drawn[0] / 4000 - 0.731) < 0.035, "five standard deviations"


def test_a_low_temperature_keeps_to_the_least_cost() -> None:
    policy = make_policy("dynamo", {"router_temperature": 1e-3})
    choices = [policy.choose(_candidates(16.0)) for _ in range(50)]
    assert {choice.prefill for choice in choices if choice} == {0}


def test_temperature_draws_evenly_among_equals() -> None:
    policy, c = make_policy("dynamo", {"router_temperature": 0.5}), make_candidates("mm")
    drawn = Counter(choice.prefill for _ in range(1000) if (choice := policy.choose(c)) is not None)
    assert abs(drawn[0] / 1000 - 0.5) < 0.08
