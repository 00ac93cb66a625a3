"""Who can take a request, whatever the policy prefers."""

from candidate_factory import make_candidates

from conductor.policies import Choice, make_policy


def test_a_prefill_rank_is_passed_over_when_nobody_can_decode_for_it() -> None:
    c = make_candidates("pm", pending_tokens=[0, 900])
    assert make_policy("least_loaded").choose(c) == Choice(1, 1)


def test_only_ranks_of_one_protocol_pair() -> None:
    c = make_candidates("ppdd", protocol=[0, 1, 2, 1], pending_tokens=[0, 900, 0, 900])
    assert make_policy("least_loaded").choose(c) == Choice(1, 3)
    assert make_policy("least_loaded").choose(make_candidates("pd", protocol=[0, 1])) is None


def test_the_decode_rank_has_the_protocol_of_the_prefill_rank() -> None:
    c = make_candidates("ppdd", protocol=[0, 1, 0, 1], pending_tokens=[0, 900, 900, 0])
    assert make_policy("least_loaded").choose(c) == Choice(0, 2)


def test_a_rank_that_the_request_does_not_fit_into_takes_no_part() -> None:
    c = make_candidates("ppdd", fits=[False, True, True, False], pending_tokens=[0, 900, 900, 0])
    assert make_policy("least_loaded").choose(c) == Choice(1, 2)
    assert make_policy("least_loaded").choose(make_candidates("pdm", fits=[True, False, False])) is None


def test_a_mixed_rank_keeps_what_it_prefills() -> None:
    c = make_candidates("pmd", pending_tokens=[900, 0, 0])
    assert make_policy("least_loaded").choose(c) == Choice(1, 1)


def test_ties_go_to_the_rank_placed_on_least() -> None:
    c = make_candidates("mmm", placements=[5, 3, 4])
    assert make_policy("least_loaded").choose(c) == Choice(1, 1)
