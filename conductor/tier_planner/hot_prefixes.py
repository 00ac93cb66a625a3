"""Which beginnings many prompts have now, and how often they went to an instance that did not hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from conductor.tier_planner.prefix_tree import Segment

MEMORY_S = 300.0  # uses count less and less, by 1/e in this time
LEAST_USES = 3
_RESCALED_AT = 100.0  # times `MEMORY_S`
_FORGOTTEN_AT = 700.0
LEAST_CHILDREN = (
    4  # prompts that go on differently behind a shared beginning: fewer are a conversation's turns
)


@dataclass(slots=True)
class _Heat:
    uses: float
    missed: float


@dataclass(slots=True)
class HotPrefixes:
    """Segments that were used at least `LEAST_USES` times, while they are in use.

    Not what was counted fades, but later uses count more, which takes no look at what is not used.
    """

    capacity: int = 2_000
    _heat: dict[Segment, _Heat] = field(default_factory=dict)
    _origin_s: float = 0.0  # when a use counted 1

    def used(self, path: list[Segment], held_blocks: int, now_s: float) -> None:
        """A prompt with this path went where its first ``held_blocks`` were."""
        counts = self._counts(now_s)
        for segment in path:
            heat = self._heat.get(segment)
            if heat is None:
                if segment.uses < LEAST_USES:
                    return  # what comes after it was used less
                heat = self._heat[segment] = _Heat(0.0, 0.0)
            heat.uses += counts
            if held_blocks < segment.stop:
                heat.missed += counts
        if len(self._heat) > self.capacity:
            self._forget()

    def now(self, now_s: float) -> Iterator[tuple[Segment, float, float]]:
        """Each with its uses per second and the share of them that missed it."""
        counts = self._counts(now_s)
        for segment, heat in self._heat.items():
            if heat.uses >= counts:
                yield segment, heat.uses / counts / MEMORY_S, heat.missed / heat.uses

    def _counts(self, now_s: float) -> float:
        """What a use counts now."""
        age = (now_s - self._origin_s) / MEMORY_S
        if abs(age) > _RESCALED_AT:
            fading = math.exp(-age) if age < _FORGOTTEN_AT else 0.0
            for heat in self._heat.values():
                heat.uses *= fading
                heat.missed *= fading
            self._origin_s, age = now_s, 0.0
        return math.exp(age)

    def _forget(self) -> None:
        kept = sorted(self._heat, key=lambda segment: self._heat[segment].uses)[self.capacity // 4 :]
        self._heat = {segment: self._heat[segment] for segment in kept}
