"""Laws that hold for any cluster, with everything on: requests, tokens, room and bandwidth are conserved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from cache_index import Tier
from conductor.admission import Gate, WaitingRoom, make_rule
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import InstanceClass, Speed
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from simulator.cluster import (
    ClusterSimulation,
    ClusterSpec,
    InstanceSpec,
    Outage,
    Outcome,
    PoolSpec,
    Request,
    RequestResult,
    Simulated,
    make_scheduler,
)
from simulator.cluster.specification import POOL_TIERS

BLOCK = 16
SPEEDS = {
    Tier.HOST: Speed(50e9, 2e-4),
    Tier.DISK: Speed(5e9, 1e-3),
    Tier.POD: Speed(20e9, 5e-4),
    Tier.REMOTE: Speed(2e9, 2e-3),
}
FAST = replace(LLAMA_8B_H100, name="fast", tiers=SPEEDS, chunk_tokens=512)
SLOW = replace(
    FAST,
    name="slow",
    prefill_s_per_token=4 * FAST.prefill_s_per_token,
    decode_base_s=2 * FAST.decode_base_s,
    nic=Speed(5e9, 1e-4),
    chunk_tokens=128,
)


def instance(rng: Generator, name: str, role: Role) -> InstanceSpec:
    kind: InstanceClass = (FAST, SLOW)[rng.integers(2)]
    tiers = {Tier.HOST: int(rng.integers(20, 120)), Tier.DISK: int(rng.integers(60, 300))}
    return InstanceSpec(
        name,
        role,
        kind,
        kv_tokens=BLOCK * int(rng.integers(40, 120)),
        tier_tokens={tier: BLOCK * blocks for tier, blocks in tiers.items() if rng.random() < 0.6},
        pipeline=int(rng.integers(1, 5)) if role is Role.PREFILL else 1,
        sequences=int(rng.choice([3, 8, 256])),
        location=f"s/z/r{rng.integers(2)}/{name}",
        fetches_from_peers=bool(rng.random() < 0.6),
        streams_layers=bool(rng.random() < 0.5),
    )


def cluster(rng: Generator, *, outages: bool) -> ClusterSpec:
    mixed, pairs = ((2, 0), (0, 1), (0, 2), (1, 1))[rng.integers(4)]
    counts = {Role.MIXED: mixed, Role.PREFILL: pairs, Role.DECODE: pairs}
    instances = [
        instance(rng, f"{role.value}{number}", role) for role in Role for number in range(counts[role])
    ]
    names = [spec.name for spec in instances]
    members = frozenset(rng.choice(names, 2, replace=False).tolist())
    pools = [
        PoolSpec("near", Tier.POD, BLOCK * int(rng.integers(30, 200)), Speed(8e9, 1e-4), members),
        PoolSpec("far", Tier.REMOTE, BLOCK * int(rng.integers(100, 400)), Speed(1e9, 1e-3)),
    ]
    down = [name for name in names if rng.random() < 0.5] if outages else []
    return ClusterSpec(
        tuple(instances),
        tuple(pool for pool in pools if rng.random() < 0.5),
        tuple(
            Outage(name, at_s, for_s)
            for name in down
            for at_s, for_s in ((rng.uniform(0.0, 0.8), rng.uniform(0.02, 0.5)), (1.5, 0.1))
        ),
    )


def workload(rng: Generator, count: int) -> list[Request]:
    """Prompts that begin like one of five conversations."""
    arrivals_s = np.sort(rng.uniform(0.0, 0.8, count)).tolist()
    requests = []
    for number, arrival_s in enumerate(arrivals_s):
        prompt, chain = int(rng.integers(1, 500)), int(rng.integers(5))
        shared = min(prompt // BLOCK, int(rng.integers(0, 40)))
        hashes = np.concatenate(
            [
                10_000 * (chain + 1) + np.arange(shared),
                1_000_000 * (number + 1) + np.arange(prompt // BLOCK - shared),
            ]
        ).astype(np.uint64)
        requests.append(Request(number, arrival_s, prompt, int(rng.integers(1, 60)), hashes))
    return requests


def simulate(
    spec: ClusterSpec,
    requests: list[Request],
    policy: str,
    *,
    holds: bool,
    rejects: bool,
    step_by_step: bool = False,
) -> tuple[ClusterSimulation, Simulated]:
    objectives = Objectives(ttft_s=0.2, tbt_s=0.02)
    gate = Gate(make_rule("early", {"limit": 1.5})) if rejects else None
    scheduler = make_scheduler(spec, make_policy(policy), objectives, gate, block_tokens=BLOCK)
    dispatcher = Dispatcher(scheduler, WaitingRoom(6, ageing=0.5) if holds else None)
    simulation = ClusterSimulation(
        scheduler, spec, dispatcher, block_tokens=BLOCK, step_by_step=step_by_step
    )
    simulated = simulation.run(requests, lambda: simulation.engines.check_invariants())
    scheduler.check_invariants()
    simulation.engines.check_invariants()
    assert scheduler.active_placements == len(dispatcher) == 0
    return simulation, simulated


def check_requests(requests: list[Request], simulated: Simulated) -> None:
    results = simulated.results
    assert sorted(each.number for each in results) == list(range(len(requests)))
    finished = [each for each in results if each.outcome is Outcome.FINISHED]
    for each in finished:
        assert 0.0 <= each.queue_s < each.prefilled_s <= each.received_s <= each.ttft_s <= each.e2e_s
        assert 0.0 <= each.itl_s <= each.tbt_s + 1e-12
        loaded = each.host_tokens + each.disk_tokens + each.pod_tokens + each.remote_tokens
        assert 0 <= loaded + each.peer_tokens <= each.cached_tokens < each.prompt_tokens
    computed = sum(each.prompt_tokens - each.cached_tokens for each in finished)
    assert simulated.computed_tokens >= computed
    wasted = any(each.preemptions or each.retries for each in results)
    if not wasted and all(each.outcome in (Outcome.FINISHED, Outcome.REFUSED) for each in results):
        assert simulated.computed_tokens == computed


def check_index(spec: ClusterSpec, simulation: ClusterSimulation) -> None:
    """The index knows how much each store has."""
    index, engines = simulation.scheduler.index, simulation.engines
    held = {
        (holder.instance_id, tier): len(index.residencies(holder, tier))
        for holder, tier in simulation.holders
    }
    for store, tokens in zip(engines.stores, engines.cached_tokens.tolist(), strict=True):
        owners = spec.pools if store.tier in POOL_TIERS else spec.instances
        assert held[owners[store.owner].name, store.tier] * BLOCK == tokens


def numbers(result: RequestResult) -> tuple[object, ...]:
    sources = (result.host_tokens, result.disk_tokens, result.pod_tokens, result.remote_tokens)
    return (
        result.outcome,
        result.prefill_instance,
        result.decode_instance,
        result.cached_tokens,
        *sources,
        result.peer_tokens,
        result.preemptions,
        result.retries,
    )


def times_s(result: RequestResult) -> np.ndarray:
    return np.array(
        [
            result.queue_s,
            result.prefilled_s,
            result.received_s,
            result.ttft_s,
            result.tbt_s,
            result.itl_s,
            result.e2e_s,
        ]
    )


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 30),
    policy=st.sampled_from(["slo", "round_robin"]),
    outages=st.booleans(),
    holds=st.booleans(),
    rejects=st.booleans(),
)
def test_what_holds_for_any_cluster(
    seed: int, count: int, policy: str, outages: bool, holds: bool, rejects: bool
) -> None:
    rng = default_rng(seed)
    spec, requests = cluster(rng, outages=outages), workload(rng, count)
    run = partial(simulate, spec, requests, policy, holds=holds, rejects=rejects)
    simulation, simulated = run()
    check_requests(requests, simulated)
    check_index(spec, simulation)
    assert repr(run()[1]) == repr(simulated)
    slow = {each.number: each for each in run(step_by_step=True)[1].results}
    for each in simulated.results:
        other = slow[each.number]
        assert numbers(each) == numbers(other)
        np.testing.assert_allclose(times_s(each), times_s(other), rtol=1e-7, atol=1e-9)
