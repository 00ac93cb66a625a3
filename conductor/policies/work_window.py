"""Sums over a sliding window of time, by rank."""

from __future__ import annotations

import numpy as np

from conductor.costs import Floats, Ints

_SLICES = 60


class WorkWindow:
    """Amounts added to ranks in the last ``window_s`` seconds.

    Kept in 60 slices, so that memory is bounded: an amount is forgotten up to a 60th of the window early.
    """

    def __init__(self, window_s: float, amounts: int) -> None:
        self._slice_s = window_s / _SLICES
        self._slices = np.zeros((_SLICES, amounts, 0))
        self._sums = np.zeros((amounts, 0))
        self._current = 0  # number of the newest slice since time 0

    def add(self, now_s: float, row: int, *amounts: float) -> None:
        """Add to the rank of that row."""
        self._advance(now_s)
        self._grow(row + 1)
        self._slices[self._current % _SLICES, :, row] += amounts
        self._sums[:, row] += amounts

    def sums(self, now_s: float, rows: Ints) -> Floats:
        """[amount, rank]: what was added to the ranks of those rows and is not forgotten."""
        self._advance(now_s)
        self._grow(int(rows.max(initial=-1)) + 1)
        sums: Floats = self._sums[:, rows]
        return sums

    def _advance(self, now_s: float) -> None:
        newest = int(now_s // self._slice_s)
        if newest <= self._current:
            return
        passed = min(newest - self._current, _SLICES)
        self._slices[[(newest - i) % _SLICES for i in range(passed)]] = 0.0
        self._current = newest
        self._sums = self._slices.sum(axis=0)

    def _grow(self, rows: int) -> None:
        missing = rows - self._sums.shape[1]
        if missing > 0:
            self._slices = np.pad(self._slices, ((0, 0), (0, 0), (0, missing)))
            self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
