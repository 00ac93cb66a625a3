"""Who waits is known here: what a queued request will load from a slow tier is brought nearer while it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cache_index import Tier
from conductor.actions import ActionKind
from conductor.explanation import PlacementRecord
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefetching import bring
from conductor.tier_planner.prefix_tree import Segment


def promote(
    outlook: Outlook, waiting: Iterable[tuple[PlacementRecord, Segment]], now_s: float
) -> Iterator[Proposal]:
    """``waiting`` are requests that have not begun, by prediction, with the last segments of their prompts."""
    for record, segment in waiting:
        begins_s = record.placed_s + record.queue_s
        holder = record.prefill.holder
        slow = [
            part for part in record.placement.plan.segments if part.tier > Tier.HOST or part.holder != holder
        ]
        instance = outlook.cluster.get(holder.instance_id)
        if not slow or instance is None or begins_s <= now_s:
            continue
        tokens = slow[-1].stop - slow[0].start
        proposal = bring(
            outlook,
            ActionKind.PROMOTE,
            segment,
            instance,
            1.0,
            begins_s,
            f"request {record.request.request_id} waits {begins_s - now_s:.2f} s more and loads {tokens} tokens "
            f"from {slow[0].holder.instance_id}/{slow[0].tier.name.lower()}",
            now_s,
        )
        if proposal is not None:
            yield proposal
