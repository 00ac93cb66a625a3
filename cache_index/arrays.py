"""The NumPy arrays behind the kernels: who owns them, and how they grow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k

MINIMUM_CAPACITY = 1 << 11
ROOM = 512  # blocks that fit after make_room
MOVES_PER_BLOCK = 8  # positions of a growing table that are moved per block applied
MOVES_PER_CALL = 64
EVERYTHING = 1 << 62
WORDS_TOUCHED_PER_CALL = 1 << 18  # of the arrays a table is about to grow into: one huge page

_TABLES = {k.NODES: 24, k.LINKS: 16, k.SETS: 16, k.COPIES: 16}  # bytes per entry


def _power_of_two(minimum: int) -> int:
    return 1 << max(minimum - 1, 1).bit_length()


class KernelArrays:
    """Tables, pools and per-slot arrays; every kernel takes the ``address`` of the ``state``.

    Tables grow without a long stop: a second pair of arrays is made and entries move over with the
    following calls (``advance``). Pools and per-slot arrays are small (thousands of distinct holder
    sets, not millions) and are copied at once.
    """

    def __init__(self, expected_blocks: int = 0) -> None:
        self.state: NDArray[np.int64] = np.zeros(k.STATE_WORDS, np.int64)
        self.address = int(self.state.ctypes.data)
        self._owned: dict[int, NDArray[Any]] = {}
        self._old: dict[int, NDArray[np.uint64]] = {}
        self._prepared: dict[int, tuple[NDArray[np.uint64], int]] = {}  # and how many words are touched
        self.slot_capacity = 0
        self.holder_capacity = 0
        for table, entry_bytes in _TABLES.items():
            self.state[table + k.ENTRY_BYTES] = entry_bytes
            blocks = expected_blocks if table in (k.NODES, k.LINKS) else 0
            capacity = _power_of_two(max(MINIMUM_CAPACITY, blocks * 10 // 7 + 1))
            self._own(table + k.ENTRIES, np.zeros(capacity * entry_bytes // 8, np.uint64))
            self.state[table + k.MASK] = capacity - 1
        for pool in (k.SET_POOL, k.SMALL_POOL, k.BITS_POOL):
            self.state[pool + k.FREE] = -1
        self.state[k.SET_POOL + k.NEXT] = self.state[k.SET_POOL + k.LIVE] = 1  # set id 0 means "no set"
        self.state[k.SWEEP_CURSOR] = -1
        self.ensure_slots(64)
        self.ensure_holders(64)
        self._grow_pool(k.SET_POOL, 2 * ROOM, (4,), np.uint64)
        self._grow_pool(k.SMALL_POOL, 2 * ROOM, (k.SMALL_SET,), np.int32)
        self._grow_pool(k.BITS_POOL, 2 * ROOM, (int(self.state[k.BIT_WORDS]),), np.uint64)

    @property
    def nbytes(self) -> int:
        arrays = [
            *self._owned.values(),
            *self._old.values(),
            *(array for array, _ in self._prepared.values()),
        ]
        return sum(array.nbytes for array in arrays)

    @property
    def growing(self) -> bool:
        """Whether a table is being moved; ``advance`` must then be called with every change."""
        return bool(self._old)

    @property
    def nodes_growing(self) -> bool:
        return k.NODES in self._old

    def used(self, table: int) -> int:
        return int(self.state[table + k.USED])

    def capacity(self, table: int) -> int:
        return int(self.state[table + k.MASK]) + 1

    def advance(self, blocks: int) -> None:
        """Move a part of the growing tables, in proportion to the blocks just applied."""
        for table in list(self._old):
            self._move(table, MOVES_PER_BLOCK * blocks + MOVES_PER_CALL)

    def prepare(self) -> None:
        """Get a nearly full table's next arrays ready, a piece with every call.

        The system hands out fresh memory page by page at first touch, and zeroing a huge page takes as
        long as storing a thousand blocks; spread over random places, that made single calls take 0.3 s.
        """
        for table in (k.NODES, k.LINKS):
            capacity = self.capacity(table)
            if self.used(table) * 20 < capacity * 13 or table in self._old:
                continue
            words = 2 * capacity * _TABLES[table] // 8
            array, touched = self._prepared.get(table) or (np.zeros(words, np.uint64), 0)
            array[touched : touched + WORDS_TOUCHED_PER_CALL : 512] = 0
            self._prepared[table] = array, touched + WORDS_TOUCHED_PER_CALL

    def finish_growth(self, table: int) -> None:
        if table in self._old:
            self._move(table, EVERYTHING)

    def make_room(self) -> None:
        """After this, the kernels can apply at least ``ROOM`` blocks."""
        for table in _TABLES:
            while self._table_room(table) < ROOM:
                self._grow_table(table)
        self._grow_pool(k.SET_POOL, ROOM + 2, (4,), np.uint64)
        self._grow_pool(k.SMALL_POOL, ROOM + 2, (k.SMALL_SET,), np.int32)
        self._grow_pool(k.BITS_POOL, ROOM + 2, (int(self.state[k.BIT_WORDS]),), np.uint64)

    def ensure_slots(self, slots: int) -> None:
        """Make room for slot numbers below ``slots``."""
        if slots <= self.slot_capacity:
            return
        capacity = _power_of_two(max(slots, 64))
        self.slot_holder = self._resized(k.SLOT_HOLDER, (capacity,), np.int32, fill=-1)
        self.slot_tier = self._resized(k.SLOT_TIER, (capacity,), np.int32)
        self.slot_blocks = self._resized(k.SLOT_BLOCKS, (capacity,), np.int64)
        self.dead_bits = self._resized(k.DEAD_BITS, (capacity // 64,), np.uint64)
        self._resized(k.SCRATCH_BITS, (capacity // 64,), np.uint64)
        self.slot_capacity = capacity
        self.state[k.BIT_WORDS] = capacity // 64
        rows = int(self.state[k.BITS_POOL + k.CAPACITY])
        self._resize_pool(k.BITS_POOL, rows, (capacity // 64,), np.uint64)

    def ensure_holders(self, holders: int) -> None:
        """Make room for holder rows below ``holders``."""
        if holders <= self.holder_capacity:
            return
        capacity = _power_of_two(max(holders, 64))
        self.holder_slots = self._resized(k.HOLDER_SLOTS, (capacity, k.TIERS), np.int32, fill=-1)
        self._resized(k.NEED, (capacity,), np.int32, fill=k.TIERS)
        self._resized(k.ALIVE, (capacity,), np.int32)
        self.holder_capacity = capacity

    def _own(self, word: int, array: NDArray[Any]) -> None:
        self._owned[word] = array
        self.state[word] = array.ctypes.data

    def _resized(self, word: int, shape: tuple[int, ...], dtype: Any, fill: int = 0) -> NDArray[Any]:
        array = np.full(shape, fill, dtype)
        before = self._owned.get(word)
        if before is not None:
            array[tuple(slice(0, length) for length in before.shape)] = before
        self._own(word, array)
        return array

    def _table_room(self, table: int) -> int:
        return self.capacity(table) * 7 // 10 - self.used(table)

    def _grow_table(self, table: int) -> None:
        self.finish_growth(table)
        if self._table_room(table) >= ROOM:  # links of nodes that are gone were left behind
            return
        capacity = self.capacity(table)
        self._old[table] = self._owned[table + k.ENTRIES]
        entry_words = _TABLES[table] // 8
        empty = np.flatnonzero(self._old[table][1::entry_words][:4096] == 0)
        start = (int(empty[0]) + 1) % capacity  # a cluster begins behind an empty position
        self.state[table + k.OLD_ENTRIES] = self.state[table + k.ENTRIES]
        self.state[table + k.OLD_MASK] = capacity - 1
        self.state[table + k.CURSOR] = start
        self.state[table + k.LEFT] = capacity
        array, _ = self._prepared.pop(table, (np.zeros(2 * capacity * entry_words, np.uint64), 0))
        self._own(table + k.ENTRIES, array)
        self.state[table + k.MASK] = 2 * capacity - 1

    def _move(self, table: int, positions: int) -> None:
        if k.migrate(self.address, table, positions) == 0:
            del self._old[table]

    def _grow_pool(self, pool: int, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        capacity = int(self.state[pool + k.CAPACITY])
        if capacity - int(self.state[pool + k.LIVE]) < rows:
            self._resize_pool(pool, max(2 * capacity, rows), shape, dtype)

    def _resize_pool(self, pool: int, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        array = self._resized(pool + k.ROWS, (rows, *shape), dtype)
        self.state[pool + k.CAPACITY] = rows
        self.state[pool + k.ROW_BYTES] = array.strides[0]
