"""The next turn of a conversation: its prompt so far is brought to a fast tier before it is expected."""

from __future__ import annotations

from conductor.actions import ActionKind, Place
from conductor.cluster import InstanceState
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefix_tree import Segment
from conductor.tier_planner.sites import Site

EXPECTED_WITHIN_S = 60.0  # a copy that is not used within this time was made too early


def bring(
    outlook: Outlook,
    kind: ActionKind,
    segment: Segment,
    instance: InstanceState,
    probability: float,
    deadline_s: float,
    reason: str,
    now_s: float,
) -> Proposal | None:
    """A copy of a prefix, up to a segment's end, into an instance's fastest site, where that pays.

    ``probability`` is that of its being needed there before it is dropped.
    """
    site = outlook.sites.own(instance.instance_id)
    if site is None:
        return None
    prefix, stop = segment.prefix, segment.stop
    held = outlook.held(prefix, stop)
    start = held.blocks(site.place)
    if start >= stop:
        return None
    tokens = prefix.namespace.block_size
    for source in held.sources(kind, start, stop, site.place):
        if _loads_as_fast(source.place, site, instance):
            return None
        moved = (source.stop - start) * tokens
        now_so_s = held.get_s(instance, source.stop)
        then_s = held.get_s(instance, start) + outlook.sites.load_s(site.place.tier, instance, moved)
        benefit_s = probability * outlook.track_record.factor(kind) * (now_so_s - then_s)
        cost_s = outlook.demand.price(source.place.holder, now_s) * source.seconds
        if benefit_s > cost_s:
            return Proposal(
                kind,
                prefix,
                start,
                source.stop,
                source.place,
                site.place,
                round(moved * instance.instance_class.kv_bytes_per_token),
                benefit_s,
                cost_s,
                deadline_s,
                reason,
                chance=probability,
            )
    return None


def prefetch(
    outlook: Outlook, segment: Segment, instance: InstanceState, probability: float, now_s: float
) -> Proposal | None:
    """``probability`` is that of a next turn of the conversation that ends here, within `EXPECTED_WITHIN_S`."""
    return bring(
        outlook,
        ActionKind.PREFETCH,
        segment,
        instance,
        probability,
        now_s + EXPECTED_WITHIN_S,
        f"its next turn comes within {EXPECTED_WITHIN_S:.0f} s with probability {probability:.2f}",
        now_s,
    )


def _loads_as_fast(source: Place, site: Site, instance: InstanceState) -> bool:
    """Whether the instance has the blocks in a tier of its own that is as fast already."""
    mine = source.holder.instance_id == instance.instance_id
    return mine and source.tier <= site.place.tier
