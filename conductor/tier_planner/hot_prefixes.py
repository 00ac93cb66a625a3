"""Which beginnings many prompts have now, and how often they went to an instance that did not hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

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

    def now(self, now_s: float, least_rate: float = 0.0) -> Iterator[tuple[Segment, float, float]]:
        """Each with its uses per second, at least so many, and the share of them that missed it."""
        counts = self._counts(now_s)
        least = counts * max(least_rate * MEMORY_S, 1.0)
        for segment, heat in self._heat.items():
            if heat.uses >= least:
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
        segments, heats = list(self._heat), list(self._heat.values())
        uses = np.array([heat.uses for heat in heats])
        kept = uses.argsort(kind="stable")[self.capacity // 4 :].tolist()
        self._heat = dict(zip(map(segments.__getitem__, kept), map(heats.__getitem__, kept), strict=True))
