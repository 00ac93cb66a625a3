"""SMG's cache-aware rule, by hand."""

from typing import Any

import numpy as np
import pytest
from candidate_factory import make_candidates

from conductor.placement import PlacementRequest
from conductor.policies import Candidates, Choice, make_policy

BLOCK = 16


def _prompt(shared_tokens: int, tokens: int, seed: int) -> PlacementRequest:
    """Prompts of one namespace begin with the same ``shared_tokens``."""
    ids = np.random.default_rng(seed).integers(0, 32_000, tokens, dtype=np.uint32)
    ids[:shared_tokens] = np.arange(shared_tokens)
    return PlacementRequest("r", "m", ids, tokens)


def _asking(request: PlacementRequest, roles: str = "mm", **arrays: Any) -> Candidates:
    return make_candidates(
        roles, request=request, prompt_tokens=request.prompt_tokens, block_size=BLOCK, **arrays
    )


@pytest.mark.parametrize(
    ("requests", "chosen"),
    [
        ([67, 3], 0),  # 64 is not above 64
        ([68, 3], 1),  # 65 > 64 and 68 > 1.5 * 3
        ([300, 210], 0),  # 90 > 64 but 300 < 1.5 * 210
        ([320, 210], 1),  # 320 > 315
    ],
)
def test_the_longest_match_unless_load_is_out_of_balance(requests: list[int], chosen: int) -> None:
    c = make_candidates("mm", overlap_tokens=[512, 496], active_decodes=requests)
    assert make_policy("smg").choose(c) == Choice(chosen, chosen)


def test_kv_usage_can_put_load_out_of_balance() -> None:
    c = make_candidates("mm", overlap_tokens=[512, 0], active_decodes=[1, 0], kv_usage=[0.9, 0.3])
    assert make_policy("smg").choose(c) == Choice(0, 0), "both tests are off"
    for off, name in ((0.9, "overload_token_usage_threshold"), (0.6, "balance_token_usage_threshold")):
        assert make_policy("smg", {name: off + 1e-9}).choose(c) == Choice(0, 0)
        assert make_policy("smg", {name: off - 1e-9}).choose(c) == Choice(1, 1)


def test_equal_matches_go_to_lower_load_then_to_the_smaller_cache() -> None:
    c = make_candidates("mmm", overlap_tokens=[512] * 3, active_decodes=[2, 1, 1], kv_usage=[0, 0.5, 0.4])
    assert make_policy("smg").choose(c) == Choice(2, 2)


def test_without_any_match_the_least_load() -> None:
    c = make_candidates("mm", active_decodes=[2, 1], kv_usage=[0.0, 0.9])
    assert make_policy("smg").choose(c) == Choice(1, 1)


def test_prefill_and_decode_are_chosen_by_the_same_rule_apart() -> None:
    c = make_candidates("ppdd", overlap_tokens=[0, 512, 0, 256], active_decodes=[0, 0, 0, 60])
    assert make_policy("smg").choose(c) == Choice(1, 3)


def test_the_tree_remembers_what_was_routed_where() -> None:
    """4 of 10 blocks are shared: 0.4 > 0.3."""
    policy = make_policy("smg", {"mode": "approximate"})
    assert policy.choose(_asking(_prompt(64, 160, seed=1), active_decodes=[1, 0])) == Choice(1, 1)
    again = _asking(_prompt(64, 160, seed=2), active_decodes=[0, 5], overlap_tokens=[144, 0])
    assert policy.choose(again) == Choice(1, 1), "by what was routed, not by what events tell"


def test_a_short_shared_prefix_does_not_bind() -> None:
    """3 of 10 blocks: 0.3 is not above 0.3."""
    policy = make_policy("smg", {"mode": "approximate"})
    assert policy.choose(_asking(_prompt(48, 160, seed=1), active_decodes=[1, 0])) == Choice(1, 1)
    assert policy.choose(_asking(_prompt(48, 160, seed=2), active_decodes=[0, 5])) == Choice(0, 0)


def test_the_tree_forgets_the_least_recent_prompts_from_their_ends() -> None:
    """Room for 12 blocks: of the first prompt's 10, the first 2 stay beside the second's 10."""
    for threshold, chosen in ((0.15, 1), (0.25, 0)):
        policy = make_policy(
            "smg", {"mode": "approximate", "max_tree_size": 12 * BLOCK, "cache_threshold": threshold}
        )
        first, second = _prompt(0, 160, seed=1), _prompt(0, 160, seed=2)
        policy.choose(_asking(first, active_decodes=[1, 0]))
        policy.choose(_asking(second, active_decodes=[0, 1]))
        assert policy.choose(_asking(first, active_decodes=[0, 1])) == Choice(chosen, chosen)


def test_a_rank_that_is_gone_is_not_chosen_for_what_it_had() -> None:
    policy, prompt = make_policy("smg", {"mode": "approximate"}), _prompt(0, 160, seed=1)
    policy.choose(_asking(prompt, active_decodes=[1, 0]))
    assert policy.choose(_asking(prompt, fits=[True, False])) == Choice(0, 0)


def test_positions_among_the_candidates_may_change() -> None:
    policy, prompt = make_policy("smg", {"mode": "approximate"}), _prompt(0, 160, seed=1)
    policy.choose(_asking(prompt, "mmm", active_decodes=[1, 1, 0]))
    fewer = _asking(prompt, "mm", active_decodes=[0, 5], rows=[0, 2])
    assert policy.choose(fewer) == Choice(1, 1)


def test_hashes_serve_where_tokens_are_unknown_and_without_either_load_decides() -> None:
    policy = make_policy("smg", {"mode": "approximate"})
    hashes = np.arange(1, 11, dtype=np.uint64)
    known = PlacementRequest("r", "m", np.empty(0, np.uint32), 160, hashes=hashes, hashes_block_size=BLOCK)
    policy.choose(_asking(known, active_decodes=[1, 0]))
    assert policy.choose(_asking(known, active_decodes=[0, 5])) == Choice(1, 1)
    unknown = PlacementRequest("r", "m", np.empty(0, np.uint32), 160)
    assert policy.choose(_asking(unknown, active_decodes=[0, 5])) == Choice(0, 0)
