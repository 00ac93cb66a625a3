"""Durations of an engine's steps, in runs, and what they were to one request: its gaps between tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_KEPT_RUNS = 1 << 12  # before forgetting is worth the copy


class StepLog:
    """Runs of ``count`` steps, of which the first takes ``first_s`` and each following ``growth_s`` more."""

    def __init__(self) -> None:
        self._first_s = np.empty(_KEPT_RUNS)
        self._growth_s = np.empty(_KEPT_RUNS)
        self._count = np.empty(_KEPT_RUNS, np.int64)
        self._size = 0
        self._forgotten = 0

    @property
    def end(self) -> int:
        """Number of the run that comes next."""
        return self._forgotten + self._size

    @property
    def full(self) -> bool:
        """Whether the next `add` has to make room: a good moment to `forget`."""
        return self._size == len(self._count)

    def add(self, count: int, first_s: float, growth_s: float) -> None:
        if self._size == len(self._count):
            self._first_s = np.concatenate([self._first_s, np.empty(self._size)])
            self._growth_s = np.concatenate([self._growth_s, np.empty(self._size)])
            self._count = np.concatenate([self._count, np.empty(self._size, np.int64)])
        self._first_s[self._size] = first_s
        self._growth_s[self._size] = growth_s
        self._count[self._size] = count
        self._size += 1

    def forget(self, before: int) -> None:
        """Runs before number ``before`` will not be asked for."""
        gone = before - self._forgotten
        if gone <= 0:
            return
        for column in (self._first_s, self._growth_s, self._count):
            column[: self._size - gone] = column[gone : self._size]
        self._size -= gone
        self._forgotten = before

    def gaps_s(self, start: int) -> NDArray[np.float64]:
        """Seconds of every step from run number ``start`` on."""
        runs = slice(start - self._forgotten, self._size)
        count, growth_s = self._count[runs], self._growth_s[runs]
        ends = np.cumsum(count)
        if not len(ends):
            return np.empty(0)
        offset_s = self._first_s[runs] - growth_s * (ends - count)
        if ends[-1] == len(ends):
            return offset_s + growth_s * np.arange(len(ends))
        return np.repeat(offset_s, count) + np.repeat(growth_s, count) * np.arange(ends[-1])


def longest_tenth_s(gaps_s: NDArray[np.float64]) -> float:
    """Mean of the longest tenth of a request's token gaps, of at least one (Mooncake, FAST'25, section 8.1)."""
    tenth = math.ceil(len(gaps_s) / 10)
    if tenth == len(gaps_s):
        return float(gaps_s.mean())
    return float(np.partition(gaps_s, -tenth)[-tenth:].mean())
