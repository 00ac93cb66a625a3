"""What a cluster can consist of, and how mistakes are explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Speed
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from simulator.cluster import ClusterSimulation, ClusterSpec, InstanceSpec, Outage, PoolSpec, make_scheduler

KIND = replace(LLAMA_8B_H100, tiers={Tier.HOST: Speed(1e9, 0.0)})
PREFILL = InstanceSpec("p", Role.PREFILL, KIND, 1_000)
SPEED = Speed(1e9, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(PREFILL, kv_tokens=0), "instance 'p': kv_tokens must be positive, not 0"),
        (lambda: replace(PREFILL, pipeline=0), "instance 'p': pipeline must be at least 1, not 0"),
        (lambda: replace(PREFILL, sequences=0), "instance 'p': sequences must be at least 1, not 0"),
        (lambda: replace(PREFILL, role=Role.MIXED, pipeline=2), "'p': only an instance that just prefills"),
        (lambda: replace(PREFILL, tier_tokens={Tier.POD: 5}), "'p': tier pod is a pool's, not its own"),
        (lambda: replace(PREFILL, tier_tokens={Tier.DISK: 5}), "has no speed for tier disk"),
        (lambda: replace(PREFILL, tier_tokens={Tier.HOST: 0}), "tokens of tier host must be positive, not 0"),
        (lambda: PoolSpec("x", Tier.HOST, 5, SPEED), "pool 'x': tier host is an instance's own"),
        (lambda: PoolSpec("x", Tier.POD, 0, SPEED), "pool 'x': capacity must be positive, not 0"),
        (lambda: Outage("p", -1.0, 1.0), "outage of 'p': at_s must not be negative, not -1.0"),
        (lambda: Outage("p", nan, 1.0), "at_s must not be negative, not nan"),
        (lambda: Outage("p", inf, 1.0), "at_s must not be negative, not inf"),
        (lambda: Outage("p", 1.0, 0.0), "outage of 'p': for_s must be positive, not 0.0"),
        (lambda: ClusterSpec((PREFILL, PREFILL)), "two instances are called 'p'"),
        (
            lambda: ClusterSpec((PREFILL,), (PoolSpec("p", Tier.POD, 5, SPEED),)),
            "pool 'p': something else has that name",
        ),
        (
            lambda: ClusterSpec((PREFILL,), 2 * (PoolSpec("x", Tier.POD, 5, SPEED),)),
            "pool 'x': something else has that name",
        ),
        (
            lambda: ClusterSpec((PREFILL,), (PoolSpec("x", Tier.POD, 5, SPEED, frozenset({"q"})),)),
            "pool 'x': no instance is called q",
        ),
        (lambda: ClusterSpec((PREFILL,), outages=(Outage("q", 1.0, 1.0),)), "no instance is called 'q'"),
        (
            lambda: ClusterSpec((PREFILL,), outages=(Outage("p", 3.0, 1.0), Outage("p", 1.0, 2.5))),
            "outage of 'p' at 3.0 s: it is down since 1.0 s, for 2.5 s",
        ),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_outages_of_one_instance_may_touch() -> None:
    ClusterSpec((PREFILL,), outages=(Outage("p", 3.0, 1.0), Outage("p", 1.0, 2.0)))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (ClusterSpec((replace(PREFILL, role=Role.MIXED, kv_tokens=15),)), "instance 'p': 15 tokens"),
        (
            ClusterSpec((replace(PREFILL, role=Role.MIXED, tier_tokens={Tier.HOST: 15}),)),
            "instance 'p', tier host: 15 tokens",
        ),
        (
            ClusterSpec((replace(PREFILL, role=Role.MIXED),), (PoolSpec("x", Tier.POD, 15, SPEED),)),
            "pool 'x': 15 tokens",
        ),
    ],
)
def test_a_store_that_holds_no_block_is_refused(cluster: ClusterSpec, message: str) -> None:
    scheduler = make_scheduler(cluster, make_policy("slo"), Objectives(), block_tokens=16)
    with pytest.raises(ValueError, match=f"{message} do not hold a block of 16"):
        ClusterSimulation(scheduler, cluster, block_tokens=16)
