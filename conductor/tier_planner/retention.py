"""What a full tier drops or hands down: the segments whose next use is least to be expected, ends first.

An engine left alone drops what was used longest ago. Most of a cache is never used again, and what will be is not
what was used last: see `conductor.reuse` for what is learned of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from conductor.actions import ActionKind
from conductor.tier_planner.outlook import Held, Outlook, Proposal
from conductor.tier_planner.prefix_tree import Segment
from conductor.tier_planner.sites import Site, recompute_s

KEPT_S = 3600.0  # how long a slower tier is taken to keep what it is given
LEFT_BEHIND = 0.1  # chance that a prompt comes back where it was not served last, beside where it was
HIGH, LOW = 0.98, 0.95  # of a site's capacity: when room is made, and how much is left then


def make_room(
    outlook: Outlook,
    site: Site,
    segments: Sequence[Segment],
    used_blocks: int,
    block_tokens: int,
    now_s: float,
) -> Iterator[Proposal]:
    """Orders to drop what a site should not keep of ``segments``, those that it has."""
    capacity = site.capacity_tokens // block_tokens
    if used_blocks < HIGH * capacity:
        return
    wanted = used_blocks - int(LOW * capacity)
    rates = outlook.returns.rates(segments, now_s).tolist()
    rates = [
        rate if s.held_at[site.place].last_used_s == s.last_used_s else rate * LEFT_BEHIND
        for s, rate in zip(segments, rates, strict=True)
    ]
    rate_of = dict(zip(segments, rates, strict=True))
    left = dict.fromkeys(segments, 0)  # segments here that go on behind each
    for segment in segments:
        # Children are asked, not parents: what many prompts begin with has thousands of children elsewhere.
        if segment.parent in left:
            left[segment.parent] += 1
    ends = [(rate_of[s], s.last_used_s, number, s) for number, s in enumerate(segments) if not left[s]]
    heapq.heapify(ends)
    numbers = len(segments)
    while ends and wanted > 0:
        rate, _, _, segment = heapq.heappop(ends)
        if segment.held_at[site.place].held_until_s > now_s:
            continue
        held = outlook.held(segment.prefix, segment.stop)
        there = held.blocks(site.place) - segment.start
        if there > 0:
            demotion = _hand_down(outlook, held, site, segment, there, rate, now_s)
            if demotion is not None:
                yield demotion
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
            )
            wanted -= there
        parent = segment.parent
        if parent in left:
            assert parent is not None
            left[parent] -= 1
            if not left[parent]:
                numbers += 1
                heapq.heappush(ends, (max(rate, rate_of[parent]), parent.last_used_s, numbers, parent))


def _hand_down(
    outlook: Outlook, held: Held, site: Site, segment: Segment, there: int, rate: float, now_s: float
) -> Proposal | None:
    """A copy into the next slower tier that lacks these blocks, where that pays; they are dropped here later."""
    stop, tokens = segment.start + there, segment.prefix.namespace.block_size
    instance = outlook.cluster.get(site.place.holder.instance_id)
    if instance is None:
        return None
    for slower in outlook.sites.of(instance.instance_id):
        if slower.place.tier <= site.place.tier:
            continue
        if held.blocks(slower.place) >= stop:
            return None
        if not outlook.can(ActionKind.DEMOTE, site.place, slower.place):
            continue
        compute_s = recompute_s(instance, segment.start * tokens, stop * tokens)
        load_s = outlook.sites.load_from_s(slower, instance, there * tokens)
        price = outlook.demand.price(slower.place.holder, now_s)
        transfer_s = outlook.sites.transfer_s(site.place, slower.place, there * tokens)
        benefit_s = outlook.returns.probability(segment, KEPT_S, now_s) * (compute_s - load_s)
        if benefit_s > price * transfer_s:
            return Proposal(
                ActionKind.DEMOTE,
                segment.prefix,
                segment.start,
                stop,
                site.place,
                slower.place,
                round(there * tokens * instance.instance_class.kv_bytes_per_token),
                benefit_s,
                price * transfer_s,
                deadline_s=now_s + 30.0,
                reason=f"{site.place} is full, {slower.place} lacks it; {rate * 3600:.2g} uses expected an hour",
            )
    return None
