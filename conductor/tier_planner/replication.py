"""Copies of hot prefixes for instances that are about to be asked for them, not only where a request landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from conductor.actions import ActionKind
from conductor.cluster import InstanceState
from conductor.tier_planner.hot_prefixes import LEAST_CHILDREN
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefetching import bring
from conductor.tier_planner.prefix_tree import Segment

HORIZON_S = 60.0  # over which a copy's use is counted
LEAST_RATE = 1 / 20  # uses a second of a prefix that is worth a copy
LEAST_QUEUE_S = 0.05  # before every holder, for load to go elsewhere


def replicate(
    outlook: Outlook, hot: Iterable[tuple[Segment, float, float]], model: str, now_s: float
) -> Iterator[Proposal]:
    """``hot`` are segments with their uses per second, and the share of them that went where it was not held.

    The copy goes to the candidate with the shortest queue that lacks it: that is where a scheduler sends what it
    moves away from a holder.
    """
    wanted = [
        each
        for each in hot
        if each[1] >= LEAST_RATE and each[2] > 0.0 and len(each[0].children) >= LEAST_CHILDREN
    ]
    in_order: list[InstanceState] = []  # of their queues
    for segment, rate, missed in wanted:
        held = outlook.held(segment.prefix, segment.stop)
        shortest_s = inf
        for instance in outlook.instances_of(model, now_s):
            if held.by_instance(instance) >= segment.stop:
                shortest_s = min(shortest_s, _queue_s(instance, now_s))
                if shortest_s < LEAST_QUEUE_S:
                    break
        if not LEAST_QUEUE_S <= shortest_s < inf:
            continue  # nobody holds it, or whoever comes next is served by a holder at once
        if not in_order:
            in_order = sorted(outlook.instances_of(model, now_s), key=lambda each: _queue_s(each, now_s))
        for instance in in_order:
            site = outlook.sites.own(instance.instance_id)
            if site is None or held.blocks(site.place) >= segment.stop:
                continue
            proposal = bring(
                outlook,
                ActionKind.REPLICATE,
                segment,
                instance,
                missed * rate * HORIZON_S / len(in_order),
                now_s + HORIZON_S,
                f"{rate:.2f} uses a second, {missed:.0%} of them where it was not held; "
                f"{instance.instance_id} has the shortest queue of those without",
                now_s,
            )
            if proposal is not None:
                yield proposal
            break


def _queue_s(instance: InstanceState, now_s: float) -> float:
    return min(rank.queue_s(now_s) for rank in instance.ranks)
