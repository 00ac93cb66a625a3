"""How much room the tiers have: their configured capacity less what the index knows to lie there."""

from __future__ import annotations

from collections.abc import Mapping

from cache_index import CacheIndex, Holder, Tier
from cache_index.lmcache_directory import is_lmcache
from cache_index.lmcache_keys import CHUNK_TOKENS
from conductor.actions import Place
from conductor.cluster import DEFAULT_BLOCK_SIZE, Cluster


class TierRoom:
    """``capacities`` are bytes by instance id and tier name; other places have no known bound.

    Blocks are taken to be as large as those of the instance's own class, or of the cluster's first instance;
    LMCache's chunks to have `CHUNK_TOKENS` tokens of it.
    """

    def __init__(
        self, cluster: Cluster, index: CacheIndex, capacities: Mapping[tuple[str, str], float]
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._capacities = dict(capacities)

    def free_bytes(self, place: Place) -> float | None:
        """Of raw KV; None where the capacity is not configured. Ranks of an instance share it. O(holders)."""
        instance_id = place.holder.instance_id
        capacity = self._capacities.get((instance_id, place.tier.name.lower()))
        if capacity is None:
            return None
        held = sum(
            tiers.get(place.tier, 0)
            for holder, tiers in self._index.stats().residencies_by_holder.items()
            if holder.instance_id == instance_id
        )
        stored, ratio = self._block_bytes(instance_id, place.tier)
        return max(capacity - held * stored, 0.0) * ratio

    def _block_bytes(self, instance_id: str, tier: Tier) -> tuple[float, float]:
        """Of a block in the tier's store, and how much more it is raw."""
        instance = self._cluster.get(instance_id) or next(iter(self._cluster), None)
        if instance is None:
            return 0.0, 1.0
        size = instance.block_size or DEFAULT_BLOCK_SIZE
        if is_lmcache(Holder(instance_id)):
            size = CHUNK_TOKENS
        kind = instance.instance_class
        stored = kind.stored_bytes_per_token(tier)
        return size * stored, kind.kv_bytes_per_token / stored
