"""What a full tier drops or hands down: the segments whose next use is least to be expected, ends first.

An engine left alone drops what was used longest ago. Most of a cache is never used again, and what will be is not
what was used last: see `conductor.reuse` for what is learned of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from conductor.actions import ActionKind
from conductor.tier_planner.compression import ways_down
from conductor.tier_planner.contents import SiteContents
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefix_tree import Segment
from conductor.tier_planner.sites import Site

LEFT_BEHIND = 0.1  # chance that a prompt comes back where it was not served last, beside where it was
LOW = 0.95  # of a site's capacity: what is kept when room is made; when that is, `Sites.full` says


@dataclass(frozen=True, slots=True)
class FullSite:
    """A site, what it should have, and the blocks that it has. Those that were there before all that is known are
    what the engine itself drops first.
    """

    site: Site
    contents: SiteContents
    used_blocks: int

    def surplus(self, block_tokens: int) -> int:
        """Blocks that are to be dropped of those that are known."""
        unknown = self.contents.unknown_blocks or 0
        return self.used_blocks - unknown - int(LOW * (self.site.capacity_tokens // block_tokens))


def make_room(
    outlook: Outlook, full: Sequence[FullSite], block_tokens: int, now_s: float
) -> Iterator[Proposal]:
    """Orders to drop what full sites should not keep. Their contents must not change until the last one."""
    full = [each for each in full if each.surplus(block_tokens) > 0]
    if not full:
        return
    ends = _ranked(outlook, full, now_s)
    # What is before them, and may go with them. All at once: it is by far less than one by one.
    foreseen = [_before(each, some, block_tokens) for each, some in zip(full, ends, strict=True)]
    before = list(dict.fromkeys(chain.from_iterable(foreseen)))
    rate_of = dict(zip(before, outlook.returns.rates(before, now_s).tolist(), strict=True))
    for each, some in zip(full, ends, strict=True):
        yield from _room_at(outlook, each, some, rate_of, block_tokens, now_s)


def _ranked(outlook: Outlook, full: Sequence[FullSite], now_s: float) -> list[dict[Segment, float]]:
    """Each site's ends with their rates, in the order in which they go: of equal ones the longest unused first.

    Few are looked at in the end, so no more is made of each here than numbers.
    """
    ends = [segment for each in full for segment in each.contents.ends]
    rates = outlook.returns.rates(ends, now_s)
    used_s = np.array([segment.last_used_s for segment in ends])
    here_s = np.array([stay.last_used_s for each in full for stay in each.contents.ends.values()])
    rates *= np.where(used_s == here_s, 1.0, LEFT_BEHIND)
    counts = [len(each.contents.ends) for each in full]
    order = np.lexsort((used_s, rates, np.repeat(np.arange(len(full)), counts)))
    ranked = zip(map(ends.__getitem__, order.tolist()), rates[order].tolist(), strict=True)
    return [dict(islice(ranked, each)) for each in counts]


def _before(full: FullSite, ends: Iterable[Segment], block_tokens: int) -> Iterator[Segment]:
    """Segments before those ends that will be dropped as far as can be foreseen."""
    wanted = full.surplus(block_tokens)
    for end in ends:
        if wanted <= 0:
            return
        wanted -= end.blocks
        room = wanted
        for segment in islice(end.path(), 1, None):
            if room <= 0 or segment not in full.contents.stays:
                break
            yield segment
            room -= segment.blocks


def _room_at(
    outlook: Outlook,
    full: FullSite,
    ends: dict[Segment, float],
    rate_of: dict[Segment, float],
    block_tokens: int,
    now_s: float,
) -> Iterator[Proposal]:
    """``ends`` are in order, ``rate_of`` knows what is before them. What goes in one piece is one order."""
    contents, place = full.contents, full.site.place
    stays, wanted = contents.stays, full.surplus(block_tokens)
    in_order = ((rate, s.last_used_s, number, s, s) for number, (s, rate) in enumerate(ends.items()))
    # The next end, and what nothing is behind any more; numbers decide between equals.
    nearest = list(islice(in_order, 1))
    gone: dict[Segment, int] = {}  # of what is behind each
    drops: dict[Segment, _Drop] = {}  # by their first segments
    while nearest and wanted > 0:
        rate, _, number, segment, behind = heapq.heappop(nearest)
        if behind is segment:
            for end in islice(in_order, 1):
                heapq.heappush(nearest, end)
        if stays[segment].held_until_s > now_s:
            continue
        there = outlook.blocks_at(segment, place)
        if there > 0:
            demotion = _hand_down(outlook, full.site, segment, there, rate, now_s)
            if demotion is not None:
                yield demotion
                wanted -= there
                continue  # it is dropped once it lies there, and its beginning not before it
            whole = there == segment.blocks and behind in drops
            last, stop = drops.pop(behind)[:2] if whole else (segment, segment.start + there)
            drops[segment] = last, stop, rate
            wanted -= there
        parent = segment.parent
        if parent is not None and parent in stays:
            gone[parent] = gone.get(parent, 0) + 1
            if gone[parent] == contents.behind[parent]:
                if parent not in rate_of:
                    rate_of[parent] = float(outlook.returns.rates([parent], now_s)[0])
                near = 1.0 if stays[parent].last_used_s == parent.last_used_s else LEFT_BEHIND
                rate = max(rate, near * rate_of[parent])
                heapq.heappush(nearest, (rate, parent.last_used_s, number, parent, segment))
    for first, (last, stop, rate) in drops.items():
        yield _drop(full, first, last, stop, rate, block_tokens, now_s)


_Drop = tuple[Segment, int, float]  # the last segment, up to which block, and its uses per second


def _drop(
    full: FullSite, first: Segment, last: Segment, stop: int, rate: float, block_tokens: int, now_s: float
) -> Proposal:
    capacity = full.site.capacity_tokens // block_tokens
    return Proposal(
        ActionKind.EVICT,
        last.prefix,
        first.start,
        stop,
        None,
        full.site.place,
        0,
        benefit_s=0.0,
        cost_s=0.0,
        deadline_s=now_s + 30.0,
        reason=f"{full.used_blocks} of {capacity} blocks are taken; {rate * 3600:.2g} uses an hour expected",
        rate=rate,
        segment=last,
    )


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
