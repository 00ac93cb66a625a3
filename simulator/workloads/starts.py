"""When sessions begin, so that they end within a window, which is as long as the longest of them at least."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_BURST_EVERY_S: Final = 60.0
_BURST_S: Final = 5.0
_BURST_SHARE: Final = 0.8  # of the requests, in a twelfth of the time

Seconds = NDArray[np.float64]


def poisson_starts(source: np.random.Generator, durations_s: Seconds, window_s: float) -> list[float]:
    """Uniform over what each session's duration leaves of the window: of single requests, a Poisson process."""
    return [float(start) for start in source.random(len(durations_s)) * (window_s - durations_s)]


def burst_starts(source: np.random.Generator, durations_s: Seconds, window_s: float) -> list[float]:
    """Four of five sessions in the first five seconds of a minute, the others at any time."""
    minutes = max(1, int(window_s // _BURST_EVERY_S))
    at_any_time_s = source.random(len(durations_s)) * window_s
    in_bursts_s = source.integers(0, minutes, len(durations_s)) * _BURST_EVERY_S + source.random(
        len(durations_s)
    ) * min(_BURST_S, window_s)
    chosen = np.where(source.random(len(durations_s)) < _BURST_SHARE, in_bursts_s, at_any_time_s)
    return [float(start) for start in np.minimum(chosen, window_s - durations_s)]
