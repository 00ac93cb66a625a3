"""Instances that die, and requests that are given up: what they had is free, nobody else is harmed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_drive import Drive, Sent
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from random_cluster import BLOCK, SPEEDS, random_cluster, random_requests

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from simulator.cluster import (
    ClusterSimulation,
    ClusterSpec,
    InstanceSpec,
    Outage,
    Outcome,
    Request,
    RequestResult,
    make_scheduler,
    uniform,
)
from simulator.cluster.kernels import layout as k

KIND = replace(LLAMA_8B_H100, tiers=SPEEDS)


def request(number: int, arrival_s: float, prompt: int, output: int, chain: int = 0) -> Request:
    first = 10_000 * (chain + 1)
    return Request(
        number, arrival_s, prompt, output, np.arange(first, first + prompt // BLOCK, dtype=np.uint64)
    )


def simulate(
    text: str, requests: list[Request], *outages: Outage, policy: str = "round_robin"
) -> dict[int, RequestResult]:
    spec = replace(uniform(text, LLAMA_8B_H100), outages=outages)
    scheduler = make_scheduler(spec, make_policy(policy), Objectives(), block_tokens=BLOCK)
    simulation = ClusterSimulation(scheduler, spec, block_tokens=BLOCK)
    simulated = simulation.run(requests, lambda: simulation.engines.check_invariants())
    scheduler.check_invariants()
    assert len(simulated.results) == len(requests)
    return {each.number: each for each in simulated.results}


def test_what_has_not_spoken_is_tried_elsewhere_and_what_has_is_lost() -> None:
    requests = [request(0, 0.0, 2_000, 400), request(1, 0.0, 2_000, 400), request(2, 1.0, 40_000, 5, 2)]
    seen = simulate("2", requests, Outage("m0", 1.5, 1.0))
    assert [seen[number].prefill_instance for number in (1, 2)] == ["m1", "m1"]
    assert [seen[number].outcome for number in range(3)] == [
        Outcome.FAILED,
        Outcome.FINISHED,
        Outcome.FINISHED,
    ]
    assert [seen[number].retries for number in range(3)] == [0, 0, 1]
    prefill_s = LLAMA_8B_H100.prefill_s(40_000, np.zeros(1, np.int64))[0]
    assert seen[2].ttft_s > 0.5 + prefill_s


def test_an_instance_comes_back_empty() -> None:
    requests = [request(number, 5.0 * number, 2_000, 5) for number in range(3)]
    seen = simulate("1", requests, Outage("m0", 7.0, 1.0))
    assert [seen[number].cached_tokens for number in range(3)] == [0, 1_984, 0]


def test_nobody_takes_a_request_while_all_are_down() -> None:
    seen = simulate("1", [request(0, 1.0, 100, 5), request(1, 3.0, 100, 5)], Outage("m0", 0.5, 2.0))
    assert [seen[number].outcome for number in range(2)] == [Outcome.REFUSED, Outcome.FINISHED]


def test_a_request_survives_the_instance_that_has_handed_it_off() -> None:
    requests = [request(0, 0.0, 2_000, 400), request(1, 6.0, 2_000, 5)]
    seen = simulate("1p1d", requests, Outage("p0", 2.0, 1.0))
    assert seen[0].outcome is Outcome.FINISHED and seen[0].e2e_s > 2.5
    undisturbed = simulate("1p1d", requests)
    assert seen[0].e2e_s == undisturbed[0].e2e_s
    assert (seen[1].cached_tokens, undisturbed[1].cached_tokens) == (0, 1_984)


def test_a_request_in_prefill_does_not_survive_its_decode_instance() -> None:
    seen = simulate("1p2d", [request(0, 0.0, 40_000, 5)], Outage("d0", 0.5, 1.0))
    assert (seen[0].outcome, seen[0].retries, seen[0].decode_instance) == (Outcome.FINISHED, 1, "d1")


def test_what_was_to_come_from_a_dead_peer_is_computed() -> None:
    slow = replace(KIND, nic=replace(KIND.nic, bytes_per_s=1e8), name="slow")
    spec = ClusterSpec(tuple(InstanceSpec(name, Role.MIXED, slow, 40_000) for name in ("m0", "m1")))
    sent = [
        Sent(request(0, 0.0, 1_601, 1)),
        Sent(request(1, 1.0, 1_601, 1), engine=1, plan_blocks=100, peer=0),
    ]
    undisturbed = Drive(spec, sent).run()[1]
    assert undisturbed.loaded["peer"] == undisturbed.cached_tokens == 1_600
    drive = Drive(spec, sent)
    drive.run(until_s=1.2)
    assert drive.kill(0) == []
    drive.engines.check_invariants()
    seen = drive.run()[1]
    assert (seen.cached_tokens, seen.loaded["peer"]) == (0, 0)
    prefill_s = LLAMA_8B_H100.prefill_s(1_601, np.zeros(1, np.int64))[0]
    assert seen.first_s == pytest.approx(1.2 + prefill_s)


def test_an_instance_dies_with_its_own_tiers_and_not_with_a_pool() -> None:
    tiers = {Tier.HOST: 40_000}
    spec = ClusterSpec((InstanceSpec("m0", Role.MIXED, KIND, 20_000, tier_tokens=tiers),))
    drive = Drive(spec, [Sent(request(0, 0.0, 1_601, 1))])
    drive.run()
    assert drive.engines.cached_tokens.tolist() == [1_600, 1_600]
    drive.kill(0)
    drive.engines.check_invariants()
    assert drive.engines.cached_tokens.tolist() == [0, 0]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40))
def test_whatever_is_given_up_and_dies_the_rest_goes_on(seed: int, count: int) -> None:
    rng = default_rng(seed)
    spec = random_cluster(rng, outages=False)
    roles = [instance.role for instance in spec.instances]
    starts = [number for number, role in enumerate(roles) if role is not Role.DECODE]
    ends = [number for number, role in enumerate(roles) if role is Role.DECODE]
    streams = bool(rng.random() < 0.5)
    sent = []
    for each in random_requests(rng, count):
        engine = int(rng.choice(starts))
        decode_engine = int(rng.choice(ends)) if roles[engine] is Role.PREFILL else k.NONE
        peer = int(rng.integers(len(roles)))
        sent.append(
            Sent(
                each,
                engine,
                decode_engine,
                plan_blocks=int(rng.integers(0, 40)),
                peer=peer if peer != engine and rng.random() < 0.7 else k.NONE,
                streams=streams and decode_engine != k.NONE,
            )
        )
    sent = [
        each
        for each in sent
        if all(
            each.request.prompt_tokens + each.request.output_tokens <= spec.instances[engine].kv_tokens
            for engine in (each.engine, each.decode_engine)
        )
    ]
    drive = Drive(spec, sent)
    lost: set[int] = set()
    for at_s in np.sort(rng.uniform(0.0, 1.2, 30)).tolist():
        drive.run(until_s=at_s)
        if drive.work and rng.random() < 0.7:
            number = int(rng.choice(sorted(drive.work)))
            drive.drop(number)
            lost.add(number)
        elif rng.random() < 0.5:
            lost.update(drive.kill(int(rng.integers(len(roles)))))
        drive.engines.check_invariants()
        drive.engines.changes()
    drive.run()
    assert drive.ended.keys() == {each.request.number for each in sent} - lost
    settle(drive)


def settle(drive: Drive) -> None:
    """Steps under way end, and then nothing is taken anywhere."""
    drive.engines.advance(drive.now_s, drive.now_s + 100.0)
    drive.engines.check_invariants()
    assert drive.engines.idle
    gauges = drive.engines.gauges(drive.now_s + 100.0)
    assert not gauges.running.any() and not gauges.waiting.any() and not gauges.kv_usage.any()
