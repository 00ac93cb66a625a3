"""What the `slo` policy chooses, from estimates made by hand."""

import numpy as np
import pytest
from candidate_factory import make_candidates as _candidates
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.costs import Distance
from conductor.costs.tables import DECODE, MIXED, PREFILL
from conductor.policies import Candidates, Choice, make_policy
from conductor.policies.slo import Slo


def test_slo_weighs_cache_against_queue() -> None:
    cached_but_busy = _candidates("ppd", queue_s=[0.5, 0.0, 0.0], prefill_s=[0.1, 0.4, 0.0])
    assert make_policy("slo").choose(cached_but_busy) == Choice(1, 2)
    cached_and_free = _candidates("ppd", queue_s=[0.2, 0.0, 0.0], prefill_s=[0.1, 0.4, 0.0])
    assert make_policy("slo").choose(cached_and_free) == Choice(0, 2)


def test_slo_weighs_hand_off_against_batch() -> None:
    # The first decode rank holds most of the prompt already, the second would run a smaller batch.
    c = _candidates("pdd", overlap_tokens=[0, 992, 0], tbt_s=[0, 0.020, 0.010], kv_s_per_token=[3e-4] * 3)
    assert Slo(decode_prefill_tokens=0).choose(c) == Choice(0, 1), (
        "0.3 of the TTFT objective outweighs 0.4 instead of 0.2 of the TBT one"
    )


def test_slo_prefers_meeting_both_objectives() -> None:
    c = _candidates("pdd", overlap_tokens=[0, 992, 0], tbt_s=[0, 0.051, 0.010], kv_s_per_token=[7e-4] * 3)
    assert Slo(decode_prefill_tokens=0).choose(c) == Choice(0, 2)


def test_slo_compares_whole_and_pair() -> None:
    c = _candidates("mpd", prefill_s=[0.5, 0.1, 0], kv_s_per_token=[1e-4] * 3)
    assert make_policy("slo").choose(c) == Choice(1, 2)
    c = _candidates("mpd", prefill_s=[0.5, 0.1, 0], kv_s_per_token=[5e-4] * 3)
    assert make_policy("slo").choose(c) == Choice(0, 0)


def test_slo_charges_the_delay_inflicted_on_others() -> None:
    c = _candidates("mm", prefill_s=[0.2, 0.25], inflicted_s=[0.3, 0.0])
    assert make_policy("slo").choose(c) == Choice(1, 1)


def test_slo_charges_what_is_evicted() -> None:
    for roles, spared in (("mm", Choice(1, 1)), ("ppd", Choice(1, 2))):
        costs = {"prefill_s": [0.2, 0.25, 0.0][: len(roles)], "eviction_s": [0.3, 0.0, 0.0][: len(roles)]}
        assert Slo().choose(_candidates(roles, **costs)) == spared


def test_slo_spares_those_aboard_and_prefers_a_rank_where_nobody_can_be_harmed() -> None:
    c = _candidates("mm", prefill_s=[0.2, 0.2], queue_s=[0.0, 0.5], harm=[0.8, 0.0])
    assert make_policy("slo").choose(c) == Choice(1, 1)
    c = _candidates("mm", prefill_s=[0.2, 0.2], queue_s=[0.0, 0.5], harm=[0.4, 0.0])
    assert make_policy("slo").choose(c) == Choice(0, 0)


def test_slo_would_rather_harm_one_request_than_be_late_itself_and_slow() -> None:
    c = _candidates("mm", queue_s=[0.0, 1.3], prefill_s=[0.2, 0.2], harm=[1.2, 0.0])
    assert make_policy("slo").choose(c) == Choice(0, 0)


def test_slo_lets_a_decode_rank_prefill_a_short_tail_itself() -> None:
    c = _candidates("pd", overlap_tokens=[0, 992], prefill_s=[0.03, 0.01], kv_s_per_token=[1e-4] * 2)
    assert Slo().choose(c) == Choice(1, 1)
    assert Slo(decode_prefill_tokens=0).choose(c) == Choice(0, 1)
    long_tail = _candidates("pd", overlap_tokens=[0, 0], prefill_s=[0.03, 0.01], kv_s_per_token=[1e-4] * 2)
    assert Slo().choose(long_tail) == Choice(0, 1)


@pytest.mark.parametrize("protocol", [0, 1])
def test_slo_leaves_prompts_to_prefill_ranks_where_decode_ranks_compute_none(protocol: int) -> None:
    arrays = {"overlap_tokens": [0, 992], "prefill_s": [0.1, 0.01], "protocol": [protocol, protocol]}
    assert Slo().choose(_candidates("pd", **arrays)) == Choice(1, 1)
    assert Slo().choose(_candidates("pd", **arrays, joint_protocols=1 << protocol)) == Choice(0, 1)
    assert Slo().choose(_candidates("pd", **arrays, joint_protocols=2 >> protocol)) == Choice(1, 1)


def test_slo_prefers_the_decode_rank_that_is_near() -> None:
    c = _candidates("pdd", locations=[[0, 1, 2], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    assert c.links[Distance.RACK, 0] < c.links[Distance.ZONE, 0]
    assert make_policy("slo").choose(c) == Choice(0, 2)


def test_slo_pairs_only_within_a_protocol() -> None:
    c = _candidates("ppd", prefill_s=[0.1, 0.9, 0], protocol=[0, 1, 1])
    assert make_policy("slo").choose(c) == Choice(1, 2)
    assert make_policy("slo").choose(_candidates("pd", protocol=[0, 1])) is None


def test_slo_never_takes_a_rank_that_is_too_small() -> None:
    assert make_policy("slo").choose(_candidates("mm", prefill_s=[0.1, 0.5], fits=[False, True])) == Choice(
        1, 1
    )
    assert make_policy("slo").choose(_candidates("pd", fits=[True, False])) is None


def test_slo_fetches_by_the_plan_of_the_chosen_rank() -> None:
    assert make_policy("slo").choose(_candidates("mm", prefill_s=[0.1, 0.5], plan_peer=[1, -1])) == Choice(
        0, 0, 1
    )


def test_a_negative_tail_is_refused() -> None:
    with pytest.raises(ValueError, match="decode_prefill_tokens"):
        Slo(decode_prefill_tokens=-1)


def _hand_off_s(c: Candidates, prefill: int, decode: int) -> float:
    lacking = c.prompt_tokens - int(c.overlap_tokens[decode])
    shared = [
        level
        for level in range(len(c.locations))
        if c.locations[level, prefill] == c.locations[level, decode]
    ]
    s_per_byte, latency_s = c.links[shared[0] if shared else len(c.locations)]
    s_per_token = max(
        c.kv_s_per_token[decode], c.kv_s_per_token[prefill], c.kv_bytes_per_token[decode] * s_per_byte
    )
    return float(c.link_latency_s[decode] + latency_s + lacking * s_per_token) if lacking > 0 else 0.0


def _score(c: Candidates, prefill: int, decode: int) -> float:
    start_s = float(c.queue_s[prefill] + c.prefill_s[prefill])
    then_s = float(c.wait_s[decode])
    if prefill != decode:
        then_s = max(then_s, _hand_off_s(c, prefill, decode))
    ttft = (start_s + then_s) / c.ttft_objective_s
    tbt = float(c.tbt_s[decode]) / c.tbt_objective_s
    others = float(c.inflicted_s[prefill] + c.eviction_s[prefill]) / c.ttft_objective_s
    missed = min(max((ttft - 0.8) / 0.4, 0.0), 1.0) + float(c.harm[prefill])
    return missed + ttft + tbt * tbt + others


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_slo_finds_the_best_of_all_pairs(data: st.DataObject) -> None:
    """Against an oracle that scores every whole placement and every pair; up to four prefill ranks are searched."""
    roles = data.draw(st.text("pdm", min_size=1, max_size=9).filter(lambda text: text.count("p") <= 4))
    size = len(roles)

    def column(strategy: st.SearchStrategy[float]) -> list[float]:
        return data.draw(st.lists(strategy, min_size=size, max_size=size))

    c = _candidates(
        roles,
        queue_s=column(st.floats(0, 2)),
        prefill_s=column(st.floats(0, 2)),
        inflicted_s=column(st.floats(0, 2)),
        eviction_s=column(st.floats(0, 2)),
        harm=column(st.floats(0, 2)),
        wait_s=column(st.floats(0, 1)),
        tbt_s=column(st.floats(0, 0.1)),
        kv_s_per_token=column(st.floats(1e-6, 1e-3)),
        overlap_tokens=column(st.integers(0, 62).map(lambda blocks: 16 * blocks)),
        protocol=column(st.integers(0, 1)),
        fits=column(st.booleans()),
        locations=[column(st.integers(0, 1)) for _ in range(4)],
    )
    everyone = range(size)
    possible = [(i, i) for i in everyone if c.fits[i] and c.roles[i] == MIXED]
    possible += [
        (i, i)
        for i in everyone
        if c.fits[i] and c.roles[i] == DECODE and c.prompt_tokens - c.plan_tokens[i] <= 512
    ]
    possible += [
        (p, d)
        for p in everyone
        for d in everyone
        if c.roles[p] == PREFILL
        and c.roles[d] == DECODE
        and c.fits[p]
        and c.fits[d]
        and c.protocol[p] == c.protocol[d]
    ]
    choice = make_policy("slo").choose(c)
    if not possible:
        assert choice is None
        return
    assert choice is not None
    assert (choice.prefill, choice.decode) in possible
    assert _score(c, choice.prefill, choice.decode) <= min(_score(c, p, d) for p, d in possible) + 1e-9


def test_the_choice_does_not_depend_on_the_order_of_ranks() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        roles = "".join(generator.choice(list("pdm"), 12))
        columns = {name: generator.random(12) for name in ("queue_s", "prefill_s", "tbt_s", "inflicted_s")}
        order = generator.permutation(12)
        plain = Slo().choose(_candidates(roles, **columns))
        mixed = Slo().choose(
            _candidates(
                "".join(roles[i] for i in order), **{n: values[order] for n, values in columns.items()}
            )
        )
        assert plain is not None
        assert mixed is not None
        assert (order[mixed.prefill], order[mixed.decode]) == (plain.prefill, plain.decode)
