"""How times are spread: counts by magnitude, from which percentiles are told within 2.5 percent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

_LEAST_S: Final = 1e-4
_GROWTH: Final = 1.05  # from one magnitude to the next
_PER_LOG: Final = 1 / math.log(_GROWTH)


def magnitude(seconds: float) -> int:
    """Under which a time is counted; 0 for all up to 0.1 ms."""
    return math.ceil(math.log(seconds / _LEAST_S) * _PER_LOG) if seconds > _LEAST_S else 0


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """The seconds that ``share`` of the times counted by `magnitude` do not exceed; None without any."""
    wanted = share * sum(counts.values())
    seen = 0
    for each in sorted(counts):
        seen += counts[each]
        if seen >= wanted:
            return _LEAST_S * _GROWTH ** (each - 0.5) if each else _LEAST_S
    return None
