"""All bounds of a workload on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conductor.placement import Objectives, Role
from simulator.bounds.demand import demand, prompt_blocks
from simulator.bounds.goodput import feasible, most_good
from simulator.bounds.reuse import capacity_blocks, capacity_reuse_tokens, unlimited_reuse_tokens
from simulator.bounds.waiting import Argument, least_ttft_sums_s
from simulator.bounds.work import least_work, roles_at_will
from simulator.cluster.specification import ClusterSpec
from simulator.cluster.workload import BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no scheduler can exceed, nor any order of service.

    Reuse is of prompt tokens, at each request's first prefill: ``reuse_ratio_unlimited`` with caches that never
    evict, ``reuse_ratio_capacity`` with all the cluster's memories, while no prefill ends later than
    ``longest_wait_s`` after its request's arrival. ``mean_ttft_s`` is the least of schedules that serve every
    request, and ``ttft_argument`` what most of it rests on. ``good_requests`` meet both objectives at most.
    """

    reuse_ratio_unlimited: float
    reuse_ratio_capacity: float
    longest_wait_s: float
    mean_ttft_s: float
    ttft_argument: Argument
    good_requests: int


def bounds(
    cluster: ClusterSpec,
    requests: Sequence[Request],
    objectives: Objectives,
    *,
    block_tokens: int = BLOCK_TOKENS,
    longest_wait_s: float | None = None,
    decode_prefill_tokens: int | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Bounds:
    """Bounds of ``requests``, in order of arrival, whose hashes are of blocks of ``block_tokens``.

    ``longest_wait_s`` None: the TTFT objective, hence schedules in which everybody meets it.
    ``decode_prefill_tokens``: what an instance that decodes computes of a prompt at most, without handing it to
    one that prefills; 0 for schedulers that always do, None for whatever it likes to (`slo` decides so for rests
    of 512 tokens, by what it expects to be cached, hence more when that was evicted meanwhile). ``on_progress``
    hears now and then which fraction is done. Takes seconds for ten thousand requests. Raises ValueError for
    requests out of order, for none, and for a cluster that cannot serve.
    """
    if not requests:
        raise ValueError("there are no requests to bound")
    if longest_wait_s is None:
        longest_wait_s = objectives.ttft_s
    if decode_prefill_tokens is None:
        cluster, decode_prefill_tokens = roles_at_will(cluster), 0
    elif all(instance.role is not Role.DECODE for instance in cluster.instances):
        decode_prefill_tokens = 0
    blocks = prompt_blocks(requests, block_tokens)
    asked = demand(requests, blocks, block_tokens, decode_prefill_tokens)
    prompt_tokens = float(asked.prompt_tokens.sum())
    unlimited_tokens = unlimited_reuse_tokens(asked)
    capacity_tokens = capacity_reuse_tokens(
        asked.arrival_s, blocks, capacity_blocks(cluster, block_tokens), block_tokens, longest_wait_s
    )
    on_progress(0.2)
    chosen = least_work(cluster, asked, all_served=False)
    good = most_good(chosen, asked.gaps, feasible(cluster, asked, chosen, objectives), objectives)
    on_progress(0.5)
    done = 0

    def period_done(count: int) -> None:
        nonlocal done
        done += count
        on_progress(0.5 + 0.5 * done / len(requests))

    sums = least_ttft_sums_s(least_work(cluster, asked, all_served=True), period_done)
    return Bounds(
        reuse_ratio_unlimited=unlimited_tokens / prompt_tokens,
        reuse_ratio_capacity=min(capacity_tokens, unlimited_tokens) / prompt_tokens,
        longest_wait_s=longest_wait_s,
        mean_ttft_s=sum(sums.values()) / len(requests),
        ttft_argument=max(sums, key=lambda argument: sums[argument]),
        good_requests=good,
    )
