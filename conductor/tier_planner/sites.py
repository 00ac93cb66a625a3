"""Where the planner may have blocks put, and what it takes to load them from there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cache_index import CacheIndex, Holder, Tier
from conductor.actions import Place
from conductor.cluster import Cluster, InstanceState
from conductor.costs import POOL_TIERS, Speed

HIGH: Final = 0.98  # of a site's capacity: when room is made


@dataclass(frozen=True, slots=True)
class Site:
    """A slower tier of an instance, or of a cache server beside it, or a shared pool, with its size.

    ``members`` are the instances that load from it, None: all. ``speed`` is a pool's own, shared by its members;
    None for an instance's tier, whose class says how fast it is. ``block_tokens`` are those of what the index
    counts there, None: as many as prompts' blocks have. ``write_back`` are the instances that do not write through
    to it: it gets what is handed down.
    """

    place: Place
    capacity_tokens: int
    members: frozenset[str] | None
    speed: Speed | None = None
    block_tokens: int | None = None
    write_back: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1:
            raise ValueError(f"{self.place}: capacity_tokens must be positive, not {self.capacity_tokens}")

    def serves(self, instance_id: str) -> bool:
        return self.members is None or instance_id in self.members

    @property
    def near(self) -> bool:
        """Beside the instances that load from it; a pool is not."""
        return self.place.tier in (Tier.HOST, Tier.DISK)


class Sites:
    """All sites of a cluster, and the times that transfers take when nothing else is on their links."""

    def __init__(self, cluster: Cluster, sites: Iterable[Site]) -> None:
        self._cluster = cluster
        self._sites = {site.place: site for site in sites}
        self._members: dict[str, list[Site]] = {}  # but for those of all instances
        self._for_all: list[Site] = []
        self._of: dict[str, Sequence[Site]] = {}
        self._own: dict[str, Site | None] = {}
        listed = self._sites.values()
        self._tiers = np.array([site.place.tier for site in listed], np.int64)
        self._capacities = np.array([site.capacity_tokens for site in listed], np.int64)
        self._block_tokens = np.array([site.block_tokens or 0 for site in listed], np.int64)
        self._rows = -1, np.empty(0, np.int64)  # in the index, after so many registrations
        # Servers that are no instances, each with one that it stands beside.
        self._beside: dict[Holder, InstanceState] = {}
        for site in self._sites.values():
            for member in site.members or ():
                self._members.setdefault(member, []).append(site)
            if site.members is None:
                self._for_all.append(site)
            near = [] if site.members is None or not site.near else map(cluster.get, sorted(site.members))
            instance = next((each for each in near if each is not None), None)
            if instance is not None:
                self._beside[site.place.holder] = instance

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites.values())

    def __len__(self) -> int:
        return len(self._sites)

    def full(self, index: CacheIndex, block_tokens: int) -> list[tuple[Site, int]]:
        """Those at `HIGH` and above, with how much they have in blocks of so many tokens."""
        if index.registrations != self._rows[0]:
            registrations, row_of = index.registered()
            rows = [row_of.get(place.holder, -1) for place in self._sites]
            self._rows = registrations, np.array(rows, np.int64)
        sizes = np.where(self._block_tokens, self._block_tokens, block_tokens)
        blocks = index.held_counts(self._rows[1], self._tiers) * sizes // block_tokens
        full = blocks >= HIGH * (self._capacities // block_tokens)
        sites = list(self._sites.values())
        return [(sites[at], int(blocks[at])) for at in full.nonzero()[0].tolist()]

    def get(self, place: Place) -> Site | None:
        return self._sites.get(place)

    def of(self, instance_id: str) -> Sequence[Site]:
        """Those that an instance loads from, the fastest tier first."""
        found = self._of.get(instance_id)
        if found is None:
            mine = [*self._members.get(instance_id, ()), *self._for_all]
            found = self._of[instance_id] = sorted(mine, key=lambda site: site.place.tier)
        return found

    def own(self, instance_id: str) -> Site | None:
        """The fastest of those beside an instance."""
        if instance_id not in self._own:
            self._own[instance_id] = next((s for s in self.of(instance_id) if s.near), None)
        return self._own[instance_id]

    def pool(self, instance_id: str, tier: Tier) -> Site | None:
        """The pool that an instance loads from as that tier of its own."""
        if tier < POOL_TIERS[0]:
            return None
        return next((s for s in self.of(instance_id) if s.place.tier is tier and not s.near), None)

    def load_s(self, tier: Tier, instance: InstanceState, tokens: int) -> float:
        """Seconds to load tokens from a tier to an instance's device; infinite where it cannot."""
        if tier is Tier.DEVICE or tokens <= 0:
            return 0.0
        speed = instance.instance_class.tiers.get(tier)
        return float("inf") if speed is None else _seconds(speed, tokens, instance)

    def load_from_s(self, site: Site, instance: InstanceState, tokens: int) -> float:
        """The same from a site, a pool's own speed included."""
        seconds = self.load_s(site.place.tier, instance, tokens)
        if site.speed is None or tokens <= 0:
            return seconds
        return max(seconds, _seconds(site.speed, tokens, instance))

    def store_from_s(self, site: Site, instance: InstanceState, tokens: int) -> float:
        """Seconds to copy tokens the other way, from an instance to a site, encoded where the site's store does."""
        own = instance.instance_class.tiers.get(site.place.tier)
        if own is None or tokens <= 0:
            return float("inf") if tokens > 0 else 0.0
        return max(_seconds(speed, tokens, instance, stores=True) for speed in (own, site.speed or own))

    def transfer_s(self, source: Place, target: Place, tokens: int) -> float:
        """Seconds of a copy between two places, coding included; infinite where there is no way."""
        one, other = self._instance_at(source.holder), self._instance_at(target.holder)
        if one is None and other is None:
            return float("inf")
        if one is None or other is None:  # from or to a pool
            instance = one or other
            assert instance is not None
            pool = source if one is None else target
            site = self._sites.get(pool)
            if site is None:
                return self.load_s(pool.tier, instance, tokens)
            timed = self.store_from_s if pool is target else self.load_from_s
            return timed(site, instance, tokens)
        if one is other:
            site = self._sites.get(target)
            if site is not None and target.tier > source.tier:
                return self.store_from_s(site, one, tokens)
            return self.load_s(max(source.tier, target.tier), one, tokens)
        link = self._link(one, other)
        network_s = max(_seconds(speed, tokens, one) for speed in (link, one.instance_class.nic))
        return max(network_s, self.load_s(source.tier, one, tokens))

    def _instance_at(self, holder: Holder) -> InstanceState | None:
        """The instance itself, or one that a cache server stands beside; None for a pool."""
        return self._cluster.get(holder.instance_id) or self._beside.get(holder)

    def _link(self, one: InstanceState, other: InstanceState) -> Speed:
        topology = self._cluster.topology
        here = topology.location_ids(one.location, one.instance_id)
        there = topology.location_ids(other.location, other.instance_id)
        shared = (d for d, (a, b) in enumerate(zip(here, there, strict=True)) if a == b)
        links = list(topology.links.values())
        return links[next(shared, len(links) - 1)]


def recompute_s(instance: InstanceState, start: int, stop: int) -> float:
    """Seconds to compute tokens ``start`` to ``stop`` of a prompt instead of loading them."""
    kind = instance.instance_class
    tokens = stop - start
    return kind.prefill_s_per_token * tokens + kind.prefill_s_per_token_squared * (
        float(stop) * stop - float(start) * start
    )


def _seconds(speed: Speed, tokens: int, instance: InstanceState, *, stores: bool = False) -> float:
    rate = speed.store_bytes_per_s if stores else speed.load_bytes_per_s
    return speed.latency_s + tokens * instance.instance_class.kv_bytes_per_token / rate
