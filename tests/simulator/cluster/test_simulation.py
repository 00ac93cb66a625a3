"""Whole simulated clusters: the books balance, the schedulers' index tells the truth, figures are right."""

from __future__ import annotations

import gc
import json
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from cache_index import Holder, Tier
from conductor.admission import WaitingRoom
from conductor.catalogue import LLAMA_8B_H100, LLAMA_70B_8XA800
from conductor.costs import DEFAULT_LINKS, Distance
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives, Role
from conductor.policies import POLICIES, make_policy
from simulator.cluster import (
    BLOCK_TOKENS,
    ClusterSimulation,
    ClusterSpec,
    InstanceSpec,
    Outcome,
    Request,
    Simulated,
    make_scheduler,
    requests_of,
    uniform,
)
from simulator.cluster.engines import Engines
from simulator.report import request_rows, summary
from simulator.workloads import TraceRecord, generate

OBJECTIVES = Objectives(ttft_s=2.0, tbt_s=0.1)


def simulation(
    cluster: str, policy: str = "slo", *, blocks: int = 0, step_by_step: bool = False
) -> ClusterSimulation:
    spec = uniform(cluster, LLAMA_8B_H100, kv_tokens=blocks * BLOCK_TOKENS)
    scheduler = make_scheduler(spec, make_policy(policy), OBJECTIVES)
    return ClusterSimulation(scheduler, spec, step_by_step=step_by_step)


def workload(count: int, requests_per_s: float = 8.0) -> list[Request]:
    return list(requests_of(generate("api", count, requests_per_s, seed=1)))


def times(simulated: Simulated) -> dict[int, tuple[float, ...]]:
    return {r.number: (r.queue_s, r.ttft_s, r.tbt_s, r.itl_s, r.e2e_s) for r in simulated.results}


@pytest.mark.parametrize("cluster", ["4", "2p2d"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_serves_every_request(cluster: str, policy: str) -> None:
    simulated_cluster = simulation(cluster, policy)
    requests = workload(120)
    results = simulated_cluster.run(requests).results
    assert sorted(r.number for r in results) == list(range(120))
    for r in results:
        assert r.outcome is Outcome.FINISHED
        assert 0 <= r.queue_s < r.ttft_s <= r.e2e_s
        assert r.itl_s <= r.tbt_s + 1e-12
        assert r.cached_tokens < r.prompt_tokens
        assert (r.prefill_instance != r.decode_instance) <= (cluster == "2p2d")
    simulated_cluster.scheduler.check_invariants()
    assert simulated_cluster.scheduler.active_placements == 0


@pytest.mark.parametrize("cluster", ["3", "2p2d"])
@pytest.mark.parametrize("policy", ["slo", "round_robin", "lmetric"])
def test_closed_form_equals_single_steps(cluster: str, policy: str) -> None:
    requests = workload(200, 12.0)
    fast = simulation(cluster, policy, blocks=300).run(requests)
    slow = simulation(cluster, policy, blocks=300, step_by_step=True).run(requests)
    assert fast.engine_runs < slow.engine_runs / 3
    expected = times(slow)
    for number, found in times(fast).items():
        assert found == pytest.approx(expected[number], rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("cluster", ["2", "1p1d"])
def test_requests_are_held_at_the_router_while_queues_are_long(cluster: str) -> None:
    spec = uniform(cluster, LLAMA_8B_H100)
    scheduler = make_scheduler(spec, make_policy("slo"), OBJECTIVES)
    dispatcher = Dispatcher(scheduler, WaitingRoom(10, ageing=0.5))
    results = ClusterSimulation(scheduler, spec, dispatcher).run(workload(200, 40.0)).results
    assert sorted(r.number for r in results) == list(range(200))
    assert {r.outcome for r in results} == {Outcome.FINISHED, Outcome.REJECTED}  # the room is small
    assert scheduler.active_placements == len(dispatcher) == 0
    scheduler.check_invariants()


@pytest.mark.parametrize("cluster", ["3", "2p2d"])
@pytest.mark.parametrize("requests_per_s", [0.3, 4.0, 40.0])
def test_engines_that_tell_at_once_change_nothing(
    monkeypatch: pytest.MonkeyPatch, cluster: str, requests_per_s: float
) -> None:
    """What is told later is told with its time: of each request, of the gauges, and at the end."""
    patient = simulation(cluster).run(workload(150, requests_per_s))
    whole = Engines.advance

    def advance(self: Engines, now_s: float, until_s: float, *, patient: bool) -> Any:
        return whole(self, now_s, until_s)

    monkeypatch.setattr(Engines, "advance", advance)
    impatient = simulation(cluster).run(workload(150, requests_per_s))
    assert request_rows(patient) == request_rows(impatient)
    assert patient.end_s == impatient.end_s and patient.load_variation == impatient.load_variation
    for mine, other in zip(astuple(patient.timeline), astuple(impatient.timeline), strict=True):
        assert np.array_equal(mine, other)


def test_equal_runs_are_equal() -> None:
    first, second = (simulation("2p2d").run(workload(100)) for _ in range(2))
    assert request_rows(first) == request_rows(second)


def test_the_index_knows_what_engines_hold() -> None:
    cluster = simulation("3", "slo", blocks=150)
    cluster.run(workload(150))
    cluster.engines.check_invariants()
    for name, tokens in zip(("m0", "m1", "m2"), cluster.engines.cached_tokens.tolist(), strict=True):
        held = cluster.scheduler.index.residencies(Holder(name, 0))
        assert len(held) * BLOCK_TOKENS == tokens
        assert {tier for _, tier in held} == {Tier.DEVICE}


def test_a_conversation_reuses_what_its_instance_holds() -> None:
    records = [
        TraceRecord(0.0, 5_120, 10, tuple(range(10))),
        TraceRecord(5.0, 7_680, 10, tuple(range(15))),
    ]
    first, second = simulation("4").run(requests_of(records)).results
    assert (first.cached_tokens, second.cached_tokens) == (0, 5_120)
    assert second.prefill_instance == first.prefill_instance


@pytest.mark.parametrize("cluster", ["2", "1p1d"])
def test_without_prefix_caching_nothing_is_reused(cluster: str) -> None:
    spec = replace(uniform(cluster, LLAMA_8B_H100), prefix_caching=False)
    scheduler = make_scheduler(spec, make_policy("slo"), OBJECTIVES)
    records = list(generate("rag", 60, 4.0, seed=1))
    results = ClusterSimulation(scheduler, spec).run(requests_of(records)).results
    assert len(results) == 60 and not any(r.cached_tokens for r in results)
    cached = simulation(cluster).run(requests_of(records)).results
    assert sum(r.cached_tokens for r in cached) > 0
    assert np.mean([r.ttft_s for r in results]) > np.mean([r.ttft_s for r in cached])


def test_a_pair_hands_off_over_the_link() -> None:
    (result,) = simulation("1p1d").run(requests_of([TraceRecord(0.0, 8_192, 5, tuple(range(16)))])).results
    prefill_s = LLAMA_8B_H100.prefill_s(8_192, np.zeros(1, np.int64))[0]
    hand_off_s = LLAMA_8B_H100.hand_off_s(np.array(8_192)) + DEFAULT_LINKS[Distance.RACK].latency_s
    step_s = LLAMA_8B_H100.decode_step_s(np.array(1), np.array(8_192))
    assert result.ttft_s == pytest.approx(float(prefill_s + hand_off_s + step_s))
    assert (result.prefill_instance, result.decode_instance) == ("p0", "d0")


def test_what_no_instance_can_hold_is_refused() -> None:
    records = [TraceRecord(0.0, 6_000, 10, tuple(range(12))), TraceRecord(0.0, 100, 6_000, (0,))]
    simulated = simulation("2", blocks=10).run(requests_of(records))
    assert [r.outcome for r in simulated.results] == [Outcome.REFUSED, Outcome.REFUSED]
    assert simulated.results[0].ttft_s == float("inf")
    figures = summary(simulated, OBJECTIVES)
    assert (figures["request_count"], figures["error_request_count"]) == (0, 2)


def test_figures_are_those_of_the_requests() -> None:
    simulated = simulation("2").run(workload(60))
    figures = summary(simulated, OBJECTIVES)
    ttfts_s = [r.ttft_s for r in simulated.results]
    good = sum(r.ttft_s <= OBJECTIVES.ttft_s and r.tbt_s <= OBJECTIVES.tbt_s for r in simulated.results)
    assert figures["time_to_first_token"]["avg"] == pytest.approx(np.mean(ttfts_s) * 1e3, rel=1e-6)
    assert figures["good_request_count"] == good
    assert 0.0 < figures["prefix_cache_reused_ratio"] < 1.0
    assert json.loads(json.dumps(figures)) == figures
    rows = request_rows(simulated)
    assert [row["number"] for row in rows] == list(range(60))
    assert json.loads(json.dumps(rows)) == rows


def test_speed_draws_arrivals_together() -> None:
    records = [TraceRecord(10.0, 100, 0, (0,)), TraceRecord(14.0, 100, 5, (0,))]
    requests = list(requests_of(records, speed=2.0))
    assert [r.arrival_s for r in requests] == [0.0, 2.0]
    assert [r.output_tokens for r in requests] == [1, 5]
    with pytest.raises(ValueError, match="sort the trace"):
        list(requests_of(records[::-1]))


def test_instances_may_differ_in_class_role_and_room() -> None:
    spec = ClusterSpec(
        (
            InstanceSpec("large", Role.MIXED, LLAMA_70B_8XA800, 100_000, sequences=64),
            InstanceSpec("small", Role.MIXED, LLAMA_8B_H100, 10_000),
            InstanceSpec("first", Role.PREFILL, LLAMA_8B_H100, 40_000),
            InstanceSpec("then", Role.DECODE, LLAMA_70B_8XA800, 80_000),
        )
    )
    scheduler = make_scheduler(spec, make_policy("random"), OBJECTIVES, block_tokens=16)
    simulation = ClusterSimulation(scheduler, spec, block_tokens=16)
    hashes = np.arange(1, 126, dtype=np.uint64)
    requests = [Request(number, 20.0 * number, 2_000, 5, hashes) for number in range(40)]
    results = simulation.run(requests).results
    assert {r.outcome for r in results} == {Outcome.FINISHED}
    by_prefill = {name: [r for r in results if r.prefill_instance == name] for name in ("large", "small")}
    assert by_prefill["large"][-1].cached_tokens == 1_984, "blocks of 16 tokens, all but the last reused"
    assert by_prefill["large"][-1].ttft_s > 2 * by_prefill["small"][-1].ttft_s
    pairs = [r for r in results if r.prefill_instance == "first"]
    assert pairs and {r.decode_instance for r in pairs} == {"then"}


def test_an_instance_that_holds_no_block_is_refused() -> None:
    spec = uniform("1", LLAMA_8B_H100, kv_tokens=500)
    scheduler = make_scheduler(spec, make_policy("slo"), OBJECTIVES)
    with pytest.raises(ValueError, match="do not hold a block of 512"):
        ClusterSimulation(scheduler, spec)


def test_the_collector_works_again_after_a_simulation() -> None:
    assert gc.isenabled()
    simulation("2").run(workload(5))
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        simulation("2").run(workload(5), lambda: 1 // 0)
    assert gc.isenabled()
