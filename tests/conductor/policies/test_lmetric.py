"""LMetric's product, by hand."""

from candidate_factory import make_candidates

from conductor.policies import Choice, make_policy


def test_new_tokens_times_batch() -> None:
    """(500 + 1000 - 800) * 3 = 2100 against 1000 * 2 = 2000; with this request 700 * 4 against 1000 * 3."""
    c = make_candidates("mm", overlap_tokens=[800, 0], pending_tokens=[500, 0], active_decodes=[3, 2])
    assert make_policy("lmetric").choose(c) == Choice(1, 1)
    assert make_policy("lmetric_plus_one").choose(c) == Choice(0, 0)


def test_an_idle_rank_scores_nothing_cached_or_not() -> None:
    """1 * 1 against 1000 * 0; with this request 1 * 2 against 1000 * 1."""
    c = make_candidates("mm", overlap_tokens=[999, 0], active_decodes=[1, 0])
    assert make_policy("lmetric").choose(c) == Choice(1, 1)
    assert make_policy("lmetric_plus_one").choose(c) == Choice(0, 0)


def test_among_idle_ranks_the_cached_one() -> None:
    c = make_candidates("mm", overlap_tokens=[0, 512], placements=[0, 9])
    assert make_policy("lmetric").choose(c) == Choice(1, 1)


def test_decode_goes_to_the_smallest_batch() -> None:
    c = make_candidates("pdd", overlap_tokens=[0, 960, 0], active_decodes=[0, 2, 1])
    assert make_policy("lmetric").choose(c) == Choice(0, 2)
