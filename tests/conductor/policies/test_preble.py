"""Preble's E2, by hand: prefill 1 ms a token, decode 10 ms a token, answers of 100 tokens."""

from typing import Any

from candidate_factory import make_candidates

from conductor.policies import Candidates, Choice, make_policy


def _candidates(
    overlap_tokens: list[int], roles: str = "mm", prompt_tokens: int = 1000, **arrays: Any
) -> Candidates:
    n = len(roles)
    return make_candidates(
        roles,
        prompt_tokens=prompt_tokens,
        overlap_tokens=overlap_tokens,
        prefill_terms=[[1e-3] * n, [0.0] * n, [0.0] * n, [0.0] * n],
        **arrays,
    )


def test_it_exploits_a_match_that_exceeds_the_rest() -> None:
    """Rank 0 has work of 1.4 s. 501 > 499 exploits; 500 explores, where 1.4 + 0.5 exceeds 1.0."""
    for overlap, chosen in ((501, 0), (500, 1)):
        policy = make_policy("preble")
        assert policy.choose(_candidates([600, 0])) == Choice(0, 0)
        assert policy.choose(_candidates([overlap, 0])) == Choice(chosen, chosen)


def test_of_equal_matches_the_least_loaded_is_exploited() -> None:
    policy = make_policy("preble")
    choices = [policy.choose(_candidates([600, 600, 500], "mmm")) for _ in range(3)]
    assert choices[:2] == [Choice(0, 0), Choice(1, 1)]
    assert choices[2] in (Choice(0, 0), Choice(1, 1))


def test_eviction_of_what_is_reused_costs() -> None:
    """Rank 0: L 1.5, P 0.5, half of what was placed there was cached, so M 0.5 * 0.5. Rank 1: L 1.1, P 1.0.

    2.25 > 2.1; without M it were 2.0.
    """
    policy = make_policy("preble")
    policy.choose(_candidates([0, 0], prompt_tokens=100, fits=[False, True]))
    assert policy.choose(_candidates([500, 0], fits=[True, False])) == Choice(0, 0)
    assert policy.choose(_candidates([500, 0])) == Choice(1, 1)

    policy = make_policy("preble")
    policy.choose(_candidates([0, 0], prompt_tokens=100, fits=[False, True]))
    # The same 1.5 s of work, nothing of it cached: M is 0.
    policy.choose(_candidates([0, 0], prompt_tokens=500, fits=[True, False]))
    assert policy.choose(_candidates([500, 0])) == Choice(0, 0)


def test_work_is_forgotten_after_the_window() -> None:
    policy = make_policy("preble", {"window_s": 60.0})
    policy.choose(_candidates([500, 0], now_s=1000.0))
    assert policy.choose(_candidates([500, 0], now_s=1058.0)) == Choice(1, 1), "1.5 + 0.25 + 0.5 > 1.0"
    policy = make_policy("preble", {"window_s": 60.0})
    policy.choose(_candidates([500, 0], now_s=1000.0))
    assert policy.choose(_candidates([500, 0], now_s=1060.0)) == Choice(0, 0)


def test_the_most_loaded_rank_is_relieved_when_it_is_far_ahead() -> None:
    def choices(**parameters: object) -> list[Choice | None]:
        policy = make_policy("preble", parameters)
        policy.choose(_candidates([0, 0], prompt_tokens=500, fits=[False, True]))  # L 1.5 on rank 1
        # 0.1 + 1.0 on rank 0 each time: 1.1, 2.2, 3.3
        return [policy.choose(_candidates([900, 0])) for _ in range(4)]

    assert choices() == [Choice(0, 0)] * 4, "not before 50 requests"
    relieved = choices(rebalance_after_requests=0, rebalance_ratio=2.0)
    assert relieved == [*[Choice(0, 0)] * 3, Choice(1, 1)], "3.3 > 2 * 1.5"
    assert choices(rebalance_after_requests=0, rebalance_ratio=2.3) == [Choice(0, 0)] * 4
    assert choices(rebalance_after_requests=5, rebalance_ratio=2.0) == [Choice(0, 0)] * 4


def test_a_pair_decodes_where_there_is_least_work() -> None:
    policy = make_policy("preble")
    c = _candidates([0, 0, 0], "pdd")
    first, second = policy.choose(c), policy.choose(c)
    assert first is not None and second is not None
    assert {first.decode, second.decode} == {1, 2}
