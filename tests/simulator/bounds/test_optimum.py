"""Bounds beside true optima of a few requests, and the optima beside what is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import InstanceClass
from conductor.placement import Objectives
from simulator.bounds import bounds
from simulator.bounds.optimum import optimal_in_time, optimal_mean_ttft_s
from simulator.cluster import ClusterSpec, Request, uniform

BLOCK = 512
SLOWER = replace(LLAMA_8B_H100, name="slower", prefill_s_per_token=5e-5)


def prefill_s(tokens: int, cached: int = 0, known: InstanceClass = LLAMA_8B_H100) -> float:
    return float(known.prefill_s(tokens, np.array([cached]))[0])


def request(number: int, tokens: int, at_s: float = 0.0, chain: int | None = None) -> Request:
    """One of a chain has the blocks of all others of it, as far as it goes."""
    first = (number if chain is None else chain) * 10_000 + 1
    return Request(number, at_s, tokens, 1, np.arange(first, first + tokens // BLOCK, dtype=np.uint64))


def mixed(*classes: InstanceClass) -> ClusterSpec:
    parts = [uniform("1", known).instances[0] for known in classes]
    return ClusterSpec(tuple(replace(part, name=f"m{n}") for n, part in enumerate(parts)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6_000), st.sampled_from([0.0, 0.01, 0.1]), st.integers(0, 4)),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([(LLAMA_8B_H100,), (LLAMA_8B_H100,) * 2, (LLAMA_8B_H100, SLOWER)]),
    st.sampled_from([0.05, 0.15]),
)
def test_the_optimum_keeps_the_bounds(
    drawn: list[tuple[int, float, int]], classes: tuple[InstanceClass, ...], ttft_s: float
) -> None:
    now_s, requests = 0.0, []
    for number, (tokens, gap_s, chain) in enumerate(drawn):
        now_s += gap_s
        requests.append(request(number, tokens, now_s, chain))
    cluster = mixed(*classes)
    bound = bounds(cluster, requests, Objectives(ttft_s, 1.0))
    assert optimal_mean_ttft_s(cluster, requests) >= bound.mean_ttft_s - 1e-9
    assert optimal_in_time(cluster, requests, ttft_s) <= bound.good_requests


@pytest.mark.parametrize("at_s", [0.0, 3.0])
def test_a_request_alone_is_bounded_by_what_it_takes(at_s: float) -> None:
    requests = [request(0, 6_000, at_s)]
    cluster = mixed(SLOWER, LLAMA_8B_H100)
    bound = bounds(cluster, requests, Objectives())
    assert bound.mean_ttft_s == pytest.approx(prefill_s(6_000))
    assert optimal_mean_ttft_s(cluster, requests) == pytest.approx(bound.mean_ttft_s, abs=2e-4)


def test_equal_requests_wait_for_each_other() -> None:
    requests = [request(number, 4_000) for number in range(8)]
    cluster = mixed(LLAMA_8B_H100)
    optimum_s = optimal_mean_ttft_s(cluster, requests)
    assert optimum_s == pytest.approx(prefill_s(4_000) * 4.5, rel=0.01)
    assert bounds(cluster, requests, Objectives()).mean_ttft_s == pytest.approx(optimum_s, rel=0.01)


def test_two_instances_do_twice_as_much() -> None:
    requests = [request(number, 4_000) for number in range(8)]
    cluster = mixed(LLAMA_8B_H100, LLAMA_8B_H100)
    optimum_s = optimal_mean_ttft_s(cluster, requests)
    assert optimum_s == pytest.approx(prefill_s(4_000) * 2.5, rel=0.01)
    assert bounds(cluster, requests, Objectives()).mean_ttft_s == pytest.approx(optimum_s, rel=0.01)


def test_the_shorter_of_a_chain_goes_first_though_it_came_later() -> None:
    requests = [request(0, 6_144, 0.0, chain=1), request(1, 3_000, 1e-3, chain=1)]
    optimum_s = optimal_mean_ttft_s(mixed(LLAMA_8B_H100), requests)
    first_s = prefill_s(3_000)
    both_s = first_s + prefill_s(6_144, 5 * BLOCK)
    assert optimum_s == pytest.approx((first_s + both_s + 1e-3) / 2, abs=1e-3)
    assert optimum_s < prefill_s(6_144)


@pytest.mark.parametrize("instances", [1, 3])
def test_as_many_are_good_as_fit_the_objective(instances: int) -> None:
    requests = [request(number, 4_000) for number in range(10)]
    cluster = mixed(*[LLAMA_8B_H100] * instances)
    ttft_s = 3.5 * prefill_s(4_000)
    assert optimal_in_time(cluster, requests, ttft_s) == 3 * instances
    good = bounds(cluster, requests, Objectives(ttft_s, 1.0)).good_requests
    assert 3 * instances <= good <= int(3.5 * instances) + 1


def test_a_dozen_requests_at_most() -> None:
    with pytest.raises(ValueError, match="1 to 16 requests, not 17"):
        optimal_mean_ttft_s(mixed(LLAMA_8B_H100), [request(number, 600) for number in range(17)])
    with pytest.raises(ValueError, match="pipeline"):
        spec = uniform("1p1d", LLAMA_8B_H100)
        long = replace(
            spec, instances=tuple(replace(i, pipeline=2) if i.name == "p0" else i for i in spec.instances)
        )
        optimal_mean_ttft_s(long, [request(0, 600)])
