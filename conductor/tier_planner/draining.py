"""What an instance that is leaving has and nobody else: it is copied to the others first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conductor.actions import ActionKind
from conductor.cluster import InstanceState
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefetching import bring
from conductor.tier_planner.prefix_tree import Segment

SAVED_FOR_S = 600.0


def drain(
    outlook: Outlook, leaving: InstanceState, segments: Iterable[Segment], model: str, now_s: float
) -> Iterator[Proposal]:
    """``segments`` are ends of prompts that were served there; each goes where the least is queued."""
    others = [i for i in outlook.instances_of(model, now_s) if i is not leaving]
    if not others:
        return
    for number, segment in enumerate(segments):
        held = outlook.held(segment.prefix, segment.stop)
        elsewhere = max((by_tier[-1] for holder, by_tier in held.holders()
                         if holder.instance_id != leaving.instance_id), default=0)  # fmt: skip
        if elsewhere >= segment.stop:
            continue
        probability = outlook.returns.probability(segment, SAVED_FOR_S, now_s)
        proposal = bring(
            outlook,
            ActionKind.REPLICATE,
            segment,
            others[number % len(others)],
            probability,
            now_s + SAVED_FOR_S,
            f"{leaving.instance_id} is leaving; used again within {SAVED_FOR_S:.0f} s with probability "
            f"{probability:.2f}",
            now_s,
        )
        if proposal is not None:
            yield proposal
