"""Laws that hold for any cluster, with everything on: requests, tokens, room and bandwidth are conserved."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from random_cluster import BLOCK, encoding, random_cluster, random_requests

from cache_index import Holder, Tier
from conductor.admission import Gate, WaitingRoom, make_rule
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives
from conductor.policies import make_policy
from conductor.tier_planner_config import TierPlannerConfig
from simulator.cluster import (
    ClusterSimulation,
    ClusterSpec,
    Outcome,
    Request,
    RequestResult,
    Simulated,
    make_scheduler,
)
from simulator.cluster.specification import POOL_TIERS

PLANNER = TierPlannerConfig(actions="all", every_s=0.05, hold_s=0.1, learns_from=0)  # at work all the time


def simulate(
    spec: ClusterSpec,
    requests: list[Request],
    policy: str,
    *,
    holds: bool,
    rejects: bool,
    plans: bool,
    step_by_step: bool = False,
) -> tuple[ClusterSimulation, Simulated]:
    objectives = Objectives(ttft_s=0.2, tbt_s=0.02)
    gate = Gate(make_rule("early", {"limit": 1.5})) if rejects else None
    scheduler = make_scheduler(spec, make_policy(policy), objectives, gate, block_tokens=BLOCK)
    dispatcher = Dispatcher(scheduler, WaitingRoom(6, ageing=0.5) if holds else None)
    simulation = ClusterSimulation(
        scheduler,
        spec,
        dispatcher,
        block_tokens=BLOCK,
        step_by_step=step_by_step,
        tier_planner=PLANNER if plans else None,
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
    for store, tokens in zip(engines.stores, engines.cached_tokens.tolist(), strict=True):
        owners = spec.pools if store.tier in POOL_TIERS else spec.instances
        holder = Holder(owners[store.owner].name, 0)
        assert len(index.residencies(holder, store.tier)) * BLOCK == tokens


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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 30),
    policy=st.sampled_from(["slo", "round_robin"]),
    outages=st.booleans(),
    holds=st.booleans(),
    rejects=st.booleans(),
    plans=st.booleans(),
)
def test_what_holds_for_any_cluster(
    seed: int, count: int, policy: str, outages: bool, holds: bool, rejects: bool, plans: bool
) -> None:
    rng = default_rng(seed)
    spec, requests = random_cluster(rng, outages=outages), random_requests(rng, count)
    run = partial(simulate, spec, requests, policy, holds=holds, rejects=rejects, plans=plans)
    simulation, simulated = run()
    check_requests(requests, simulated)
    check_index(spec, simulation)
    assert repr(run()[1]) == repr(simulated)
    slow = {each.number: each for each in run(step_by_step=True)[1].results}
    for each in simulated.results:
        other = slow[each.number]
        assert numbers(each) == numbers(other)
        np.testing.assert_allclose(times_s(each), times_s(other), rtol=1e-7, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 30), outages=st.booleans(), plans=st.booleans())
def test_bytes_are_conserved_where_tiers_encode(seed: int, count: int, outages: bool, plans: bool) -> None:
    """No link, coder or store is ever over its capacity, and each byte that was loaded travelled encoded."""
    rng = default_rng(seed)
    spec = encoding(rng, random_cluster(rng, outages=outages))
    requests = random_requests(rng, count)
    simulation, simulated = simulate(spec, requests, "slo", holds=False, rejects=False, plans=plans)
    check_requests(requests, simulated)
    check_index(spec, simulation)
    if outages or any(each.preemptions for each in simulated.results):
        return  # what was on its way is not counted by requests
    kinds = {each.name: each.instance_class for each in spec.instances}
    for tier in (Tier.HOST, Tier.DISK, Tier.POD, Tier.REMOTE):
        name = tier.name.lower()
        loaded = sum(
            getattr(each, f"{name}_tokens") * kinds[each.prefill_instance].stored_bytes_per_token(tier)
            for each in simulated.results
            if each.outcome is Outcome.FINISHED
        )
        traffic = simulated.tier_traffic.get(name)
        if traffic is None:
            assert loaded == 0
        elif plans:
            assert traffic.carried_bytes >= loaded * (1 - 1e-9)
        else:
            np.testing.assert_allclose(traffic.carried_bytes, loaded, rtol=1e-9)
