"""Mooncake's Algorithm 1, by hand.

A prompt of 1000 tokens, prefill 1 ms a token, transfers 10 ms and 0.1 ms a token. Queues of 1.0, 0.5 and 0.3 s;
prefixes of 800, 200 and 500 tokens. TTFT behind the own prefix: 1.0 + 0.2, 0.5 + 0.8, 0.3 + 0.5 = 0.8 s.
"""

from typing import Any

from candidate_factory import make_candidates

from conductor.policies import Candidates, Choice, make_policy
from conductor.policies.candidates import NO_PEER


def _candidates(roles: str, overlap_tokens: list[int], queue_s: list[float], **arrays: Any) -> Candidates:
    n = len(roles)
    return make_candidates(
        roles,
        overlap_tokens=overlap_tokens,
        queue_s=queue_s,
        prefill_terms=[[1e-3] * n, [0.0] * n, [0.0] * n, [0.0] * n],
        kv_s_per_token=[1e-4] * n,
        link_latency_s=[0.01] * n,
        **arrays,
    )


def test_a_rank_far_behind_the_best_fetches_from_it() -> None:
    """800 / 200 = 4 > 2: 0.01 + 0.06 + 0.5 + 0.2 = 0.77 s; 800 / 500 = 1.6 stays with 0.8 s."""
    c = _candidates("mmm", [800, 200, 500], [1.0, 0.5, 0.3])
    assert make_policy("mooncake").choose(c) == Choice(1, 1, peer=0)


def test_below_the_threshold_it_computes() -> None:
    c = _candidates("mmm", [800, 200, 500], [1.0, 0.5, 0.3])
    assert make_policy("mooncake", {"kvcache_balancing_threshold": 5.0}).choose(c) == Choice(2, 2, NO_PEER)
    assert make_policy("mooncake_local").choose(c) == Choice(2, 2, NO_PEER)


def test_a_ratio_equal_to_the_threshold_does_not_exceed_it() -> None:
    """800 / 400 = 2: rank 1 computes 0.6 s rather than 0.01 + 0.04 + 0.2."""
    c = _candidates("mm", [800, 400], [1.0, 0.0])
    assert make_policy("mooncake").choose(c) == Choice(1, 1, NO_PEER)
    assert make_policy("mooncake", {"kvcache_balancing_threshold": 1.99}).choose(c) == Choice(1, 1, peer=0)


def test_a_rank_without_any_prefix_fetches() -> None:
    """0.01 + 0.08 + 0.2 = 0.29 s, whatever the threshold."""
    c = _candidates("mmmm", [800, 200, 500, 0], [1.0, 0.5, 0.3, 0.0])
    assert make_policy("mooncake", {"kvcache_balancing_threshold": 1e6}).choose(c) == Choice(3, 3, peer=0)
    assert make_policy("mooncake_local").choose(c) == Choice(2, 2, NO_PEER), "1.0 s against 0.8 s"


def test_a_rank_that_cannot_fetch_computes_behind_its_own_prefix() -> None:
    """Rank 1 would take 0.77 s with the fetch and 0.5 + 0.8 s without, rank 2 stays with 0.8 s."""
    arrays = {"overlap_tokens": [800, 200, 500], "queue_s": [1.0, 0.5, 0.3]}
    c = _candidates("mmm", **arrays, can_fetch=[True, False, True])
    assert make_policy("mooncake").choose(c) == Choice(2, 2, NO_PEER)
    c = _candidates("mmm", **arrays, can_fetch=[False, True, False])
    assert make_policy("mooncake").choose(c) == Choice(1, 1, peer=0), "the giver need not be able to"


def test_nothing_is_fetched_when_nobody_holds_anything() -> None:
    c = _candidates("mm", [0, 0], [0.1, 0.0])
    assert make_policy("mooncake").choose(c) == Choice(1, 1, NO_PEER)


def test_a_transfer_that_costs_more_than_it_saves_is_counted_all_the_same() -> None:
    """The paper's rule looks at the ratio, not at the time: 0.01 + 80 + 0.2 s loses to 1.0 + 0.2 s."""
    c = _candidates("mm", [800, 0], [1.0, 0.0])
    slow = make_candidates(
        "mm",
        overlap_tokens=[800, 0],
        queue_s=[1.0, 0.0],
        prefill_terms=c.prefill_terms,
        kv_s_per_token=[0.1, 0.1],
    )
    assert make_policy("mooncake").choose(slow) == Choice(0, 0, NO_PEER)


def test_decode_goes_to_the_least_tbt_and_its_cache_is_no_source() -> None:
    c = _candidates("ppdd", [0, 0, 960, 0], [0.2, 0.1, 0.0, 0.0], tbt_s=[0, 0, 0.03, 0.02])
    assert make_policy("mooncake").choose(c) == Choice(1, 3, NO_PEER)


def test_host_memory_counts_as_cached() -> None:
    c = _candidates("mm", [0, 0], [0.0, 0.0])
    c = make_candidates(
        "mm",
        local_tokens=[[0, 160], [320, 160], [320, 960], [320, 960], [320, 960]],
        prefill_terms=c.prefill_terms,
    )
    assert make_policy("mooncake_local").choose(c) == Choice(0, 0)


def test_of_several_best_holders_the_one_placed_on_least_sends() -> None:
    c = _candidates("mmm", [800, 800, 0], [5.0, 5.0, 0.0], placements=[7, 6, 5])
    assert make_policy("mooncake").choose(c) == Choice(2, 2, peer=1)
