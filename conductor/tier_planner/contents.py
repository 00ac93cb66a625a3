"""What sites are taken to have: segments, from what was placed and moved, and looked up in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Final

from conductor.actions import Place
from conductor.tier_planner.outlook import Outlook
from conductor.tier_planner.prefix_tree import Segment, Stay

CHECKED_AT_ONCE: Final = 8


class SiteContents:
    """Of one site: ``stays`` of its segments, the same as their own `held_at` by the site's ``number``.

    ``ends`` are those behind which it has none. ``behind`` counts its segments that go on behind each: children are
    counted, not looked for, because what many prompts begin with has thousands elsewhere. ``unknown_blocks`` were
    there before what is known came; None: nobody looked.
    """

    __slots__ = ("behind", "ends", "number", "stays", "unknown_blocks")

    def __init__(self, number: int) -> None:
        self.number = number
        self.stays: dict[Segment, Stay] = {}
        self.ends: dict[Segment, Stay] = {}
        self.behind: dict[Segment, int] = {}
        self.unknown_blocks: int | None = None

    def put(self, path: Iterable[Segment], held_until_s: float) -> None:
        """Segments are there from now on; those that were used just now, by a prompt that went there."""
        for segment in path:
            stay = self.stays.get(segment)
            if stay is None:
                self._add(segment, Stay(segment.last_used_s, held_until_s))
                continue
            stay.last_used_s = max(stay.last_used_s, segment.last_used_s)
            stay.held_until_s = max(stay.held_until_s, held_until_s)

    def _add(self, segment: Segment, stay: Stay) -> None:
        self.stays[segment] = segment.held_at[self.number] = stay
        if segment not in self.behind:
            self.ends[segment] = stay
        parent = segment.parent
        if parent is not None:
            self.behind[parent] = self.behind.get(parent, 0) + 1
            self.ends.pop(parent, None)
        if self.unknown_blocks:
            self.unknown_blocks = max(self.unknown_blocks - segment.blocks, 0)

    def parted(self, first: Segment, stay: Stay) -> None:
        """A segment is new that is the first part of one that is there, whose place behind its parent it has."""
        self.stays[first] = stay
        self.behind[first] = 1

    def drop(self, segment: Segment) -> None:
        """It is not there any more, if it was."""
        if self.stays.pop(segment, None) is None:
            return
        del segment.held_at[self.number]
        self.ends.pop(segment, None)
        parent = segment.parent
        if parent is None:
            return
        self.behind[parent] -= 1
        if not self.behind[parent]:
            del self.behind[parent]
            if parent in self.stays:
                self.ends[parent] = self.stays[parent]

    def next_checked(self) -> Iterator[tuple[Segment, Stay]]:
        """Some that were not looked up for longest."""
        for segment in list(islice(self.stays, CHECKED_AT_ONCE)):
            stay = self.stays[segment] = self.stays.pop(segment)
            yield segment, stay


class Contents:
    """Of all the outlook's sites, by place."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._numbers = count()
        self._sites: dict[Place, SiteContents] = {}
        self._by_number: dict[int, SiteContents] = {}
        self._to_check: deque[Place] = deque()
        self._all_met = False
        self.follow_sites()

    def __contains__(self, place: Place) -> bool:
        return place in self._sites

    def __getitem__(self, place: Place) -> SiteContents:
        return self._sites[place]

    def follow_sites(self) -> None:
        """The outlook has other sites than before."""
        places = {site.place: None for site in self._outlook.sites}
        for gone in self._sites.keys() - places.keys():
            number = self._sites[gone].number
            for segment in self._sites.pop(gone).stays:
                del segment.held_at[number]
            del self._by_number[number]
        for place in places:
            if place not in self._sites:
                number = next(self._numbers)
                self._sites[place] = self._by_number[number] = SiteContents(number)
                self._all_met = False
        self._to_check = deque(self._sites)

    def meet_sites(self, block_tokens: int) -> None:
        """What sites have when they are met, none of it known, came before all that will be."""
        if self._all_met:
            return
        self._all_met = True
        for site in self._outlook.sites:
            contents = self._sites[site.place]
            if contents.unknown_blocks is None:
                known = sum(segment.blocks for segment in contents.stays)
                held = self._outlook.held_tokens(site, block_tokens) // block_tokens
                contents.unknown_blocks = max(held - known, 0)

    def parted(self, first: Segment) -> None:
        """A segment is new that is the first part of another."""
        for number, stay in first.held_at.items():
            self._by_number[number].parted(first, stay)

    def forget(self, segment: Segment) -> None:
        """It is nowhere any more."""
        for number in list(segment.held_at):
            self._by_number[number].drop(segment)

    def notice_lost(self, checks: int, now_s: float) -> None:
        """Some segments of so many sites are looked up: engines drop blocks by themselves, too."""
        for _ in range(min(checks, len(self._sites))):
            place = self._to_check[0]
            self._to_check.rotate(-1)
            contents = self._sites[place]
            for segment, stay in contents.next_checked():
                # What is before it has been looked up in its turn: without that it is of no use.
                usable = segment.parent is None or segment.parent in contents.stays
                there = usable and self._outlook.blocks_at(segment, place) > 0
                if not there and stay.held_until_s <= now_s:  # else it may be on its way
                    contents.drop(segment)
