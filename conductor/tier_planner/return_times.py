"""When prompts come back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conductor.tier_planner.prefix_tree import Segment


class ReturnTimes:
    def observe(self, path: list[Segment], now_s: float) -> None:
        pass

    def probability(self, segment: Segment, within_s: float, now_s: float) -> float:
        return within_s / (within_s + now_s - segment.last_used_s + 60)

    def rates(self, segments: Sequence[Segment], now_s: float) -> NDArray[np.float64]:
        return 1.0 / (1.0 + now_s - np.array([s.last_used_s for s in segments], np.float64))
