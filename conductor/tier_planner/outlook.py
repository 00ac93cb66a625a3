"""What the planner's rules look at: the cluster, what is held where, and what is known of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Tier
from conductor.actions import ActionKind, Place, Prefix
from conductor.cluster import Cluster, InstanceState
from conductor.tier_planner.link_demand import LinkDemand
from conductor.tier_planner.prefix_tree import PrefixTree, Segment
from conductor.tier_planner.returns import Returns
from conductor.tier_planner.sites import Site, Sites, recompute_s
from conductor.tier_planner.track_record import TrackRecord


class Proposal(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An action that would pay, before budgets are looked at. Fields as those of `TierAction`."""

    kind: ActionKind
    prefix: Prefix
    start: int
    stop: int
    source: Place | None
    target: Place
    kv_bytes: int
    benefit_s: float
    cost_s: float
    deadline_s: float
    reason: str
    chance: float | None = None  # that a copy is used in time
    rate: float = 0.0  # uses a second of what is dropped
    segment: Segment | None = None  # that is dropped, with those before it from ``start`` on


Match = Callable[[Prefix, int], NDArray[np.int32]]
"""What every holder has of a prefix's first so many blocks: ``[holder_id, tier]`` as `CacheIndex.match`."""


class Source(NamedTuple):
    """Who has blocks from some point of a prefix on, up to which one, and how long a copy of them takes."""

    place: Place
    stop: int
    seconds: float


@dataclass(slots=True)
class Outlook:
    """``can`` tells whether somebody carries out such an action."""

    cluster: Cluster
    index: CacheIndex
    match: Match
    sites: Sites
    tree: PrefixTree
    returns: Returns
    demand: LinkDemand
    track_record: TrackRecord
    can: Callable[[ActionKind, Place | None, Place], bool]

    def held(self, prefix: Prefix, stop: int) -> Held:
        """What every holder has of a prefix's first blocks."""
        return Held(self, prefix, self.match(prefix, stop))

    def blocks_at(self, segment: Segment, place: Place) -> int:
        """How many blocks of a segment, from its first on, a place has, in tiers up to its own."""
        prefix, site = segment.prefix, self.sites.get(place)
        if site is not None and site.block_tokens is not None:  # known by other hashes than ours
            return self.held(prefix, segment.stop).blocks(place) - segment.start
        return self.index.held_run(
            place.holder, place.tier, prefix.namespace, prefix.hashes[segment.start : segment.stop]
        )

    def run_at(self, prefix: Prefix, start: int, stop: int, place: Place) -> int:
        """Up to which block a place itself, without its holder's faster tiers, has a prefix from ``start`` on."""
        site = self.sites.get(place)
        if site is not None and site.block_tokens is not None:  # known by other hashes than ours
            return max(self.held(prefix, stop).blocks(place), start)
        hashes = prefix.hashes[start:stop]
        return start + self.index.held_run(place.holder, place.tier, prefix.namespace, hashes, alone=True)

    def held_tokens(self, site: Site, block_tokens: int) -> int:
        """What the index counts at a site, in tokens; ``block_tokens`` are those of prompts' blocks."""
        return self.index.held_blocks(*site.place) * (site.block_tokens or block_tokens)

    def instances_of(self, model: str, now_s: float) -> Iterator[InstanceState]:
        """Candidates that serve a model."""
        return (i for i in self.cluster if i.serves(model) and i.is_candidate(now_s))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Who has how much of a prefix: ``levels`` as `CacheIndex.match` gives them."""

    outlook: Outlook
    prefix: Prefix
    levels: NDArray[np.int32]

    def blocks(self, place: Place) -> int:
        """From the first on without a gap, in tiers up to the place's."""
        row = self.outlook.index.holder_id(place.holder)
        return 0 if row is None or row >= len(self.levels) else int(self.levels[row, place.tier])

    def holders(self) -> Iterator[tuple[Holder, list[int]]]:
        """Those that have any of it, with their blocks by tier."""
        for row in self.levels[:, -1].nonzero()[0].tolist():
            holder = self.outlook.index.holder(row)
            if holder is not None:
                yield holder, self.levels[row].tolist()

    def by_instance(self, instance: InstanceState) -> int:
        """What one of an instance's ranks has, in whatever tiers."""
        return self._at_hand(instance, Tier.REMOTE)

    def get_s(self, instance: InstanceState, stop: int) -> float:
        """Seconds until an instance has the first ``stop`` blocks on its device, by loads and else by computing."""
        tokens = self.prefix.namespace.block_size
        seconds, at = 0.0, min(self._at_hand(instance, Tier.DEVICE), stop)
        for site in self.outlook.sites.of(instance.instance_id):
            upto = min(self.blocks(site.place), stop)
            if upto > at:
                load_s = self.outlook.sites.load_from_s(site, instance, (upto - at) * tokens)
                seconds += min(load_s, recompute_s(instance, at * tokens, upto * tokens))
                at = upto
        for tier in Tier:  # and what it reaches that is no site, such as the store behind its cache server
            upto = min(self._at_hand(instance, tier), stop)
            if upto > at:
                load_s = self.outlook.sites.load_s(tier, instance, (upto - at) * tokens)
                seconds += min(load_s, recompute_s(instance, at * tokens, upto * tokens))
                at = upto
        return seconds + recompute_s(instance, at * tokens, stop * tokens)

    def _at_hand(self, instance: InstanceState, tier: Tier) -> int:
        return max(self.blocks(Place(rank.holder, tier)) for rank in instance.ranks)

    def sources(self, kind: ActionKind, start: int, stop: int, target: Place) -> list[Source]:
        """Where blocks from ``start`` on can be copied from, those first that have most, then the fastest."""
        tokens = self.prefix.namespace.block_size
        found = []
        for holder, by_tier in self.holders():
            for tier in Tier:
                place = Place(holder, tier)
                upto = min(by_tier[tier], stop)
                if upto <= start or place == target or (tier > 0 and by_tier[tier] == by_tier[tier - 1]):
                    continue
                if self.outlook.can(kind, place, target):
                    seconds = self.outlook.sites.transfer_s(place, target, (upto - start) * tokens)
                    if seconds < float("inf"):
                        found.append(Source(place, upto, seconds))
        return sorted(found, key=lambda source: (-source.stop, source.seconds))
