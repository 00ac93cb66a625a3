"""Where a full tier hands a segment down: to a slower tier that holds it raw, to one that encodes it, or nowhere.

A store encodes all that it holds or nothing of it, so the choice is one of tiers. What is encoded takes less of the
link and of the room, and is decoded whenever it is loaded: that pays where the link is what holds a load up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conductor.actions import ActionKind
from conductor.tier_planner.outlook import Outlook
from conductor.tier_planner.prefix_tree import Segment
from conductor.tier_planner.sites import Site, recompute_s

KEPT_S = 3600.0  # how long a slower tier is taken to keep what it is given


@dataclass(frozen=True, slots=True)
class WayDown:
    """``blocks`` from ``start`` on that a slower tier lacks; ``ratio`` is of raw bytes to those that it stores.

    ``copy_s`` and ``load_s`` are transfers with their coding beside them; ``price`` is what a second of the copy
    costs others.
    """

    site: Site
    start: int
    blocks: int
    ratio: float
    chance: float  # of reuse
    compute_s: float
    load_s: float
    copy_s: float
    price: float

    @property
    def benefit_s(self) -> float:
        return self.chance * (self.compute_s - self.load_s)

    @property
    def cost_s(self) -> float:
        return self.price * self.copy_s

    @property
    def gain_s(self) -> float:
        """Of a block: a pool that lacks a prompt's beginning is given it too, which another may be given later."""
        return (self.benefit_s - self.cost_s) / self.blocks

    def __str__(self) -> str:
        if self.ratio == 1.0:
            kept, loads = "raw", "loads"
        else:
            kept, loads = f"encoded to 1/{self.ratio:g}", "loads and decodes"
        return (
            f"{self.site.place} lacks it and keeps it {kept}, {loads} in {self.load_s * 1e3:.1f} ms what takes "
            f"{self.compute_s * 1e3:.1f} ms to compute"
        )


def ways_down(outlook: Outlook, site: Site, segment: Segment, there: int, now_s: float) -> list[WayDown]:
    """Those that pay for the ``there`` blocks of a segment that a full site has, best first.

    None where a slower tier has them already. What a pool lacks of the blocks before is copied with them: without a
    prompt's beginning it has nothing of it.
    """
    instance = outlook.cluster.get(site.place.holder.instance_id)
    if instance is None:
        return []
    stop, block_tokens = segment.start + there, segment.prefix.namespace.block_size
    slower_sites = [s for s in outlook.sites.of(instance.instance_id) if s.place.tier > site.place.tier]
    lacking = _lacking(outlook, site, slower_sites, segment, stop)
    if not lacking:
        return []
    chance = outlook.returns.probability(segment, KEPT_S, now_s)
    tiers = instance.instance_class.tiers
    ways = []
    for slower, start in lacking:
        tokens = (stop - start) * block_tokens
        way = WayDown(
            site=slower,
            start=start,
            blocks=stop - start,
            ratio=tiers[slower.place.tier].ratio if slower.place.tier in tiers else 1.0,
            chance=chance,
            compute_s=recompute_s(instance, start * block_tokens, stop * block_tokens),
            load_s=outlook.sites.load_from_s(slower, instance, tokens),
            copy_s=outlook.sites.transfer_s(site.place, slower.place, tokens),
            price=outlook.demand.price(slower.place.holder, now_s),
        )
        if way.gain_s > 0.0:
            ways.append(way)
    return sorted(ways, key=lambda way: -way.gain_s)


def _lacking(
    outlook: Outlook, site: Site, slower_sites: Sequence[Site], segment: Segment, stop: int
) -> list[tuple[Site, int]]:
    """The sites that take a copy, with the block from which on each lacks it; none where one lacks nothing."""
    takers = [s for s in slower_sites if outlook.can(ActionKind.DEMOTE, site.place, s.place)]
    if not takers:
        return []
    lacking = []
    for slower in slower_sites:
        begin = segment.start if slower.place.holder == site.place.holder else 0
        start = outlook.run_at(segment.prefix, begin, stop, slower.place)
        if start >= stop:
            return []
        if slower in takers:
            lacking.append((slower, start))
    return lacking
