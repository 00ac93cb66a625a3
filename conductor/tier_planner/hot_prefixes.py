"""Which beginnings many prompts have now, and how often they went to an instance that did not hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from conductor.tier_planner.prefix_tree import Segment

MEMORY_S = 300.0  # uses count less and less, by 1/e in this time
LEAST_USES = 3
LEAST_CHILDREN = (
    4  # prompts that go on differently behind a shared beginning: fewer are a conversation's turns
)


@dataclass(slots=True)
class _Heat:
    uses: float
    missed: float
    at_s: float

    def fade(self, now_s: float) -> None:
        kept = math.exp((self.at_s - now_s) / MEMORY_S)
        self.uses *= kept
        self.missed *= kept
        self.at_s = now_s


@dataclass(slots=True)
class HotPrefixes:
    """Segments that were used at least `LEAST_USES` times, while they are in use."""

    capacity: int = 2_000
    _heat: dict[Segment, _Heat] = field(default_factory=dict)

    def used(self, path: list[Segment], held_blocks: int, now_s: float) -> None:
        """A prompt with this path went where its first ``held_blocks`` were."""
        for segment in path:
            heat = self._heat.get(segment)
            if heat is None:
                if segment.uses < LEAST_USES:
                    return  # what comes after it was used less
                heat = self._heat[segment] = _Heat(0.0, 0.0, now_s)
            heat.fade(now_s)
            heat.uses += 1.0
            heat.missed += held_blocks < segment.stop
        if len(self._heat) > self.capacity:
            self._forget(now_s)

    def now(self, now_s: float) -> Iterator[tuple[Segment, float, float]]:
        """Each with its uses per second and the share of them that missed it."""
        for segment, heat in self._heat.items():
            heat.fade(now_s)
            if heat.uses >= 1.0:
                yield segment, heat.uses / MEMORY_S, heat.missed / heat.uses

    def _forget(self, now_s: float) -> None:
        for heat in self._heat.values():
            heat.fade(now_s)
        kept = sorted(self._heat, key=lambda segment: self._heat[segment].uses)[self.capacity // 4 :]
        self._heat = {segment: self._heat[segment] for segment in kept}
