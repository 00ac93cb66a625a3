"""The bins of answer lengths, and the compiled arithmetic over their histograms (`OutputLengths`).

A kind of request is a row of ``counts`` [row, bin] and of ``totals`` [row, TOTAL_COLUMNS]; -1 is no row. What is
called from Python takes the addresses of the two tables.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from cache_index.kernel_cache import cache_directory, cached_njit
from conductor.costs import Floats, addresses
from conductor.costs.addresses import counts_at, floats_at

_DIRECTORY = cache_directory(Path(__file__), Path(addresses.__file__))

Counts = NDArray[np.float32]

MASS: Final = 0  # sum of the counts
SEEN: Final = 1  # answers ever, faded or not
TOTAL_COLUMNS: Final = 2

# Bins: one for each length up to 8 tokens, then four an octave up to 2^17 tokens.
_BINS_PER_OCTAVE: Final = 4
LAST_TOKEN: Final[list[int]] = [*range(1, 9)] + [
    round(8 * 2 ** (i / _BINS_PER_OCTAVE)) for i in range(1, 14 * _BINS_PER_OCTAVE + 1)
]
BINS: Final = len(LAST_TOKEN)
_LAST: Final[Floats] = np.array(LAST_TOKEN, np.float64)
_BEFORE: Final[Floats] = np.concatenate([[0.0], _LAST[:-1]])
_MIDDLE: Final[Floats] = (_BEFORE + 1.0 + _LAST) / 2

# What an answer is taken to be when nothing was seen yet: geometric lengths of this mean.
ASSUMED_TOKENS: Final = 256
_ASSUMED: Final[Floats] = np.exp(-_BEFORE / ASSUMED_TOKENS) - np.exp(
    -np.array([*LAST_TOKEN[:-1], math.inf]) / ASSUMED_TOKENS
)

# Answers of its own after which a kind weighs as much as its parent.
_PRIOR_ANSWERS: Final = 2.0
# An answer counts as at most four times (two octaves) the 99th percentile so far: a runaway generation moves
# the mean by a bounded step, while lengths that do recur are followed within a few answers.
_OUTLIER_BINS: Final = 2 * _BINS_PER_OCTAVE


def _mix(
    counts: Counts, totals: Floats, model: int, route: int, tenant: int, prefix: int, shares: Floats
) -> float:
    """Write the share of every bin, from coarse to fine; returns the answers seen of the finest kind known."""
    shares[:] = _ASSUMED
    seen = 0.0
    for row in (model, route, tenant, prefix):
        # What is finer was observed together with this one, or forgotten before it.
        if row < 0 or totals[row, SEEN] == 0.0:
            break
        seen = totals[row, SEEN]
        total = totals[row, MASS] + _PRIOR_ANSWERS
        for i in range(BINS):
            shares[i] = (counts[row, i] + _PRIOR_ANSWERS * shares[i]) / total
    return float(seen)


_mix = cached_njit(_mix, _DIRECTORY)


def _first_at(shares: Floats, quantile: float) -> int:
    """The bin that a share ``quantile`` of answers ends in or before; one too many where rounding leaves none."""
    below = 0.0
    for i in range(BINS):
        below += shares[i]
        if below >= quantile:
            return i
    return BINS


_first_at = cached_njit(_first_at, _DIRECTORY)


def predict(
    counts_address: int,
    totals_address: int,
    model: int,
    route: int,
    tenant: int,
    prefix: int,
    limit: float,
) -> tuple[float, float, float]:
    """Mean and 90th percentile of min(length, limit), and the answers seen of the finest kind known.

    The percentile is interpolated within its bin.
    """
    rows = max(model, route, tenant, prefix) + 1
    counts = carray(counts_at(counts_address), (rows, BINS))
    totals = carray(floats_at(totals_address), (rows, TOTAL_COLUMNS))
    shares = np.empty(BINS)
    seen = _mix(counts, totals, model, route, tenant, prefix, shares)
    mean = 0.0
    for i in range(BINS):
        mean += shares[i] * min(_MIDDLE[i], limit)
    place = min(_first_at(shares, 0.9), BINS - 1)
    share, below = shares[place], shares[:place].sum()
    into = min((0.9 - below) / share, 1.0) if share > 0.0 else 1.0
    return mean, min(_BEFORE[place] + into * (_LAST[place] - _BEFORE[place]), limit), seen


predict = cached_njit(predict, _DIRECTORY, nogil=False)


def observe(
    counts_address: int,
    totals_address: int,
    model: int,
    route: int,
    tenant: int,
    prefix: int,
    place: int,
    cut: bool,
    keep: float,
) -> None:
    """Count an answer of bin ``place`` in all four kinds, after fading what they have by ``keep``.

    One that was ``cut`` is spread over that bin and the longer ones, as those are distributed so far.
    """
    rows = max(model, route, tenant, prefix) + 1
    counts = carray(counts_at(counts_address), (rows, BINS))
    totals = carray(floats_at(totals_address), (rows, TOTAL_COLUMNS))
    shares = np.empty(BINS)
    _mix(counts, totals, model, route, tenant, prefix, shares)
    place = min(place, _first_at(shares, 0.99) + _OUTLIER_BINS, BINS - 1)
    if cut:
        shares[:place] = 0.0
        shares /= max(shares.sum(), 1e-300)
    else:
        shares[:] = 0.0
        shares[place] = 1.0
    fade = np.float32(keep)
    for row in (model, route, tenant, prefix):
        if row < 0:
            continue
        for i in range(BINS):
            counts[row, i] = counts[row, i] * fade + shares[i]
        totals[row, MASS] = totals[row, MASS] * keep + 1.0
        totals[row, SEEN] += 1.0


observe = cached_njit(observe, _DIRECTORY, nogil=False)
