"""Which run a block was last in: a compiled hash table from keys of blocks to numbers.

Open addressing with linear probing, at most half full, and deletion by backward shift; a number of -1 marks an
empty slot. The kernels take arrays of keys, as a long prompt has thousands of blocks.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from cache_index.kernel_set import KernelSet, entry_point, inlined

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]

_KERNELS = KernelSet(Path(__file__))
compile_all = _KERNELS.compile_all

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FEWEST_SLOTS = 64
_NO_RUN = -1

_INTEGER = types.int64
_IN = types.Array(types.uint64, 1, "C", readonly=True)
_SLOTS = types.Array(types.uint64, 1, "C")
_NUMBERS = types.Array(types.int64, 1, "C")


@inlined
def _home(key, slots):
    return np.int64((key * _MULTIPLIER) >> np.uint64(32)) & (slots - 1)


@inlined
def _slot(keys, numbers, key):
    """Where the key is, or the empty slot where it belongs."""
    slots = len(keys)
    at = _home(key, slots)
    while numbers[at] != -1 and keys[at] != key:
        at = (at + 1) & (slots - 1)
    return at


@inlined
def _delete(keys, numbers, at):
    slots = len(keys)
    gap, at = at, (at + 1) & (slots - 1)
    while numbers[at] != -1:
        if (at - _home(keys[at], slots)) & (slots - 1) >= (at - gap) & (slots - 1):
            keys[gap], numbers[gap] = keys[at], numbers[at]
            gap = at
        at = (at + 1) & (slots - 1)
    numbers[gap] = -1


@_KERNELS.kernel(_SLOTS, _NUMBERS, _IN, _INTEGER, _NUMBERS)
def _put(keys, numbers, wanted, number, before):
    """Fills ``before`` with the numbers the keys had; returns how many are new, and how many stand before those."""
    new = 0
    leading = len(wanted)
    for i in range(len(wanted)):
        at = _slot(keys, numbers, wanted[i])
        before[i] = numbers[at]
        if numbers[at] == -1:
            keys[at] = wanted[i]
            new += 1
            leading = min(leading, i)
        numbers[at] = number
    return new, leading


@_KERNELS.kernel(_SLOTS, _NUMBERS, _IN, _INTEGER, _INTEGER, _NUMBERS)
def _take_last(keys, numbers, wanted, stop, number, taken):
    """Delete from ``wanted[:stop]``'s end what has the number, until ``taken`` is full of places.

    Returns how many places there are, and behind which key it stopped.
    """
    count = 0
    while stop > 0 and count < len(taken):
        stop -= 1
        at = _slot(keys, numbers, wanted[stop])
        if numbers[at] == number:
            _delete(keys, numbers, at)
            taken[count] = stop
            count += 1
    return count, stop


@_KERNELS.kernel(_SLOTS, _NUMBERS, _SLOTS, _NUMBERS)
def _move(keys, numbers, new_keys, new_numbers):
    for i in range(len(keys)):
        if numbers[i] != -1:
            at = _slot(new_keys, new_numbers, keys[i])
            new_keys[at], new_numbers[at] = keys[i], numbers[i]


@lru_cache(maxsize=1)
def _entry_points() -> tuple[Callable[..., Any], ...]:
    if not _put.signatures:
        compile_all()
    return entry_point(_put), entry_point(_take_last)


class RunTable:
    """Numbers by key; ``len`` is how many keys there are. Every call takes time in proportion to the keys given."""

    def __init__(self) -> None:
        self._used = 0
        self._put, self._take_last = _entry_points()
        self._keys, self._numbers = _empty(_FEWEST_SLOTS)

    def __len__(self) -> int:
        return self._used

    def put(self, keys: Keys, number: int) -> tuple[Numbers, int, int]:
        """Give all keys, of which none is there twice, the number.

        Returns the numbers they had, -1 where there was none; how many had none; and how many stand before those.
        """
        slots = len(self._keys)
        while slots < 2 * (self._used + len(keys)):
            slots *= 2
        if slots > len(self._keys):
            new = _empty(slots)
            _move(self._keys, self._numbers, *new)
            self._keys, self._numbers = new
        before = np.empty(len(keys), np.int64)
        new, leading = self._put(self._keys, self._numbers, keys, number, before)
        self._used += new
        return before, new, leading

    def take_last(self, keys: Keys, stop: int, number: int, most: int) -> tuple[Numbers, int]:
        """Delete at most so many of ``keys[:stop]`` that have the number, the last ones.

        Returns their places, and how many of the first keys were not looked at.
        """
        taken = np.empty(min(most, stop), np.int64)
        count, stop = self._take_last(self._keys, self._numbers, keys, stop, number, taken)
        self._used -= count
        return taken[:count], stop


def _empty(slots: int) -> tuple[Keys, Numbers]:
    return np.zeros(slots, np.uint64), np.full(slots, _NO_RUN, np.int64)
