"""What each policy chooses, from estimates made by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cluster import make_instance
from conductor.costs import LLAMA_8B_H100
from conductor.placement import Role
from conductor.policies import POLICIES, Candidates, Choice, make_policy


def _candidates(roles: str, **arrays: list[float]) -> Candidates:
    """``roles`` has a letter a rank: p, d or m."""
    n = len(roles)
    ranks = [
        make_instance(
            instance_id=f"{role}{i}",
            url="http://x:1",
            role={"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[role],
            instance_class=LLAMA_8B_H100,
            protocol="vllm-nixl",
        ).ranks[0]
        for i, role in enumerate(roles)
    ]
    floats = {name: np.zeros(n) for name in ("queue_s", "prefill_s", "hand_off_s")} | {
        "tbt_s": np.full(n, 0.01)
    }
    ints = {
        name: np.zeros(n, dtype=np.int64)
        for name in ("overlap_tokens", "context_tokens", "pending_prefills", "active_decodes", "placements")
    }
    for name, values in arrays.items():
        known = floats if name in floats else ints
        known[name] = np.array(values, dtype=known[name].dtype)
    return Candidates(
        ranks=ranks,
        can_prefill=np.array([r == "p" for r in roles], dtype=bool),
        can_decode=np.array([r == "d" for r in roles], dtype=bool),
        is_mixed=np.array([r == "m" for r in roles], dtype=bool),
        prompt_tokens=1000,
        excluded={},
        ttft_objective_s=1.0,
        tbt_objective_s=0.05,
        **floats,
        **ints,
    )


def test_slo_weighs_cache_against_queue() -> None:
    cached_but_busy = _candidates("ppd", queue_s=[0.5, 0.0, 0.0], prefill_s=[0.1, 0.4, 0.0])
    assert make_policy("slo").choose(cached_but_busy) == Choice(1, 2)
    cached_and_free = _candidates("ppd", queue_s=[0.2, 0.0, 0.0], prefill_s=[0.1, 0.4, 0.0])
    assert make_policy("slo").choose(cached_and_free) == Choice(0, 2)


def test_slo_weighs_hand_off_against_batch() -> None:
    c = _candidates("pdd", hand_off_s=[0, 0.0, 0.3], tbt_s=[0, 0.020, 0.010])
    assert make_policy("slo").choose(c) == Choice(0, 1), (
        "0.3 of the TTFT objective outweighs 0.2 of the TBT one"
    )


def test_slo_prefers_meeting_both_objectives() -> None:
    c = _candidates("pdd", hand_off_s=[0, 0.0, 0.9], tbt_s=[0, 0.051, 0.010])
    assert make_policy("slo").choose(c) == Choice(0, 2)


def test_slo_compares_whole_and_pair() -> None:
    c = _candidates("mpd", prefill_s=[0.5, 0.1, 0], hand_off_s=[0, 0, 0.1])
    assert make_policy("slo").choose(c) == Choice(1, 2)
    c = replace(c, hand_off_s=np.array([0, 0, 0.5]))
    assert make_policy("slo").choose(c) == Choice(0, 0)


def test_prefix_match_ignores_load() -> None:
    c = _candidates("mm", overlap_tokens=[512, 0], queue_s=[9.0, 0.0])
    assert make_policy("prefix_match").choose(c) == Choice(0, 0)
    assert make_policy("least_loaded").choose(c) == Choice(1, 1)


def test_round_robin_takes_turns() -> None:
    policy, c = make_policy("round_robin"), _candidates("ppdd")
    choices = [policy.choose(c) for _ in range(4)]
    assert choices == [Choice(0, 2), Choice(1, 3), Choice(0, 2), Choice(1, 3)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("roles", ["", "p", "d", "pp"])
def test_no_placement_without_somewhere_to_decode_and_prefill(name: str, roles: str) -> None:
    assert make_policy(name).choose(_candidates(roles)) is None


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_a_choice_is_always_allowed(name: str, data: st.DataObject) -> None:
    roles = data.draw(st.text("pdm", min_size=1, max_size=8))
    values = st.lists(st.floats(0, 10), min_size=len(roles), max_size=len(roles))
    c = _candidates(roles, **{f: data.draw(values) for f in ("queue_s", "prefill_s", "hand_off_s", "tbt_s")})
    choice = make_policy(name).choose(c)
    if choice is None:
        return
    if choice.prefill == choice.decode:
        assert c.is_mixed[choice.prefill]
    else:
        assert c.can_prefill[choice.prefill]
        assert c.can_decode[choice.decode]


@given(data=st.data())
def test_slo_finds_the_best_of_all_pairs(data: st.DataObject) -> None:
    """Against an oracle that scores every whole placement and every pair."""
    roles = data.draw(st.text("pdm", min_size=1, max_size=6))
    values = st.lists(st.floats(0, 2), min_size=len(roles), max_size=len(roles))
    c = _candidates(roles, **{f: data.draw(values) for f in ("queue_s", "prefill_s", "hand_off_s", "tbt_s")})

    def score(prefill: int, decode: int) -> float:
        ttft = (
            c.queue_s[prefill] + c.prefill_s[prefill] + (c.hand_off_s[decode] if prefill != decode else 0.0)
        )
        tbt = c.tbt_s[decode] / c.tbt_objective_s
        return float(ttft + tbt + 1e3 * (int(ttft > 1.0) + int(tbt > 1.0)))

    pairs = [
        (p, d)
        for p in range(len(roles))
        for d in range(len(roles))
        if (p == d and roles[p] == "m") or (roles[p] == "p" and roles[d] == "d")
    ]
    choice = make_policy("slo").choose(c)
    if not pairs:
        assert choice is None
    else:
        assert choice is not None
        assert score(choice.prefill, choice.decode) <= min(score(p, d) for p, d in pairs) + 1e-9


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: slo"):
        make_policy("magic")
