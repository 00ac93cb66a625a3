"""How much of the prompts could come from caches: of unlimited ones, and of as many blocks as a cluster holds."""

from __future__ import annotations

from math import inf

import numpy as np

from conductor.costs import Floats
from simulator.bounds.demand import Demand, PromptBlocks
from simulator.cluster.specification import ClusterSpec
from simulator.workloads.reuse import belady_hits, next_uses


def unlimited_reuse_tokens(demand: Demand) -> float:
    """Prompt tokens that any cluster can take from caches, in any order of service.

    Every distinct block is computed at least once, and what cannot be shared with each request (see
    `simulator.bounds.demand`); the rest could be reused. Attempts after a failure, which may find what the
    request itself had computed, do not count.
    """
    return float(demand.prompt_tokens.sum() - demand.tokens.sum())


def capacity_blocks(cluster: ClusterSpec, block_tokens: int) -> int:
    """Blocks in all of a cluster's memories: devices, own tiers, pools."""
    memories = [instance.kv_tokens for instance in cluster.instances]
    memories += [tokens for instance in cluster.instances for tokens in instance.tier_tokens.values()]
    memories += [pool.capacity_tokens for pool in cluster.pools]
    return sum(-(-tokens // block_tokens) for tokens in memories)


def capacity_reuse_tokens(
    arrival_s: Floats, blocks: PromptBlocks, capacity: int, block_tokens: int, longest_wait_s: float
) -> float:
    """Prompt tokens that memories of ``capacity`` blocks in all can reuse while no prefill ends later than
    ``longest_wait_s`` after its request's arrival.

    Copies of a block on several instances only take room, so the union of what is cached counts. Let the user of
    a block before this one, by arrival, have come at ``s``, and this one at ``t``. If ``s`` is within
    ``longest_wait_s`` before ``t``, or a further user comes within as much after ``t``, either may be served
    first: the hit is granted, and takes no room. Else this one hits only if the block stays in some memory from
    the end of that prefill, ``s + longest_wait_s`` at the latest, until its own begins, ``t`` at the earliest. Of
    these stays as many are granted as fit ``capacity`` at any time: Belady's MIN with bypass, each stay a block
    of its own that is used at its two ends. Without any waiting that is MIN on the trace as it arrives; without
    a limit on waiting, the unlimited cache. Prefixes hit no more than blocks do. O(references log references).
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least one block, not {capacity}")
    at_s = arrival_s[blocks.request]
    order = np.lexsort((np.arange(len(at_s)), blocks.block))
    same = np.diff(blocks.block[order]) == 0
    since_s = np.full(len(at_s), -inf)
    until_s = np.full(len(at_s), inf)
    since_s[order[1:][same]] = at_s[order[:-1][same]]
    until_s[order[:-1][same]] = at_s[order[1:][same]]
    usable = blocks.usable > 0
    near = (at_s - since_s <= longest_wait_s) | (until_s - at_s <= longest_wait_s)
    granted = int((usable & near).sum())
    stays = np.flatnonzero(usable & ~near & (since_s > -inf))
    begins_s, ends_s = since_s[stays] + longest_wait_s, at_s[stays]
    # Of what happens at the same time, stays end before others begin.
    events = np.lexsort((np.repeat((1, 0), len(stays)), np.concatenate((begins_s, ends_s))))
    accesses = (events % len(stays)).tolist() if len(stays) else []
    granted += belady_hits(accesses, capacity, next_uses(accesses))
    return float(granted * block_tokens)
