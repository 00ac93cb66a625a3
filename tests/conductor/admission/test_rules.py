from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from candidate_factory import make_candidates
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.admission import (
    RULES,
    AdmissionRule,
    DecodeForecast,
    DecodeSpeeds,
    Prospect,
    Rejection,
    decode_positions,
    make_rule,
)
from conductor.placement import PlacementRequest
from conductor.policies import Candidates, Choice

# Steps of 10 ms + 1 ms a sequence: with the objective of 50 ms, 40 sequences are a load of 1.
BASE_S, PER_SEQUENCE_S = 0.010, 0.001


def request(priority: int = 0, request_id: str = "r") -> PlacementRequest:
    return PlacementRequest(request_id, "m", np.empty(0, np.uint32), 1000, priority=priority)


def prospect(candidates: Candidates, choice: Choice, **given: Any) -> Prospect:
    """As the scheduler makes it, from what the candidates say of the choice."""
    c = candidates
    rows = np.array([c.ranks[i].row for i in decode_positions(c)], np.intp)
    ttft_s = float(c.ttft_s[choice.prefill])
    if choice.prefill != choice.decode:
        ttft_s += float(c.hand_off_s[choice.decode])
    size = len(rows)
    values: dict[str, Any] = {
        "now_s": 0.0,
        "ttft_s": ttft_s,
        "tbt_s": float(c.tbt_s[choice.decode]),
        "ttft_objective_s": 1.0,
        "tbt_objective_s": 0.05,
        "prefill_end_s": ttft_s,
        "decode_rows": rows,
        "decode_speeds": DecodeSpeeds(np.full(size, BASE_S), np.full(size, PER_SEQUENCE_S), np.zeros(size)),
    }
    return Prospect(**(values | given))


def decoding(row: int, sequences: int, *, start_s: float, end_s: float) -> DecodeForecast:
    forecast = DecodeForecast()
    more(forecast, row, sequences, start_s=start_s, end_s=end_s)
    return forecast


def more(forecast: DecodeForecast, row: int, sequences: int, *, start_s: float, end_s: float) -> None:
    for _ in range(sequences):
        name = f"p{len(forecast)}"
        forecast.placed(name, row, start_s=start_s, end_s=end_s, context_tokens=1000, output_tokens=100)
        if start_s <= 0:
            forecast.started(name, start_s)


def judge(
    rule: AdmissionRule,
    candidates: Candidates,
    choice: Choice,
    forecast: DecodeForecast | None = None,
    *,
    priority: int = 0,
    **given: Any,
) -> Rejection | None:
    return rule.judge(
        request(priority),
        candidates,
        choice,
        prospect(candidates, choice, **given),
        forecast or DecodeForecast(),
    )


PAIR = Choice(0, 1)


@pytest.mark.parametrize("name", RULES)
def test_an_idle_cluster_admits(name: str) -> None:
    assert judge(make_rule(name), make_candidates("pd", prefill_s=[0.3, 0.3]), PAIR) is None


@pytest.mark.parametrize("name", [name for name in RULES if name != "accept_all"])
def test_a_long_prefill_queue_is_turned_away(name: str) -> None:
    candidates = make_candidates("pd", prefill_s=[0.3, 0.3], queue_s=[7.0, 0.0])
    rejection = judge(make_rule(name), candidates, PAIR)
    assert rejection is not None
    assert rejection.stage == "prefill"
    assert rejection.load == pytest.approx(7.3)
    assert 6.0 <= rejection.retry_after_s <= 6.3 * 1.25  # when the queue is short enough
    assert "7.30 s" in rejection.reason
    assert "objective 1 s" in rejection.reason


def test_accept_all_serves_everything() -> None:
    candidates = make_candidates("pd", queue_s=[100.0, 0.0], tbt_s=[9.0, 9.0])
    rule = make_rule("accept_all")
    assert judge(rule, candidates, PAIR) is None
    assert rule.judge_decode(request(), prospect(candidates, PAIR), DecodeForecast()) is None


def test_the_baseline_finds_out_about_decode_when_the_prefill_has_ended() -> None:
    candidates = make_candidates("pd", prefill_s=[0.3, 0.0], tbt_s=[0.0, 0.071])
    forecast = decoding(1, 60, start_s=0.0, end_s=8.0)
    baseline, early = make_rule("baseline"), make_rule("early")
    assert judge(baseline, candidates, PAIR, forecast) is None
    late = prospect(candidates, PAIR, now_s=0.3)
    rejection = baseline.judge_decode(request(), late, forecast)
    assert rejection is not None
    assert rejection.stage == "decode"
    assert rejection.load == pytest.approx(0.071 / 0.05)
    assert 8.0 <= rejection.retry_after_s <= 8.0 * 1.25
    assert "71.0 ms" in rejection.reason
    at_arrival = judge(early, candidates, PAIR, forecast)
    assert at_arrival is not None
    assert at_arrival.stage == "decode"
    assert early.judge_decode(request(), late, forecast) is None


def test_early_rejection_is_blind_to_what_is_being_prefilled() -> None:
    """The fault that prediction repairs: 60 decodes begin before this prefill ends."""
    candidates = make_candidates("pd", prefill_s=[0.9, 0.0], tbt_s=[0.0, 0.071])
    coming = decoding(1, 60, start_s=0.5, end_s=20.0)
    assert judge(make_rule("early"), candidates, PAIR, coming) is None
    for name in ("early_predicted", "predicted"):
        rejection = judge(make_rule(name), candidates, PAIR, coming)
        assert rejection is not None
        assert rejection.stage == "decode"


def test_early_rejection_is_blind_to_what_is_about_to_end() -> None:
    candidates = make_candidates("pd", prefill_s=[0.9, 0.0], tbt_s=[0.0, 0.071])
    going = decoding(1, 60, start_s=-9.5, end_s=0.4)
    assert judge(make_rule("early"), candidates, PAIR, going) is not None
    assert judge(make_rule("early_predicted", {"decode_s": 10.0}), candidates, PAIR, going) is None
    assert judge(make_rule("predicted"), candidates, PAIR, going) is None


def test_the_system_level_takes_all_decodes_to_be_equally_long() -> None:
    """60 long answers: at system level they are over after 10 s, with their own lengths they are not."""
    candidates = make_candidates("pd", prefill_s=[0.9, 0.0], tbt_s=[0.0, 0.071])
    long_answers = decoding(1, 60, start_s=-9.5, end_s=30.0)
    assert judge(make_rule("early_predicted", {"decode_s": 10.0}), candidates, PAIR, long_answers) is None
    rejection = judge(make_rule("predicted"), candidates, PAIR, long_answers)
    assert rejection is not None
    assert 25.0 <= rejection.retry_after_s <= 30.0 * 1.25


def test_the_system_level_judges_the_mean_of_the_pool() -> None:
    candidates = make_candidates("pdd", prefill_s=[0.5, 0.0, 0.0], tbt_s=[0.0, 0.071, 0.011])
    uneven = decoding(1, 60, start_s=0.0, end_s=9.0)
    assert judge(make_rule("early_predicted"), candidates, PAIR, uneven) is None  # (60 + 0) / 2 = 30
    more(uneven, 2, 30, start_s=0.0, end_s=9.0)
    rejection = judge(make_rule("early_predicted"), candidates, PAIR, uneven)
    assert rejection is not None
    assert rejection.load == pytest.approx((BASE_S + 45.5 * PER_SEQUENCE_S) / 0.05)


def test_predicted_judges_the_ranks_that_were_chosen() -> None:
    """Another rank has room, but it is not the one that would get the request."""
    candidates = make_candidates("pdd", prefill_s=[0.5, 0.0, 0.0], tbt_s=[0.0, 0.071, 0.011])
    busy = decoding(1, 60, start_s=0.0, end_s=30.0)
    assert judge(make_rule("predicted"), candidates, Choice(0, 2), busy) is None
    rejection = judge(make_rule("predicted"), candidates, Choice(0, 1), busy)
    assert rejection is not None
    assert rejection.stage == "decode"
    assert 29.0 <= rejection.retry_after_s <= 30.0 * 1.25


def test_predicted_leaves_room_for_those_aboard() -> None:
    """At a load of 1 the rank would be as slow as allowed for everybody; 0.9 is the limit."""
    candidates = make_candidates("pd", tbt_s=[0.0, 0.047])
    assert judge(make_rule("predicted"), candidates, PAIR, decoding(1, 34, start_s=0.0, end_s=30.0)) is None
    close = decoding(1, 36, start_s=0.0, end_s=30.0)
    assert judge(make_rule("predicted"), candidates, PAIR, close) is not None
    assert judge(make_rule("early"), candidates, PAIR, close) is None


def test_predicted_sees_what_begins_during_the_answer() -> None:
    candidates = make_candidates("pd", prefill_s=[0.3, 0.0], tbt_s=[0.0, 0.071])
    later = decoding(1, 60, start_s=2.0, end_s=30.0)  # half of 100 tokens at 50 ms: until 2.8
    assert judge(make_rule("predicted"), candidates, PAIR, later) is not None


def test_predicted_takes_whole_placements_on_a_decode_rank() -> None:
    """A short prompt prefilled on its decode rank, past the queue of the prefill rank."""
    candidates = make_candidates("pd", queue_s=[5.0, 0.0], prefill_s=[0.1, 0.1], tbt_s=[0.0, 0.056])
    forecast = decoding(1, 10, start_s=0.0, end_s=9.0)
    assert judge(make_rule("predicted"), candidates, Choice(1, 1), forecast) is None


def test_a_prompt_too_long_for_its_objective_is_served_when_it_need_hardly_wait() -> None:
    rule = make_rule("predicted")
    long_prompt = make_candidates("pd", prefill_s=[4.0, 0.0], queue_s=[0.05, 0.0])
    assert judge(make_rule("early"), long_prompt, PAIR) is not None
    assert judge(rule, long_prompt, PAIR) is None
    behind_others = make_candidates("pd", prefill_s=[4.0, 0.0], queue_s=[0.5, 0.0])
    rejection = judge(rule, behind_others, PAIR)
    assert rejection is not None
    assert rejection.load == pytest.approx(5.0)
    assert "this prompt takes 4.00 s without any queue" in rejection.reason


def test_predicted_serves_nobody_who_costs_more_than_is_gained() -> None:
    rule, whole = make_rule("predicted"), Choice(0, 0)
    mild = make_candidates("m", prefill_s=[0.4], harm=[0.8], tbt_s=[0.02])
    assert judge(rule, mild, whole) is None
    severe = make_candidates("m", prefill_s=[0.4], harm=[2.3], tbt_s=[0.02])
    assert judge(make_rule("early"), severe, whole) is None
    rejection = judge(rule, severe, whole)
    assert rejection is not None
    assert rejection.stage == "decode"
    assert rejection.load == pytest.approx(2.3)
    assert "2.3 answers under way would be slowed down beyond 50 ms" in rejection.reason
    assert 2.0 <= rejection.retry_after_s <= 2.0 * 1.25, "as long as an answer of 100 tokens takes"
    assert judge(rule, mild, whole, priority=-1) is not None
    assert judge(rule, severe, whole, priority=8) is None


def test_a_prompt_too_long_for_its_objective_must_not_harm_others() -> None:
    rule, whole = make_rule("predicted"), Choice(0, 0)
    assert judge(rule, make_candidates("m", prefill_s=[4.0], harm=[0.05]), whole) is None
    rejection = judge(rule, make_candidates("m", prefill_s=[4.0], harm=[0.5]), whole)
    assert rejection is not None
    assert rejection.load == pytest.approx(5.0)


def test_priority_raises_the_limit() -> None:
    candidates = make_candidates("pd", prefill_s=[0.2, 0.0], queue_s=[1.2, 0.0])
    rule = make_rule("predicted", {"limit": 1.1, "priority_step": 0.25})
    assert judge(rule, candidates, PAIR) is not None
    assert judge(rule, candidates, PAIR, priority=2) is None  # up to 1.65
    assert judge(rule, make_candidates("pd", queue_s=[50.0, 0.0]), PAIR, priority=10**9) is not None
    light = make_candidates("pd", prefill_s=[0.2, 0.0], queue_s=[0.4, 0.0])
    assert judge(rule, light, PAIR) is None
    assert judge(rule, light, PAIR, priority=-2) is not None  # up to 0.55
    assert judge(make_rule("early"), candidates, PAIR, priority=8) is not None


def full_memory(**given: Any) -> Candidates:
    return make_candidates(
        "pd",
        prompt_tokens=1000,
        output_tokens=100,
        kv_capacity_tokens=[60_000, 60_000],
        wait_s=[0.0, 6.0],
        tbt_s=[0.01, 0.03],
        **given,
    )


def test_full_memory_delays_the_first_token() -> None:
    """Steps are fast enough, but memory has run out."""
    forecast = decoding(1, 60, start_s=0.0, end_s=30.0)
    speeds = {
        "ttft_s": 6.3,
        "prefill_end_s": 0.3,
        "decode_speeds": DecodeSpeeds(np.full(1, 0.01), np.zeros(1), np.zeros(1)),
    }
    rule = make_rule("predicted")
    rejection = judge(rule, full_memory(kv_usage=[0.0, 1.0]), PAIR, forecast, **speeds)
    assert rejection is not None
    assert rejection.stage == "prefill"
    # Answers that share a prefix take less than their contexts add up to, and the engine knows.
    assert judge(rule, full_memory(kv_usage=[0.0, 0.4]), PAIR, forecast, **speeds) is None
    queued = full_memory(kv_usage=[0.0, 0.4], queue_s=[0.4, 0.0])
    assert judge(rule, queued, PAIR, forecast, **(speeds | {"ttft_s": 6.7})) is None
    ending = decoding(1, 60, start_s=-9.0, end_s=0.1)
    assert judge(rule, full_memory(kv_usage=[0.0, 1.0]), PAIR, ending, **speeds) is None


@settings(deadline=None)
@given(
    st.sampled_from([name for name in RULES if name != "accept_all"]),
    st.floats(0, 300),
    st.floats(0, 300),
    st.integers(0, 300),
    st.floats(0.1, 500),
    st.text(max_size=8),
)
def test_rejections_are_bounded_and_say_why(
    name: str, queue_s: float, prefill_s: float, sequences: int, end_s: float, request_id: str
) -> None:
    step_s = BASE_S + PER_SEQUENCE_S * (sequences + 1)
    candidates = make_candidates("pd", queue_s=[queue_s, 0], prefill_s=[prefill_s, 0], tbt_s=[0, step_s])
    forecast = decoding(1, sequences, start_s=0.0, end_s=end_s)
    made = prospect(candidates, PAIR)
    rejection = make_rule(name).judge(request(request_id=request_id), candidates, PAIR, made, forecast)
    if rejection is None:
        assert queue_s + prefill_s <= 1.0 or (name == "predicted" and queue_s <= 0.09)
        return
    assert 1.0 <= rejection.retry_after_s <= 60.0
    assert rejection.load > 0.9
    assert rejection.stage in ("prefill", "decode")
    assert rejection.key is None
    assert "overloaded" in rejection.reason


def test_clients_turned_away_together_do_not_come_back_together() -> None:
    candidates = make_candidates("pd", queue_s=[11.0, 0.0])
    rule, made = make_rule("early"), prospect(candidates, PAIR)
    waits = set()
    for i in range(50):
        one = request(request_id=f"r{i}")
        rejection = rule.judge(one, candidates, PAIR, made, DecodeForecast())
        assert rejection is not None
        assert rejection == rule.judge(one, candidates, PAIR, made, DecodeForecast())
        waits.add(rejection.retry_after_s)
    assert len(waits) == 50
    assert 10.0 <= min(waits) < 10.5 < 12.0 < max(waits) <= 12.5


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("erly", {}, "unknown admission rule 'erly'; known: accept_all, baseline, early"),
        ("early", {"limt": 1.0}, "no parameter 'limt'; known: limit"),
        ("accept_all", {"limit": 1.0}, "it has none"),
        ("early", {"limit": -1.0}, "limit must be at least 0, not -1.0"),
        ("early", {"limit": float("nan")}, "limit must be at least 0, not nan"),
        ("early", {"limit": "high"}, "must be a number, not 'high'"),
        ("early_predicted", {"decode_s": 0.0}, "decode_s must be at least 0.001"),
        ("predicted", {"priority_step": 2.0}, "priority_step must be from 0 to 1"),
    ],
)
def test_rules_are_made_by_name(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        make_rule(name, parameters)
    assert says in str(error.value)


@pytest.mark.parametrize("name", RULES)
def test_rules_know_their_name(name: str) -> None:
    assert make_rule(name).name == name
