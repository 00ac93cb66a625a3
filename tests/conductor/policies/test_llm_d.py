"""llm-d's sum of scores, by hand."""

from candidate_factory import make_candidates

from conductor.policies import Choice, make_policy


def test_the_highest_weighted_sum_wins() -> None:
    """Cached, weighted: 96 + 0.8 * 64 = 147.2, 0 and 96, so 1, 0 and 0.652; queues of 4, 0 and 2 give 0, 1 and 0.5.

    3 + 0 + 2 * 0.5 = 4; 0 + 2 + 2 * 0.9 = 3.8; 1.957 + 1 + 2 * 0.8 = 4.557.
    """
    c = make_candidates(
        "mmm",
        prompt_tokens=176,
        local_tokens=[[96, 0, 96], *[[160, 0, 96]] * 4],
        waiting=[4, 0, 2],
        kv_usage=[0.5, 0.1, 0.2],
        running=[0, 0, 9],
    )
    assert make_policy("llm_d").choose(c) == Choice(2, 2)
    # 1 + 0 + 1 = 2; 3.8; 0.652 + 2.6 = 3.252
    assert make_policy("llm_d", {"prefix_weight": 1.0}).choose(c) == Choice(1, 1)
    # 7 + 0 + 1 = 8; 3.8; 4.565 + 2.6 = 7.165
    assert make_policy("llm_d", {"prefix_weight": 7.0}).choose(c) == Choice(0, 0)
    # running 0, 0 and 9 give 1, 1 and 0: 5, 4.8 and 4.557
    assert make_policy("llm_d", {"running_weight": 1.0}).choose(c) == Choice(0, 0)


def test_slower_tiers_count_less() -> None:
    """Rank 0: 160 on disk, 64; rank 1: 80 on the device; the scores are 0 and 1."""
    c = make_candidates("mm", local_tokens=[[0, 80], [0, 80], [160, 80], [160, 80], [160, 80]])
    assert make_policy("llm_d").choose(c) == Choice(1, 1)
    assert make_policy("llm_d", {"shared_storage_weight": 0.6}).choose(c) == Choice(0, 0)


def test_a_long_prompt_is_prefilled_elsewhere() -> None:
    """The mixed rank is the best to decode; the prefill rank is idle and the mixed one's queue is long."""
    c = make_candidates("mpd", overlap_tokens=[0, 0, 0], waiting=[0, 0, 3], kv_usage=[0.2, 0.0, 0.1])
    assert make_policy("llm_d").choose(c) == Choice(1, 2)


def test_a_prompt_that_is_nearly_cached_is_prefilled_where_it_decodes() -> None:
    for cached, expected in ((984, Choice(1, 2)), (985, Choice(0, 0))):
        c = make_candidates("mpd", overlap_tokens=[cached, cached, 0], kv_usage=[0.2, 0.0, 0.1])
        assert make_policy("llm_d").choose(c) == expected, "16 tokens are too many, 15 are not"


def test_a_threshold_of_0_never_prefills_elsewhere() -> None:
    c = make_candidates("mpd", waiting=[0, 0, 3])
    assert make_policy("llm_d", {"non_cached_tokens": 0}).choose(c) == Choice(0, 0)


def test_a_decode_rank_prefills_only_when_told_so() -> None:
    c = make_candidates("pd", overlap_tokens=[0, 992])
    assert make_policy("llm_d").choose(c) == Choice(0, 1)
    lenient = make_policy("llm_d", {"decode_prefills": True})
    assert lenient.choose(c) == Choice(1, 1)
    assert lenient.choose(make_candidates("pd")) == Choice(0, 1)
    assert lenient.choose(make_candidates("d")) == Choice(0, 0)


def test_a_decode_rank_that_computes_no_prompts_is_left_alone() -> None:
    lenient = make_policy("llm_d", {"decode_prefills": True})
    assert lenient.choose(make_candidates("pd", prompt_tokens=10, joint_protocols=1)) == Choice(0, 1)
