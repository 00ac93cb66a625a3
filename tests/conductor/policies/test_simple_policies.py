"""The policies of one idea: lots, turns, load, or the longest match."""

from collections import Counter

from candidate_factory import make_candidates

from conductor.policies import Choice, make_policy


def test_random_spreads_evenly() -> None:
    policy, c = make_policy("random", seed=3), make_candidates("mmmm")
    counts = Counter(choice.prefill for _ in range(2000) if (choice := policy.choose(c)) is not None)
    assert sorted(counts) == [0, 1, 2, 3]
    # 500 expected of each; five standard deviations are 97.
    assert all(400 < count < 600 for count in counts.values())


def test_random_follows_its_seed() -> None:
    c = make_candidates("ppppdddd")
    first, same, other = (make_policy("random", seed=seed) for seed in (1, 1, 2))
    choices = [first.choose(c) for _ in range(20)]
    assert choices == [same.choose(c) for _ in range(20)]
    assert choices != [other.choose(c) for _ in range(20)]


def test_round_robin_takes_turns() -> None:
    policy, c = make_policy("round_robin"), make_candidates("pppdd")
    choices = [policy.choose(c) for _ in range(4)]
    assert choices == [Choice(0, 3), Choice(1, 4), Choice(2, 3), Choice(0, 4)]


def test_least_loaded_counts_tokens_then_requests() -> None:
    c = make_candidates("mmm", pending_tokens=[100, 90, 90], pending_prefills=[1, 9, 2])
    assert make_policy("least_loaded").choose(c) == Choice(2, 2)


def test_least_requests_counts_requests_alone() -> None:
    c = make_candidates(
        "ppdd", pending_tokens=[0, 9000, 0, 0], pending_prefills=[2, 1, 0, 0], active_decodes=[0, 0, 4, 3]
    )
    assert make_policy("least_requests").choose(c) == Choice(1, 3)


def test_a_request_that_still_prefills_on_a_mixed_rank_counts_once() -> None:
    """Rank 0 has 3 requests, one of them prefilling; rank 1 has 4."""
    c = make_candidates("mm", pending_prefills=[1, 0], active_decodes=[3, 4])
    assert make_policy("least_requests").choose(c) == Choice(0, 0)
    c = make_candidates("mm", pending_prefills=[3, 0], active_decodes=[3, 4])
    assert make_policy("least_requests").choose(c) == Choice(0, 0)


def test_prefix_match_ignores_load() -> None:
    c = make_candidates("mm", overlap_tokens=[512, 0], pending_tokens=[90_000, 0])
    assert make_policy("prefix_match").choose(c) == Choice(0, 0)
    assert make_policy("least_loaded").choose(c) == Choice(1, 1)


def test_prefix_match_breaks_ties_by_load_and_decodes_in_turn() -> None:
    policy = make_policy("prefix_match")
    c = make_candidates("pppdd", overlap_tokens=[512, 512, 0, 512, 0], pending_tokens=[9, 8, 0, 0, 0])
    assert [policy.choose(c) for _ in range(3)] == [Choice(1, 3), Choice(1, 4), Choice(1, 3)]
