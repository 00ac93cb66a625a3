"""All bounds of a workload on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from conductor.placement import Objectives, Role
from simulator.bounds.demand import Demand, demand, prompt_blocks
from simulator.bounds.goodput import feasible, most_good
from simulator.bounds.reuse import capacity_blocks, capacity_reuse_tokens, unlimited_reuse_tokens
from simulator.bounds.waiting import Argument, least_ttft_sums_s
from simulator.bounds.work import least_work, roles_at_will
from simulator.cluster.specification import ClusterSpec
from simulator.cluster.workload import BLOCK_TOKENS, Request

_AFTER_REUSE: Final = 0.2  # of the time it takes


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
    blocks = prompt_blocks(requests, block_tokens)
    asked = demand(requests, blocks, block_tokens)
    prompt_tokens = float(asked.prompt_tokens.sum())
    unlimited_tokens = unlimited_reuse_tokens(asked)
    capacity_tokens = capacity_reuse_tokens(
        asked.arrival_s, blocks, capacity_blocks(cluster, block_tokens), block_tokens, longest_wait_s
    )
    on_progress(_AFTER_REUSE)
    cases = [(roles_at_will(cluster), asked)]
    if decode_prefill_tokens is not None and any(i.role is Role.DECODE for i in cluster.instances):
        # What holds with roles at will holds with fixed ones too, and may be the stronger.
        cases.append((cluster, demand(requests, blocks, block_tokens, decode_prefill_tokens)))
    sums: dict[Argument, float] = {}
    good = len(requests)
    told = _AFTER_REUSE
    share = (1.0 - _AFTER_REUSE) / (2 * len(cases))

    def on_part(part: float) -> None:
        nonlocal told
        told += part * share
        on_progress(min(told, 1.0))

    for instances, case in cases:
        good = min(good, _most_good(instances, case, objectives))
        on_part(1.0)
        work = least_work(instances, case, all_served=True)
        found = least_ttft_sums_s(work, lambda count: on_part(count / len(requests)))
        if sum(found.values()) > sum(sums.values()):
            sums = found
    return Bounds(
        reuse_ratio_unlimited=unlimited_tokens / prompt_tokens,
        reuse_ratio_capacity=min(capacity_tokens, unlimited_tokens) / prompt_tokens,
        longest_wait_s=longest_wait_s,
        mean_ttft_s=sum(sums.values()) / len(requests),
        ttft_argument=max(sums, key=lambda argument: sums[argument]),
        good_requests=good,
    )


def _most_good(cluster: ClusterSpec, asked: Demand, objectives: Objectives) -> int:
    work = least_work(cluster, asked, all_served=False)
    return most_good(work, asked.gaps, feasible(cluster, asked, work, objectives), objectives)
