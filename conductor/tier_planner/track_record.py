"""Whether what was brought was used: what was promised of copies is corrected by what came of those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from conductor.actions import ActionKind, Place
from conductor.tier_planner.prefix_tree import Segment

_WINDOW = 200.0  # copies, after which half is forgotten


@dataclass(slots=True)
class _Tally:
    used: float = 0.0
    promised: float = 0.0


@dataclass(slots=True)
class TrackRecord:
    """By kind of action: uses there were, beside those that were to be expected."""

    _tallies: dict[ActionKind, _Tally] = field(default_factory=dict)
    _open: dict[tuple[Segment, Place], tuple[ActionKind, float]] = field(default_factory=dict)
    _due: deque[tuple[float, Segment, Place]] = field(default_factory=deque)

    def factor(self, kind: ActionKind) -> float:
        """By which a promised chance of use is to be multiplied; never more than 1."""
        tally = self._tallies.get(kind)
        return 1.0 if tally is None else min((tally.used + 1.0) / (tally.promised + 1.0), 1.0)

    def brought(
        self, kind: ActionKind, segment: Segment, place: Place, chance: float, until_s: float
    ) -> None:
        """A copy was ordered, which is to be used before ``until_s`` with such a chance."""
        if (segment, place) not in self._open:
            self._open[segment, place] = kind, min(chance, 1.0)
            self._due.append((until_s, segment, place))

    def used(self, path: Iterable[Segment], place: Place) -> None:
        """A prompt that has these segments was placed where they may have been brought."""
        if not self._open:
            return
        for segment in path:
            found = self._open.pop((segment, place), None)
            if found is not None:
                self._count(*found, 1.0)

    def expire(self, now_s: float) -> None:
        """What was not used in time never was."""
        while self._due and self._due[0][0] <= now_s:
            _, segment, place = self._due.popleft()
            found = self._open.pop((segment, place), None)
            if found is not None:
                self._count(*found, 0.0)

    def _count(self, kind: ActionKind, chance: float, used: float) -> None:
        tally = self._tallies.setdefault(kind, _Tally())
        tally.used += used
        tally.promised += chance
        if tally.promised > _WINDOW:
            tally.used /= 2
            tally.promised /= 2
