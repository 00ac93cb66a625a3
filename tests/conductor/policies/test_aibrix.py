"""AIBrix's two algorithms, by hand."""

from candidate_factory import make_candidates

from conductor.policies import Choice, make_policy


def test_conductor_estimates_ttft() -> None:
    """A prefill of 512 tokens takes 0.001 * 512^1.5 + 5 = 16.59 ms, one of 1000 takes 36.62, one of 100 takes 6.

    900 cached tokens cost 4.5 + 1. With one request ahead: 16.59 + 5.5 + 6 = 28.09 < 36.62; with two, 44.67.
    """
    for requests, chosen in ((1, 0), (2, 1)):
        c = make_candidates("mm", overlap_tokens=[900, 0], active_decodes=[requests, 0])
        assert make_policy("aibrix_conductor").choose(c) == Choice(chosen, chosen)


def test_conductor_learns_the_mean_prefill_time_of_a_rank() -> None:
    """A prefill took 100 ms on rank 0: one request ahead costs 100 + 36.62 ms there and 16.59 + 36.62 on rank 1."""
    policy = make_policy("aibrix_conductor")
    terms = [[1e-4] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2]
    alone = make_candidates("mm", fits=[True, False], prefill_terms=terms)
    both = make_candidates("mm", active_decodes=[1, 1], placements=[0, 1], prefill_terms=terms)
    assert policy.choose(both) == Choice(0, 0), "a tie"
    assert policy.choose(alone) == Choice(0, 0)
    assert policy.choose(both) == Choice(1, 1)


def test_conductor_decodes_where_tbt_looks_least() -> None:
    """20 ms / 4 * 1.25 = 6.25, 40 for the idle rank, 12 / 2 * 1.5 = 9; above 90 % usage 6.25 * 1.5 = 9.375."""
    arrays = {"active_decodes": [0, 4, 0, 2], "tbt_s": [0.0, 0.020, 0.005, 0.012]}
    c = make_candidates("pddd", **arrays, kv_usage=[0, 0.9, 0, 0])
    assert make_policy("aibrix_conductor").choose(c) == Choice(0, 1)
    c = make_candidates("pddd", **arrays, kv_usage=[0, 0.91, 0, 0])
    assert make_policy("aibrix_conductor").choose(c) == Choice(0, 3)
    assert make_policy("aibrix_conductor", {"pressure_penalty": 1.4}).choose(c) == Choice(0, 1), "8.75"
    assert make_policy("aibrix_conductor", {"fallback_tbt_ms": 3.0}).choose(c) == Choice(0, 2), "6"


def test_prefix_cache_follows_the_match_while_load_is_in_balance() -> None:
    for requests, chosen in (([16, 0], 0), ([17, 0], 1)):
        c = make_candidates("mm", overlap_tokens=[512, 0], active_decodes=requests)
        assert make_policy("aibrix_prefix_cache").choose(c) == Choice(chosen, chosen)


def test_prefix_cache_passes_over_a_rank_far_above_the_others() -> None:
    """10, 0, 0, 0, 0, 0: mean 1.67, deviation 3.73, so 10 exceeds 9.12 but not 1.67 + 3 * 3.73."""
    c = make_candidates("mmmmmm", overlap_tokens=[900, 0, 500, 0, 0, 0], active_decodes=[10, 0, 0, 0, 0, 0])
    assert make_policy("aibrix_prefix_cache").choose(c) == Choice(2, 2)
    assert make_policy("aibrix_prefix_cache", {"standard_deviation_factor": 3.0}).choose(c) == Choice(0, 0)


def test_prefix_cache_compares_whole_percents_then_requests() -> None:
    c = make_candidates("mmm", overlap_tokens=[509, 500, 499], active_decodes=[2, 1, 0])
    assert make_policy("aibrix_prefix_cache").choose(c) == Choice(1, 1)


def test_prefix_cache_without_a_match_takes_fewest_requests() -> None:
    c = make_candidates("mm", overlap_tokens=[9, 0], active_decodes=[1, 0])
    assert make_policy("aibrix_prefix_cache").choose(c) == Choice(1, 1), "0.9 % is no match"


def test_prefix_cache_decodes_where_requests_are_fewest() -> None:
    c = make_candidates("pdd", overlap_tokens=[0, 960, 0], active_decodes=[0, 2, 1])
    assert make_policy("aibrix_prefix_cache").choose(c) == Choice(0, 2)
