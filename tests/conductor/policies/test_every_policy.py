"""What holds for every policy, over random candidates."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, overload

import numpy as np
import pytest
from candidate_factory import make_candidates
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.placement import PlacementRequest
from conductor.policies import POLICIES, Candidates, Choice, Policy, make_policy
from conductor.policies.candidates import NO_PEER
from conductor.rank import RankState

# Every policy as configured by default, and the settings that make one work differently.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in POLICIES},
    "dynamo by softmax": ("dynamo", {"router_temperature": 0.5, "overlap_score_credit_decay": 1.0}),
    "smg by tree": ("smg", {"mode": "approximate", "cache_threshold": 0.0, "max_tree_size": 4096}),
    "smg by usage": ("smg", {"balance_token_usage_threshold": 0.3}),
    "preble rebalancing": ("preble", {"rebalance_after_requests": 0, "rebalance_ratio": 1.5}),
}
# Turns and lots go by the order of the candidates; the others by what the candidates are.
BY_SCORE = sorted(VARIANTS.keys() - {"random", "round_robin", "dynamo by softmax"})
BASELINES = sorted(VARIANTS.keys() - {"slo"})

ROLES = st.text("pdm", min_size=1, max_size=8)
SEEDS = st.integers(0, 2**32 - 1)


def _policy(variant: str, seed: int = 0) -> Policy:
    name, parameters = VARIANTS[variant]
    return make_policy(name, parameters, seed=seed)


def _random_candidates(roles: str, seed: int, requests: int = 1) -> list[Candidates]:
    """``requests`` one after another over the same ranks; no two ranks are alike."""
    rng = np.random.default_rng(seed)
    n = len(roles)
    static: dict[str, Any] = {
        "protocol": rng.integers(0, 2, n) * rng.integers(0, 2),
        "kv_capacity_tokens": rng.integers(10_000, 400_000, n),
    }
    made: list[Candidates] = []
    for number in range(requests):
        prompt = int(rng.integers(1, 40)) * 16 + 1
        levels = np.minimum(np.cumsum(rng.integers(0, 12, (5, n)), axis=0) * 16, prompt - 1)
        tokens = rng.integers(0, 3, prompt, dtype=np.uint32) // 2
        peers = np.where(rng.random(n) < 0.5, (np.arange(n) + 1) % n, NO_PEER)
        c = make_candidates(
            roles,
            prompt_tokens=prompt,
            output_tokens=int(rng.integers(1, 500)),
            now_s=3.0 * number,
            request=PlacementRequest(f"r{number}", "m", tokens, prompt),
            local_tokens=levels.tolist(),
            plan_peer=peers if n > 1 else [NO_PEER],
            fits=rng.random(n) < 0.85,
            queue_s=rng.random(n),
            prefill_s=rng.random(n),
            hand_off_s=rng.random(n),
            tbt_s=rng.random(n) / 10,
            inflicted_s=rng.random(n),
            pending_prefills=rng.integers(0, 5, n),
            pending_tokens=rng.integers(0, 20_000, n),
            active_decodes=rng.integers(0, 200, n),
            context_tokens=rng.integers(0, 400_000, n),
            running=rng.integers(0, 200, n),
            waiting=rng.integers(0, 9, n),
            kv_usage=rng.random(n),
            placements=rng.permutation(1000 + n)[:n],
            **static,
        )
        made.append(replace(c, ranks=made[0].ranks) if made else c)
    return made


def _reordered(c: Candidates, order: np.ndarray, ranks: list[RankState]) -> Candidates:
    changed: dict[str, Any] = {"ranks": ranks}
    for field in fields(c):
        value = getattr(c, field.name)
        if isinstance(value, np.ndarray) and field.name != "links":
            kept = value[..., order]
            # Laid out by rank, as the estimator does.
            changed[field.name] = np.ascontiguousarray(kept.T).T if field.name == "local_tokens" else kept
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    peers = changed["plan_peer"]
    changed["plan_peer"] = np.where(peers == NO_PEER, NO_PEER, position[peers])
    return replace(c, **changed)


def _is_possible(c: Candidates) -> bool:
    whole = (c.is_mixed & c.fits).any()
    pairs = (c.can_prefill & c.fits)[:, None] & (c.can_decode & c.fits) & (c.protocol[:, None] == c.protocol)
    return bool(whole or pairs.any())


def _check(variant: str, c: Candidates, choice: Choice) -> None:
    prefill, decode = choice.prefill, choice.decode
    assert c.fits[prefill] and c.fits[decode]
    if prefill == decode:
        assert c.is_mixed[prefill] or (variant == "slo" and c.can_decode[prefill])
    else:
        assert c.can_prefill[prefill] and c.can_decode[decode]
        assert c.protocol[prefill] == c.protocol[decode]
    if variant not in ("slo", "mooncake"):
        assert choice.peer == NO_PEER
    elif choice.peer != NO_PEER:
        assert 0 <= choice.peer < len(c.ranks) and choice.peer != prefill


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=50, deadline=None)
@given(roles=ROLES, seed=SEEDS)
def test_a_choice_is_always_allowed(variant: str, roles: str, seed: int) -> None:
    policy = _policy(variant)
    for c in _random_candidates(roles, seed, requests=4):
        choice = policy.choose(c)
        if choice is not None:
            _check(variant, c, choice)


@pytest.mark.parametrize("variant", BASELINES)
@settings(max_examples=50, deadline=None)
@given(roles=ROLES, seed=SEEDS)
def test_a_choice_is_made_exactly_when_one_is_possible(variant: str, roles: str, seed: int) -> None:
    policy = _policy(variant)
    for c in _random_candidates(roles, seed, requests=3):
        assert (policy.choose(c) is not None) == _is_possible(c)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("roles", ["", "p", "pp"])
def test_no_placement_without_somewhere_to_decode(variant: str, roles: str) -> None:
    assert _policy(variant).choose(make_candidates(roles)) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_placement_where_the_request_does_not_fit(variant: str) -> None:
    assert _policy(variant).choose(make_candidates("pdm", fits=[True, False, False])) is None


@pytest.mark.parametrize("variant", BY_SCORE)
@settings(max_examples=50, deadline=None)
@given(roles=ROLES, seed=SEEDS)
def test_the_order_of_the_ranks_does_not_matter(variant: str, roles: str, seed: int) -> None:
    """Over several requests, so that what a policy remembers is held to it too."""
    if VARIANTS[variant][0] == "prefix_match":
        roles = roles.replace("d", "m")  # it decodes in turn
    order = np.random.default_rng(seed).permutation(len(roles))
    policy, other = _policy(variant), _policy(variant)
    sequence = _random_candidates(roles, seed, requests=5)
    ranks = [sequence[0].ranks[i] for i in order]
    for c in sequence:
        shuffled = _reordered(c, order, ranks)
        choice, same = policy.choose(c), other.choose(shuffled)
        if choice is None or same is None:
            assert choice is same
            continue
        assert c.ranks[choice.prefill] is shuffled.ranks[same.prefill]
        assert c.ranks[choice.decode] is shuffled.ranks[same.decode]
        peers = [
            -1 if p == NO_PEER else at.ranks[p].row for p, at in ((choice.peer, c), (same.peer, shuffled))
        ]
        assert peers[0] == peers[1]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=25, deadline=None)
@given(roles=ROLES, seed=SEEDS)
def test_the_same_seed_chooses_the_same(variant: str, roles: str, seed: int) -> None:
    sequence = _random_candidates(roles, seed, requests=5)
    policy, again = _policy(variant, seed), _policy(variant, seed)
    assert [policy.choose(c) for c in sequence] == [again.choose(c) for c in sequence]


class _CountedRanks(Sequence[RankState]):
    def __init__(self, ranks: Sequence[RankState]) -> None:
        self._ranks = ranks
        self.looked_at = 0

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> RankState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RankState]: ...
    def __getitem__(self, index: int | slice) -> RankState | Sequence[RankState]:
        self.looked_at += 1
        return self._ranks[index]

    def __iter__(self) -> Iterator[RankState]:
        self.looked_at += len(self._ranks)
        return iter(self._ranks)


@pytest.mark.parametrize("roles", ["m" * 10_000, "pppd" * 2_500], ids=["mixed", "pairs"])
def test_a_decision_does_not_walk_over_the_ranks(roles: str) -> None:
    """Of 10,000 ranks, it reads arrays only."""
    sequence = _random_candidates(roles, seed=1, requests=3)
    for variant in VARIANTS:
        policy, ranks = _policy(variant), _CountedRanks(sequence[0].ranks)
        for c in (replace(c, ranks=ranks) for c in sequence):
            choice = policy.choose(c)
            assert choice is not None
            _check(variant, c, choice)
        assert ranks.looked_at < 10, variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_single_rank_takes_everything(variant: str) -> None:
    assert _policy(variant).choose(make_candidates("m")) == Choice(0, 0)
