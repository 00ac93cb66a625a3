"""No schedule is better than the bounds: those of policies, and those of whoever orders requests at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.admission import WaitingRoom
from conductor.catalogue import LLAMA_8B_H100, LLAMA_70B_8XA800
from conductor.costs import InstanceClass
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from simulator.bounds import bounds
from simulator.cluster import (
    ClusterSimulation,
    ClusterSpec,
    InstanceSpec,
    Outcome,
    Request,
    make_scheduler,
)
from simulator.cluster.engines import Engines, Load, flat_hashes
from simulator.cluster.kernels import layout as k

BLOCK = 512
SLOWER = replace(
    LLAMA_8B_H100,
    name="slower",
    prefill_s_per_token=4e-5,
    prefill_s_per_token_squared=2e-10,  # but better at long prompts
    prefill_base_s=2e-3,
    decode_base_s=9e-3,
)
SMALL_STEPS = replace(LLAMA_8B_H100, name="small steps", chunk_tokens=1_024)
CHEAP_PROMPTS = replace(LLAMA_8B_H100, name="cheap prompts", prefill_base_s=0.0, chunk_tokens=2_048)
CLASSES = (LLAMA_8B_H100, SLOWER, SMALL_STEPS, CHEAP_PROMPTS, LLAMA_70B_8XA800)
POLICIES = ("round_robin", "slo", "lmetric")


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request that finished."""

    ttft_s: float  # after its arrival
    tbt_s: float
    cached_tokens: int
    decode_prefill_tokens: int = 0  # computed where it decodes, on an instance for that alone


def workload(
    seed: int,
    count: int,
    requests_per_s: float,
    mean_tokens: float,
    mean_output: float,
    together: float = 0.2,
) -> list[Request]:
    """Requests that often continue an earlier one, or share its beginning, or end with a block.

    A part ``together`` of them comes at the same instant as the one before.
    """
    random = np.random.default_rng(seed)
    requests: list[Request] = []
    now_s = 0.0
    for number in range(count):
        if random.random() >= together:
            now_s += float(random.exponential(1 / requests_per_s))
        prompt = 1 + int(random.exponential(mean_tokens))
        beginning = np.empty(0, np.uint64)
        if requests and random.random() < 0.7:
            parent = requests[int(random.integers(len(requests)))]
            beginning = parent.hashes[: int(random.integers(len(parent.hashes) + 1))]
            prompt += len(beginning) * BLOCK
        if random.random() < 0.3:
            prompt = max(prompt // BLOCK, 1) * BLOCK
        own = prompt // BLOCK - len(beginning)
        new = np.arange(own, dtype=np.uint64) + np.uint64(1 + 100_000 * (number + 1))
        output = 1 if random.random() < 0.2 else int(random.geometric(1 / mean_output))
        requests.append(Request(number, now_s, prompt, output, np.concatenate((beginning, new))))
    return requests


def holds(
    cluster: ClusterSpec,
    requests: Sequence[Request],
    served: Sequence[Served],
    objectives: Objectives,
    decode_prefill_tokens: int | None = None,
) -> None:
    longest_s = max((each.ttft_s for each in served), default=0.0)
    bound = bounds(
        cluster,
        requests,
        objectives,
        longest_wait_s=longest_s,
        decode_prefill_tokens=decode_prefill_tokens,
    )
    good = sum(each.ttft_s <= objectives.ttft_s and each.tbt_s <= objectives.tbt_s for each in served)
    assert good <= bound.good_requests
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    reused = sum(each.cached_tokens for each in served) / prompt_tokens
    if len(served) == len(requests):
        assert reused <= bound.reuse_ratio_unlimited + 1e-9
        assert reused <= bound.reuse_ratio_capacity + 1e-9
        assert sum(each.ttft_s for each in served) / len(served) >= bound.mean_ttft_s - 1e-9


def simulated(cluster: ClusterSpec, policy: str, requests: list[Request], held: bool) -> list[Served]:
    """By the simulator, with that policy, with or without a line of held requests."""
    scheduler = make_scheduler(cluster, make_policy(policy), Objectives(), block_tokens=BLOCK)
    dispatcher = Dispatcher(scheduler, WaitingRoom(1_000, ageing=0.5)) if held else None
    results = ClusterSimulation(scheduler, cluster, dispatcher, block_tokens=BLOCK).run(requests).results
    assert len(results) == len(requests)
    decoding = {spec.name for spec in cluster.instances if spec.role is Role.DECODE}
    return [
        Served(
            r.ttft_s,
            r.tbt_s,
            r.cached_tokens,
            r.prompt_tokens - r.cached_tokens if r.prefill_instance in decoding else 0,
        )
        for r in results
        if r.outcome is Outcome.FINISHED
    ]


def driven(spec: InstanceSpec, submissions: list[tuple[float, Request]]) -> list[Served]:
    """One engine given requests at times of their own choice, in that order."""
    if not submissions:
        return []
    waiting = sorted(submissions, key=lambda each: each[0])
    requests = {request.number: request for _, request in waiting}
    hashes, starts = flat_hashes([request.hashes for request in requests.values()])
    first_hash = dict(zip(requests, starts, strict=True))
    engines = Engines(
        ClusterSpec((spec,)),
        hashes,
        block_tokens=BLOCK,
        longest_output_tokens=max(request.output_tokens for request in requests.values()),
    )
    served: list[Served] = []
    now_s = 0.0
    while len(served) < len(requests):
        now_s, notices = engines.advance(now_s, waiting[0][0] if waiting else inf)
        for notice in notices:
            if notice[k.N_KIND] == k.FINISHED:
                arrival_s = requests[int(notice[k.N_NUMBER])].arrival_s
                ttft_s = notice[k.N_FIRST_S] - arrival_s
                served.append(Served(ttft_s, notice[k.N_TBT_S], int(notice[k.N_CACHED])))
        while waiting and waiting[0][0] <= now_s:
            request = waiting.pop(0)[1]
            load = Load(
                request.number,
                request.prompt_tokens,
                request.output_tokens,
                first_hash[request.number],
                len(request.hashes),
            )
            engines.submit(load, 0, k.NONE, plan_blocks=0, peer=k.NONE, streams=False)
    return served


def largest(requests: Sequence[Request]) -> int:
    return max(request.prompt_tokens + request.output_tokens for request in requests)


WORKLOADS = st.builds(
    workload,
    seed=st.integers(0, 10_000),
    count=st.integers(1, 60),
    requests_per_s=st.sampled_from([0.5, 4.0, 30.0, 1_000.0]),
    mean_tokens=st.sampled_from([30.0, 700.0, 6_000.0]),
    mean_output=st.sampled_from([2.0, 30.0, 300.0]),
    together=st.sampled_from([0.2, 0.9]),
)
OBJECTIVES = st.builds(
    Objectives, ttft_s=st.sampled_from([0.05, 0.5, 2.0]), tbt_s=st.sampled_from([0.01, 0.03, 0.2])
)
ROLES = st.sampled_from(["m", "mm", "mmm", "pd", "ppd", "pdd", "pdm"])
NAMES = {"m": Role.MIXED, "p": Role.PREFILL, "d": Role.DECODE}


def layout(roles: str, classes: Sequence[InstanceClass], kv_tokens: int, sequences: int) -> ClusterSpec:
    return ClusterSpec(
        tuple(
            InstanceSpec(
                f"{letter}{n}", NAMES[letter], classes[n % len(classes)], kv_tokens, sequences=sequences
            )
            for n, letter in enumerate(roles)
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    WORKLOADS,
    OBJECTIVES,
    ROLES,
    st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3),
    st.sampled_from([1.0, 1.5, 4.0, 50.0]),
    st.sampled_from([2, 16, 256]),
    st.sampled_from(POLICIES),
    st.booleans(),
)
def test_no_policy_is_better(
    requests: list[Request],
    objectives: Objectives,
    roles: str,
    classes: list[InstanceClass],
    room: float,
    sequences: int,
    policy: str,
    held: bool,
) -> None:
    kv_tokens = (int(room * largest(requests)) // BLOCK + 1) * BLOCK
    cluster = layout(roles, classes, kv_tokens, sequences)
    served = simulated(cluster, policy, requests, held)
    holds(cluster, requests, served, objectives)
    most_on_decode = max((each.decode_prefill_tokens for each in served), default=0)
    if len(served) == len(requests):  # else some may have computed there without an answer
        holds(cluster, requests, served, objectives, most_on_decode)


@settings(max_examples=50, deadline=None)
@given(
    WORKLOADS,
    OBJECTIVES,
    st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3),
    st.sampled_from([1.0, 1.5, 4.0, 50.0]),
    st.sampled_from([2, 16, 256]),
    st.sampled_from(["at random", "shortest first", "least new first"]),
    st.integers(0, 1_000),
)
def test_no_order_is_better(
    requests: list[Request],
    objectives: Objectives,
    classes: list[InstanceClass],
    room: float,
    sequences: int,
    order: str,
    seed: int,
) -> None:
    kv_tokens = (int(room * largest(requests)) // BLOCK + 1) * BLOCK
    cluster = layout("m" * len(classes), classes, kv_tokens, sequences)
    random = np.random.default_rng(seed)
    keys = {
        "at random": random.random(len(requests)),
        "shortest first": np.array([r.prompt_tokens for r in requests]),
        "least new first": np.array([r.prompt_tokens - BLOCK * len(r.hashes) for r in requests]),
    }[order]
    longest_s = float(random.exponential(0.3))
    submissions: list[list[tuple[float, Request]]] = [[] for _ in classes]
    for rank, position in enumerate(np.argsort(keys)):
        request = requests[position]
        at_s = request.arrival_s + rank * longest_s / len(requests)
        submissions[int(random.integers(len(classes)))].append((at_s, request))
    served = [
        each for spec, own in zip(cluster.instances, submissions, strict=True) for each in driven(spec, own)
    ]
    assert len(served) == len(requests)
    holds(cluster, requests, served, objectives)


@pytest.mark.parametrize(("room", "closeness"), [(400, 0.65), (60, 0.45), (20, 0.65), (6, 0.7)])
def test_decodes_are_late_by_what_the_memory_holds(room: int, closeness: float) -> None:
    """A burst of prompts with long answers: with room for all, no decode comes before a first token."""
    requests = [Request(n, 0.0, 1_000, 400, np.array([n + 1], np.uint64)) for n in range(100)]
    cluster = layout("m", [LLAMA_8B_H100], room * BLOCK, 256)
    served = driven(cluster.instances[0], [(0.0, request) for request in requests])
    mean_s = sum(each.ttft_s for each in served) / len(served)
    holds(cluster, requests, served, Objectives())
    assert bounds(cluster, requests, Objectives()).mean_ttft_s > closeness * mean_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("roles", ["mmmm", "ppdd"])
def test_an_overloaded_cluster_stays_within_bounds(policy: str, roles: str) -> None:
    requests = workload(1, 300, 40.0, 6_000.0, 100.0)
    cluster = layout(roles, [LLAMA_8B_H100], 200 * BLOCK, 64)
    served = simulated(cluster, policy, requests, held=False)
    assert len(served) == len(requests)
    holds(cluster, requests, served, Objectives())
    holds(cluster, requests, served, Objectives(), max(each.decode_prefill_tokens for each in served))
