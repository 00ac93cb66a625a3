"""Placements by lot, while no conductor answers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from cluster_factory import request
from hypothesis import given
from hypothesis import strategies as st

from conductor.placement import (
    FailureKind,
    InstanceFailure,
    NoInstanceError,
    Role,
    Target,
    UnknownModelError,
)
from router.workers.local_choice import LocalChoice
from router.workers.messages import Instances, KnownInstance


def instance(name: str, role: Role = Role.MIXED, protocol: str = "vllm-nixl") -> KnownInstance:
    return KnownInstance(role, ["llama"], [Target(name, f"http://{name}:1", name, 1, protocol=protocol)])


def choice(*instances: KnownInstance, seed: int = 0) -> LocalChoice:
    made = LocalChoice(Random(seed))
    made.know(Instances(list(instances), {"other": "llama"}))
    return made


@given(st.integers(2, 12), st.integers(1, 200), st.integers(0, 1000))
def test_load_is_even(instances: int, requests: int, seed: int) -> None:
    local = choice(*(instance(f"e{n}") for n in range(instances)), seed=seed)
    for _ in range(requests):
        local.began(local.place(request(16), 0.0))
    loads = [local.under_way(f"e{n}") for n in range(instances)]
    assert sum(loads) == requests
    # By single draws the fullest of many would be far above this.
    assert max(loads) <= requests / instances + 6


def test_what_ended_counts_no_more() -> None:
    local = choice(instance("a"), instance("b"))
    placements = [local.place(request(16), 0.0) for _ in range(10)]
    for placement in placements:
        local.began(placement)
    assert local.under_way("a") + local.under_way("b") == 10
    for placement in placements:
        local.ended(placement)
    assert local.under_way("a") == local.under_way("b") == 0
    assert len({placement.placement_id for placement in placements}) == 10


def test_pairs_are_of_one_protocol() -> None:
    local = choice(
        instance("p0", Role.PREFILL),
        instance("p1", Role.PREFILL, "sglang"),
        instance("d0", Role.DECODE),
        instance("d1", Role.DECODE, "sglang"),
        instance("p2", Role.PREFILL, "trtllm"),
    )
    pairs = Counter(
        (p.prefill.instance_id, p.decode.instance_id)
        for p in (local.place(request(16), 0.0) for _ in range(60))
    )
    assert pairs.keys() == {("p0", "d0"), ("p1", "d1")}


def test_failures_and_exclusions() -> None:
    local = choice(instance("a"), instance("b"))
    local.failed(InstanceFailure("a", FailureKind.UNREACHABLE, "refused"), 10.0)
    assert {local.place(request(16), 10.5).prefill.instance_id for _ in range(20)} == {"b"}
    retry = request(16, excluded=frozenset({"b"}))
    assert local.place(retry, 10.5).prefill.instance_id == "a"  # avoided, but there is no other
    assert {local.place(request(16), 13.0).prefill.instance_id for _ in range(40)} == {"a", "b"}
    with pytest.raises(NoInstanceError):
        local.place(request(16, excluded=frozenset({"a", "b"})), 10.5)


def test_models_and_aliases() -> None:
    local = choice(instance("a"))
    assert local.place(request(16, model="other"), 0.0).model == "llama"
    assert local.place(request(16), 0.0, reserve=False).placement_id == ""
    assert [(card.model, card.instances) for card in local.models()] == [("llama", 1)]
    with pytest.raises(UnknownModelError, match="served: llama"):
        local.place(request(16, model="none"), 0.0)
