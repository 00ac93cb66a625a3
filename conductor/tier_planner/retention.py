"""What a full tier drops or hands down: the segments whose next use is least to be expected, ends first.

An engine left alone drops what was used longest ago. Most of a cache is never used again, and what will be is not
what was used last: see `conductor.reuse` for what is learned of that.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from conductor.actions import ActionKind
from conductor.tier_planner.compression import ways_down
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefix_tree import Segment, Stay
from conductor.tier_planner.sites import Site

LEFT_BEHIND = 0.1  # chance that a prompt comes back where it was not served last, beside where it was
LOW = 0.95  # of a site's capacity: what is kept when room is made; when that is, `Sites.full` says

_parent_of = attrgetter("parent")


@dataclass(frozen=True, slots=True)
class FullSite:
    """A site, the segments that it should have with their stays there, and the blocks that it has.

    ``unknown_blocks`` were there before all that is known: they are what the engine itself drops first.
    """

    site: Site
    stays: Mapping[Segment, Stay]
    used_blocks: int
    unknown_blocks: int = 0

    def surplus(self, block_tokens: int) -> int:
        """Blocks that are to be dropped of those that are known."""
        return self.used_blocks - self.unknown_blocks - int(LOW * (self.site.capacity_tokens // block_tokens))


def make_room(
    outlook: Outlook, full: Sequence[FullSite], block_tokens: int, now_s: float
) -> Iterator[Proposal]:
    """Orders to drop what full sites should not keep. Their stays must not change until the last one."""
    full = [each for each in full if each.surplus(block_tokens) > 0]
    # All at once: it is by far less than one by one.
    rates = iter(outlook.returns.rates([s for each in full for s in each.stays], now_s).tolist())
    for each in full:
        rate_of = dict(zip(each.stays, rates))  # noqa: B905 -- the others are the next sites'
        yield from _room_at(outlook, each, rate_of, block_tokens, now_s)


def _room_at(
    outlook: Outlook, full: FullSite, rate_of: dict[Segment, float], block_tokens: int, now_s: float
) -> Iterator[Proposal]:
    site, used_blocks, stays = full.site, full.used_blocks, full.stays
    capacity = site.capacity_tokens // block_tokens
    wanted = full.surplus(block_tokens)
    # Segments here that go on behind each. Children are asked, not parents: what many prompts begin with has
    # thousands of children elsewhere.
    left = Counter(map(_parent_of, stays))
    ends = [
        (rate_of[s] * _nearness(s, stay), s.last_used_s, number, s)
        for number, (s, stay) in enumerate(stays.items())
        if s not in left
    ]
    heapq.heapify(ends)
    numbers = len(stays)
    while ends and wanted > 0:
        rate, _, _, segment = heapq.heappop(ends)
        if stays[segment].held_until_s > now_s:
            continue
        there = outlook.blocks_at(segment, site.place)
        if there > 0:
            demotion = _hand_down(outlook, site, segment, there, rate, now_s)
            if demotion is not None:
                yield demotion
                wanted -= there
                continue  # it is dropped once it lies there, and its beginning not before it
            yield Proposal(
                ActionKind.EVICT,
                segment.prefix,
                segment.start,
                segment.start + there,
                None,
                site.place,
                0,
                benefit_s=0.0,
                cost_s=0.0,
                deadline_s=now_s + 30.0,
                reason=f"{used_blocks} of {capacity} blocks are taken; {rate * 3600:.2g} uses an hour expected",
                rate=rate,
                segment=segment,
            )
            wanted -= there
        parent = segment.parent
        if parent is not None and parent in stays:
            left[parent] -= 1
            if not left[parent]:
                numbers += 1
                rate = max(rate, rate_of[parent] * _nearness(parent, stays[parent]))
                heapq.heappush(ends, (rate, parent.last_used_s, numbers, parent))


def _nearness(segment: Segment, stay: Stay) -> float:
    """Where a prompt was served and did not go on it is hardly to be expected."""
    return 1.0 if stay.last_used_s == segment.last_used_s else LEFT_BEHIND


def _hand_down(
    outlook: Outlook, site: Site, segment: Segment, there: int, rate: float, now_s: float
) -> Proposal | None:
    """A copy into the slower tier that gains most by it, where one does; the blocks are dropped here later."""
    ways = ways_down(outlook, site, segment, there, now_s)
    instance = outlook.cluster.get(site.place.holder.instance_id)
    if not ways or instance is None:
        return None
    best, stop = ways[0], segment.start + there
    tokens = (stop - best.start) * segment.prefix.namespace.block_size
    beside = ""
    if len(ways) > 1:
        more_ms = (best.gain_s - ways[1].gain_s) * 1e3
        beside = f" (gains {more_ms:.2g} ms a block more than {ways[1].site.place})"
    return Proposal(
        ActionKind.DEMOTE,
        segment.prefix,
        best.start,
        stop,
        site.place,
        best.site.place,
        round(tokens * instance.instance_class.kv_bytes_per_token),
        best.benefit_s,
        best.cost_s,
        deadline_s=now_s + 30.0,
        reason=f"{site.place} is full, {best}{beside}; {rate * 3600:.2g} uses expected an hour",
    )
