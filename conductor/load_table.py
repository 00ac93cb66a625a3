"""Every instance in one row: what it is, whether it takes requests, what runs there and what it caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from cache_index import Holder, Tier
from conductor.cluster import Health, InstanceState
from conductor.overview import kv_usage

FIELDS: Final = (
    "id",
    "role",
    "health",
    "health_reason",
    "suspensions",
    "retry_in_s",  # until a suspended instance may be tried again; None where it is not suspended, or tried now
    "ranks",
    "placements",
    "pending_prefills",
    "queue_ms",  # of the rank that is free first
    "active_decodes",
    "context_tokens",
    "kv_usage",  # of the fullest rank
    "engine_running",
    "engine_waiting",
    "kv_capacity_tokens",
    "block_size",
    "kv_bytes_per_token",
    *(f"{tier.name.lower()}_blocks" for tier in Tier),
)


def load_row(
    instance: InstanceState, held: Mapping[Holder, Mapping[Tier, int]], now_s: float
) -> tuple[Any, ...]:
    """`FIELDS` of one instance, over all of its ranks; None where it is not known. O(ranks)."""
    ranks = instance.ranks
    facts, size = instance.facts, instance.block_size
    blocks = facts.kv_capacity_blocks if facts is not None else None
    usages = [usage for rank in ranks if (usage := kv_usage(instance, rank)) is not None]
    reported = [rank.reported for rank in ranks if rank.reported is not None]
    caches = [held.get(rank.holder, {}) for rank in ranks]
    return (
        instance.instance_id,
        str(instance.role),
        str(instance.health),
        instance.health_reason,
        instance.circuit.suspensions,
        _retry_in_s(instance, now_s),
        len(ranks),
        sum(rank.placements for rank in ranks),
        sum(rank.pending_prefills for rank in ranks),
        round(min(rank.queue_s(now_s) for rank in ranks) * 1e3, 1),
        sum(rank.active_decodes for rank in ranks),
        sum(rank.context_tokens for rank in ranks),
        round(max(usages), 4) if usages else None,
        sum(load.running for load in reported) if reported else None,
        sum(load.waiting for load in reported) if reported else None,
        blocks * size * len(ranks) if blocks and size else None,
        size,
        instance.instance_class.kv_bytes_per_token,
        *(sum(cache.get(tier, 0) for cache in caches) for tier in Tier),
    )


def _retry_in_s(instance: InstanceState, now_s: float) -> float | None:
    until_s = instance.circuit.suspended_until_s
    if instance.health is not Health.SUSPENDED or math.isinf(until_s):
        return None
    return round(max(until_s - now_s, 0.0), 1)
