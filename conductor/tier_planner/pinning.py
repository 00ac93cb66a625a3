"""Beginnings that many prompts share, such as system prompts, are pinned where they lie, while they are in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from conductor.actions import ActionKind, Place
from conductor.tier_planner.hot_prefixes import LEAST_CHILDREN
from conductor.tier_planner.outlook import Outlook, Proposal
from conductor.tier_planner.prefix_tree import Segment

LEAST_RATE = 1 / 60  # uses a second
SHARE = 0.2  # of a site that may be pinned


@dataclass(slots=True)
class Pins:
    """What the planner has pinned, by place."""

    blocks: dict[Place, int] = field(default_factory=dict)
    segments: dict[tuple[int, Place], Segment] = field(default_factory=dict)  # by their last block

    def pin(
        self, outlook: Outlook, hot: Iterable[tuple[Segment, float, float]], now_s: float
    ) -> Iterator[Proposal]:
        """``hot`` are segments with their uses per second."""
        for segment, rate, _ in hot:
            if rate < LEAST_RATE or len(segment.children) < LEAST_CHILDREN:
                continue
            held = outlook.held(segment.prefix, segment.stop)
            key = segment.key
            for site in outlook.sites:
                place = site.place
                if (key, place) in self.segments:
                    continue
                room = SHARE * site.capacity_tokens / segment.prefix.namespace.block_size
                taken = self.blocks.get(place, 0) + segment.blocks
                if taken > room or held.blocks(place) < segment.stop:
                    continue
                if outlook.can(ActionKind.PIN, None, place):
                    self.segments[key, place] = segment
                    self.blocks[place] = taken
                    reason = f"{rate:.2f} uses a second, {len(segment.children)} prompts go on behind it"
                    yield _still(ActionKind.PIN, segment, place, now_s, reason)

    def unpin(self, outlook: Outlook, now_s: float) -> Iterator[Proposal]:
        """Those that are not used any more."""
        pinned = list(dict.fromkeys(self.segments.values()))  # mostly the same ones in many places
        rates = dict(zip(pinned, outlook.returns.rates(pinned, now_s).tolist(), strict=True))
        for (key, place), segment in list(self.segments.items()):
            rate = rates[segment]
            if rate < LEAST_RATE / 4:
                self.forget(key, place)
                yield _still(
                    ActionKind.UNPIN, segment, place, now_s, f"{rate * 3600:.2g} uses an hour expected"
                )

    def forget(self, key: int, place: Place) -> None:
        segment = self.segments.pop((key, place), None)
        if segment is not None:
            self.blocks[place] -= segment.blocks


def _still(kind: ActionKind, segment: Segment, place: Place, now_s: float, reason: str) -> Proposal:
    return Proposal(
        kind, segment.prefix, segment.start, segment.stop, None, place, 0, 0.0, 0.0, now_s + 30.0, reason
    )
