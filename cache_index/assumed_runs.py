"""What one holder is assumed to have, least recently used first: the memory of ``kernels.assumed``."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from cache_index import kernels as k
from cache_index.hashing import Hashes
from cache_index.kernel_set import entry_point
from cache_index.kernels import assumed as a

_SPARE: Final = 2 * k.CROWDED_ENTRIES  # positions behind the last home of the table of beginnings
_LEAST_RUNS: Final = 64
_LEAST_KEYS: Final = 1_024


class LastUsed(msgspec.Struct, frozen=True, gc=False):
    """For each of a chain's leading blocks, the number of the call that routed it to a holder last.

    Blocks of one call stand together: up to the first of ``stops`` they have the first of ``numbers``, and so on.
    """

    stops: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stops[-1] if self.stops else 0

    def __getitem__(self, block: int) -> int:
        for stop, number in zip(self.stops, self.numbers, strict=True):
            if block < stop:
                return number
        raise IndexError(block)


class AssumedRuns:
    """A book of runs, which `CacheIndex.assume` writes; see the kernels. Keys are ``sequence hash ^ domain``.

    Has up to 320 bytes a block of ``capacity_blocks``, once so many requests were assumed. Not to be copied.
    """

    __slots__ = ("_book", "_keys", "_lose_last", "_lost", "_rows", "_table", "_taken", "address")

    def __init__(self, capacity_blocks: int, ttl_s: float) -> None:
        self._book = np.zeros(a.BOOK_WORDS, np.int64)
        self.address = int(self._book.ctypes.data)
        self._book.view(np.float64)[a.TTL_S] = ttl_s
        self._book[[a.FREE, a.OLDEST, a.NEWEST, a.BEGINNINGS + k.SWEPT]] = -1
        self._lose_last = entry_point(k.lose_last)
        self.capacity_blocks = capacity_blocks
        self._rows = np.empty((0, a.ROW_WORDS), np.int64)
        self._keys = np.empty(0, np.uint64)
        self._set_lost(_LEAST_RUNS)
        self.make_room(0)

    @property
    def capacity_blocks(self) -> int:
        return int(self._book[a.MOST_BLOCKS])

    @capacity_blocks.setter
    def capacity_blocks(self, blocks: int) -> None:
        self._book[a.MOST_BLOCKS] = blocks

    @property
    def blocks(self) -> int:
        """Of all runs; more than the capacity only after that was made smaller."""
        return int(self._book[a.BLOCKS])

    @property
    def oldest(self) -> tuple[int, float] | None:
        """Number and time of the call that began the run used least recently."""
        row = self._book[a.OLDEST]
        if row < 0:
            return None
        return int(self._rows[row, a.NUMBER]), float(self._rows.view(np.float64)[row, a.AT_S])

    def lost(self, count: int) -> Hashes:
        """The keys that were evicted by the latest call, in the order to remove them in; valid until the next."""
        return self._lost[:count]

    def last_used(self, runs: int) -> LastUsed:
        """Of the blocks that the latest run took from so many others."""
        taken = self._taken[:runs]
        return LastUsed(tuple(taken[:, 0].tolist()), tuple(taken[:, 1].tolist()))

    def lose_last(self, blocks: int) -> Hashes:
        """Evict some of the oldest run's last blocks, at most so many; there must be a run. Returns as `lost`."""
        return self._lost[: self._lose_last(self.address, blocks)]

    def runs(self) -> list[tuple[int, int, list[int]]]:
        """Number, first position and keys of each, the oldest first."""
        found, row = [], int(self._book[a.OLDEST])
        while row >= 0:
            number, _, first, start, length, _, newer = self._rows[row, :7].tolist()
            found.append((number, first, self._keys[start : start + length].tolist()))
            row = newer
        return found

    def make_room(self, blocks: int) -> None:
        """For one run more, of so many blocks."""
        book = self._book
        if blocks > book[a.LOST_SIZE]:
            self._set_lost(max(blocks, 2 * len(self._lost)))
        if book[a.FREE] < 0 or book[a.BEGINNINGS + k.CROWDED]:
            self._add_rows(max(_LEAST_RUNS, len(self._rows)))
        self._new_table(2 * len(self._rows))
        keys = np.empty(max(_LEAST_KEYS, 2 * (self.blocks + blocks)), np.uint64)
        k.move_book(self.address, int(keys.ctypes.data))
        self._keys = keys
        book[a.KEYS_SIZE] = len(keys)

    def _set_lost(self, blocks: int) -> None:
        self._lost, self._taken = np.empty(blocks, np.uint64), np.empty((blocks, 2), np.int64)
        self._book[a.LOST_AT], self._book[a.TAKEN_AT] = self._lost.ctypes.data, self._taken.ctypes.data
        self._book[a.LOST_SIZE] = blocks

    def _add_rows(self, count: int) -> None:
        first = len(self._rows)
        added = np.zeros((count, a.ROW_WORDS), np.int64)
        added[:, a.NEWER] = np.arange(first + 1, first + count + 1)
        added[-1, a.NEWER] = self._book[a.FREE]
        self._rows = np.concatenate((self._rows, added))
        self._book[a.FREE], self._book[a.ROWS_AT] = first, self._rows.ctypes.data

    def _new_table(self, capacity: int) -> None:
        """Empty."""
        self._table = np.zeros((capacity + _SPARE, 2), np.uint64)
        start = int(self._table.ctypes.data)
        table = self._book[a.BEGINNINGS :]
        table[k.ENTRIES], table[k.END] = start, start + self._table.nbytes
        table[k.CAPACITY], table[k.USED], table[k.CROWDED] = capacity, 0, 0
