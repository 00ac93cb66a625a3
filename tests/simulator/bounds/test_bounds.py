"""What the bounds say of workloads whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator.bounds
from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Speed
from conductor.placement import Objectives, Role
from simulator.bounds import Argument, bounds
from simulator.cluster import ClusterSpec, InstanceSpec, PoolSpec, Request, uniform
from simulator.workloads.reuse import belady_hits, next_uses

BLOCK = 512
OBJECTIVES = Objectives(ttft_s=2.0, tbt_s=0.05)


def request(number: int, at_s: float, blocks: Sequence[int], rest: int = 1, output: int = 1) -> Request:
    hashes = np.array(blocks, np.uint64)
    return Request(number, at_s, BLOCK * len(blocks) + rest, output, hashes)


def burst(count: int, prompt: int, output: int, over_s: float = 0.0) -> list[Request]:
    """Requests that share nothing, at even distances."""
    return [
        Request(
            n,
            over_s * n / count,
            prompt,
            output,
            np.arange(n * 999 + 1, n * 999 + 1 + prompt // BLOCK, dtype=np.uint64),
        )
        for n in range(count)
    ]


def small(blocks: int) -> ClusterSpec:
    return ClusterSpec((InstanceSpec("m0", Role.MIXED, LLAMA_8B_H100, blocks * BLOCK),))


def reuse(cluster: ClusterSpec, requests: list[Request], wait_s: float) -> tuple[float, float]:
    bound = bounds(cluster, requests, OBJECTIVES, longest_wait_s=wait_s)
    tokens = sum(each.prompt_tokens for each in requests)
    return bound.reuse_ratio_unlimited * tokens / BLOCK, bound.reuse_ratio_capacity * tokens / BLOCK


def test_exported_names() -> None:
    assert simulator.bounds.__all__ == sorted(simulator.bounds.__all__)
    assert {"Bounds", "bounds"} < set(simulator.bounds.__all__)


def test_a_small_memory_keeps_one_of_two_alternating_blocks() -> None:
    requests = [request(n, 10.0 * n, [1 + n % 2]) for n in range(6)]
    assert reuse(small(1), requests, 1.0) == pytest.approx((4, 2))
    assert reuse(small(2), requests, 1.0) == pytest.approx((4, 4))


def test_who_waits_long_enough_may_be_served_beside_its_like() -> None:
    requests = [request(n, 10.0 * n, [1 + n % 2]) for n in range(6)]
    assert reuse(small(1), requests, 35.0) == pytest.approx((4, 4))


def test_tiers_and_pools_add_room() -> None:
    requests = [request(n, 10.0 * n, [1 + n % 3]) for n in range(9)]
    cluster = small(1)
    with_tier = replace(cluster, instances=(replace(cluster.instances[0], tier_tokens={Tier.HOST: BLOCK}),))
    with_pool = replace(with_tier, pools=(PoolSpec("pool", Tier.REMOTE, BLOCK, Speed(1e9, 1e-3)),))
    found = [reuse(each, requests, 1.0)[1] for each in (cluster, with_tier, with_pool)]
    assert found == pytest.approx([2, 4, 6])


def test_the_block_of_the_last_token_is_not_reused() -> None:
    requests = [request(0, 0.0, [1, 2], rest=0), request(1, 9.0, [1, 2], rest=0)]
    assert reuse(small(9), requests, 1.0)[0] == pytest.approx(1)
    # In the other order of service the first could reuse what the second always computes.
    requests = [request(0, 0.0, [1, 2]), request(1, 9.0, [1, 2], rest=0)]
    assert reuse(small(9), requests, 1.0)[0] == pytest.approx(2)


CHAINS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(CHAINS, st.integers(1, 12))
def test_without_waiting_it_is_belady(chains: list[tuple[int, int]], capacity: int) -> None:
    requests = [
        request(n, 10.0 * n, range(100 * chain, 100 * chain + size)) for n, (chain, size) in enumerate(chains)
    ]
    accesses = [block for each in requests for block in each.hashes.tolist()]
    expected = belady_hits(accesses, capacity, next_uses(accesses))
    unlimited, found = reuse(small(capacity), requests, 0.0)
    assert found == pytest.approx(expected)
    assert unlimited == pytest.approx(len(accesses) - len(set(accesses)))


def test_light_load_is_bounded_by_own_work() -> None:
    bound = bounds(uniform("2", LLAMA_8B_H100), burst(20, 3_000, 50, over_s=60.0), OBJECTIVES)
    assert bound.ttft_argument is Argument.OWN_WORK
    assert bound.good_requests == 20


def test_who_arrives_with_more_than_there_are_instances_waits() -> None:
    """Two short prompts begin, a long one waits for the first of them; a minute later it is the same."""
    cluster = uniform("2", LLAMA_8B_H100)
    lengths = (3_000, 12_000, 4_000)
    alone_s = [
        bounds(cluster, [Request(0, 0.0, length, 9, np.empty(0, np.uint64))], OBJECTIVES).mean_ttft_s
        for length in lengths
    ]
    requests = [Request(n, 60.0 * (n // 3), lengths[n % 3], 9, np.empty(0, np.uint64)) for n in range(6)]
    bound = bounds(cluster, requests, OBJECTIVES)
    assert bound.mean_ttft_s == pytest.approx((sum(alone_s) + min(alone_s)) / 3)
    assert bound.ttft_argument is Argument.ARRIVING_TOGETHER
    three = bounds(uniform("3", LLAMA_8B_H100), requests, OBJECTIVES)
    assert three.mean_ttft_s == pytest.approx(sum(alone_s) / 3)
    assert three.ttft_argument is Argument.OWN_WORK


def test_overload_by_decodes_shows() -> None:
    """Prefill alone is a quarter of what two instances can do; with their decodes it is more than all."""
    requests = burst(4_000, 1_000, 600, over_s=200.0)
    cluster = uniform("2", LLAMA_8B_H100, kv_tokens=40 * BLOCK)
    bound = bounds(cluster, requests, OBJECTIVES)
    assert bound.ttft_argument is not Argument.OWN_WORK
    assert bound.mean_ttft_s > 10.0
    assert bound.good_requests < 2_000
    alone = bounds(cluster, [msgspec.structs.replace(each, output_tokens=1) for each in requests], OBJECTIVES)
    assert alone.mean_ttft_s < 0.1
    assert alone.good_requests == 4_000


def test_a_prefill_instance_is_not_helped_by_those_that_decode() -> None:
    requests = burst(400, 4_000, 2, over_s=20.0)
    split, free = (
        bounds(uniform("1p3d", LLAMA_8B_H100), requests, OBJECTIVES, decode_prefill_tokens=tokens)
        for tokens in (0, None)
    )
    assert split.mean_ttft_s > 2 * free.mean_ttft_s
    assert split.good_requests < free.good_requests == 400


def test_a_pipeline_is_as_fast_as_its_nodes() -> None:
    requests = burst(300, 8_000, 1, over_s=20.0)
    spec = uniform("1p1d", LLAMA_8B_H100)
    longer = replace(
        spec, instances=tuple(replace(i, pipeline=4) if i.name == "p0" else i for i in spec.instances)
    )
    one, four = (
        bounds(each, requests, OBJECTIVES, decode_prefill_tokens=0).mean_ttft_s for each in (spec, longer)
    )
    assert four < one / 4


def test_what_cannot_be_good_does_not_count() -> None:
    impossible = [
        Request(0, 0.0, 200_000, 1, np.empty(0, np.uint64)),  # too long to compute in time
        Request(1, 0.1, 30_000, 2_000_000, np.empty(0, np.uint64)),  # fits no instance
        Request(2, 0.2, 100, 10, np.empty(0, np.uint64)),
    ]
    cluster = uniform("4", LLAMA_8B_H100)
    assert bounds(cluster, impossible, OBJECTIVES).good_requests == 1
    assert bounds(cluster, impossible, Objectives(2.0, 0.005)).good_requests == 0


def test_progress_is_told() -> None:
    told: list[float] = []
    bounds(uniform("1", LLAMA_8B_H100), burst(10, 600, 5, over_s=99.0), OBJECTIVES, on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "no requests"),
        ([request(0, 1.0, [1]), request(1, 0.5, [2])], "request 1 arrives at 0.5 s.*sort"),
        ([Request(0, 0.0, 100, 1, np.ones(1, np.uint64))], "request 0: 1 blocks of 512 tokens.*100 prompt"),
        ([Request(0, 0.0, 0, 1, np.empty(0, np.uint64))], "request 0: prompt_tokens"),
    ],
)
def test_wrong_requests_are_explained(requests: list[Request], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounds(uniform("1", LLAMA_8B_H100), requests, OBJECTIVES)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_cluster_that_cannot_serve_is_explained(role: Role) -> None:
    cluster = ClusterSpec((InstanceSpec("x", role, LLAMA_8B_H100, 100 * BLOCK),))
    with pytest.raises(ValueError, match="instances that prefill and instances that decode"):
        bounds(cluster, [request(0, 0.0, [1])], OBJECTIVES, decode_prefill_tokens=0)
