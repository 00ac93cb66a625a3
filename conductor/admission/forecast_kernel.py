"""The compiled sum over all decodes under way (`DecodeForecast`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cache_index.kernel_cache import cache_directory, cached_njit
from conductor.costs import Floats, Ints
from conductor.policies import Flags

_DIRECTORY = cache_directory(Path(__file__))


def carried(
    used: int,
    row: Ints,
    start_s: Floats,
    lasts_s: Floats,
    started: Flags,
    context_tokens: Floats,
    tokens_per_s: Floats,
    t_s: float,
    now_s: float,
    uniform_s: float,
    sequences: Floats,
    tokens: Floats,
) -> None:
    """Add the decodes of slots below ``used`` that should be under way at ``t_s`` to the rows of the last two.

    Before ``now_s`` everything is as it was reported; -inf leaves everything as it was predicted. With a
    ``uniform_s`` of 0 or more every decode lasts that long.
    """
    for slot in range(used):
        start = start_s[slot]
        if not started[slot]:
            start = max(start, now_s)
        if not start <= t_s:
            continue
        if uniform_s >= 0.0:
            end = start + uniform_s
        else:
            end = start + lasts_s[slot]
            if started[slot] and end <= now_s:
                # The next moment after now at least: what has not ended is there now.
                end = np.nextafter(now_s, np.inf) + (now_s - end)
        if t_s < end:
            sequences[row[slot]] += 1.0
            tokens[row[slot]] += context_tokens[slot] + tokens_per_s[slot] * (t_s - start)


carried = cached_njit(carried, _DIRECTORY)
