"""The NumPy arrays behind the kernels: who owns them, and how they grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k
from cache_index.table_memory import HUGE_PAGE, TableMemory, available_bytes

MINIMUM_CAPACITY = 1 << 11
SPARE = 1 << 11  # positions behind a table's last home
ROOM = 512  # blocks that fit after make_room
MOVES_PER_BLOCK = 24  # positions of a growing table that are moved per block applied
MOVES_PER_CALL = 64
MOVES_AT_LEAST = 1 << 14  # positions that are moved before the kernels go on after a growth began
MOVES_AT_ONCE = 1 << 16
DOUBLING_BELOW = 1 << 21  # entries; below, speed counts more than the 40 MB that a table can have in excess
LARGE_STEP = {k.NODES: 1.2, k.LINKS: 1.35}  # above: 29.3 and 30.0 bytes per entry just after a step
OTHER_STEP = 1.5
NO_LIMIT = 1 << 62
RECLAIM_POSITIONS = 1 << 16  # what retired slots had goes before anything is dropped for want of room
RECLAIMS_BEFORE_EVICTION = 4

MARKS = (k.FANOUT, k.GAPS, k.ANCHORS)
BLOCK_TABLES = (k.NODES, k.LINKS)  # a block has an entry in each
GROWN_AHEAD = 0.25  # share of the available memory that tables may take before they are needed


def _percent(table: int) -> int:
    return k.LINKS_PERCENT if table == k.LINKS else k.USUAL_PERCENT


def _capacity_for(table: int, entries: int) -> int:
    return max(MINIMUM_CAPACITY, entries * 100 // _percent(table) + 1)


class KernelArrays:
    """Tables, pools and per-slot arrays; every kernel takes the ``address`` of the ``state``.

    Tables grow without a long stop: a larger array is made and entries move over in order with the
    following calls (``advance``), and the memory they leave is used again. Pools and per-slot arrays are
    small (thousands of distinct holder sets, not millions) and are copied at once.
    """

    def __init__(self, expected_blocks: int = 0, max_blocks: int | None = None) -> None:
        self.state: NDArray[np.int64] = np.zeros(k.STATE_WORDS, np.int64)
        self.address = int(self.state.ctypes.data)
        self._owned: dict[int, NDArray[Any]] = {}
        self._tables: dict[int, TableMemory] = {}
        self._old: dict[int, TableMemory] = {}
        self.reclaim: Callable[[int], bool] = lambda positions: False
        self._spare = dict.fromkeys(k.ENTRY_BYTES, SPARE)
        self._foreseen = dict.fromkeys(BLOCK_TABLES, 0)  # capacities to grow to ahead of the need
        self.slot_capacity = 0
        self.holder_capacity = 0
        for table in k.ENTRY_BYTES:
            blocks = expected_blocks if table in BLOCK_TABLES else 0
            self._new_table(table, _capacity_for(table, blocks + ROOM))
            self.state[table + k.SWEPT] = -1
        for pool in (k.SET_POOL, k.SMALL_POOL, k.BITS_POOL):
            self.state[pool + k.FREE] = -1
        self.state[k.SET_POOL + k.NEXT] = self.state[k.SET_POOL + k.LIVE] = 1  # set id 0 means "no set"
        self.state[k.MAX_BLOCKS] = NO_LIMIT if max_blocks is None else max_blocks
        self.gap_depths = self._resized(k.GAP_DEPTHS, (k.GAP_DEPTH_BITS + 1,), np.int32)
        self.gap_bits = self._resized(k.GAP_BITS, ((k.GAP_DEPTH_BITS + 1) // 64,), np.uint64)
        self.heat = self._resized(k.HEAT, (k.HEAT_WAYS << k.HEAT_ROW_BITS, 2), np.uint64)
        self.ensure_slots(64)
        self.ensure_holders(64)
        self._grow_pool(k.SET_POOL, 2 * ROOM, (4,), np.uint64)
        self._grow_pool(k.SMALL_POOL, 2 * ROOM, (k.SMALL_SET,), np.int32)
        self._grow_pool(k.BITS_POOL, 2 * ROOM, (int(self.state[k.BIT_WORDS]),), np.uint64)

    @property
    def nbytes(self) -> int:
        """Memory in use; of a table being moved, the filled part of the new and the rest of the old."""
        total = sum(array.nbytes for array in self._owned.values())
        for table, memory in self._tables.items():
            if table in self._old:
                moved = int(self.state[table + k.CURSOR]) / int(self.state[table + k.OLD_CAPACITY])
                total += int(memory.size * min(moved, 1)) + self._old[table].size - self._old[table].released
            else:
                total += memory.size
        return total

    @property
    def growing(self) -> bool:
        """Whether a table is being moved; ``advance`` must then be called with every change."""
        return bool(self._old)

    def is_growing(self, table: int) -> bool:
        return table in self._old

    def used(self, table: int) -> int:
        return int(self.state[table + k.USED])

    def capacity(self, table: int) -> int:
        return int(self.state[table + k.CAPACITY])

    def advance(self, blocks: int) -> None:
        """Move a part of the growing tables, in proportion to the blocks just applied."""
        for table in list(self._old):
            self._move(table, MOVES_PER_BLOCK * blocks + MOVES_PER_CALL)

    def finish_growth(self, table: int | None = None) -> None:
        for each in list(self._old):
            if table is None or each == table:
                while each in self._old:
                    self._move(each, MOVES_AT_ONCE)

    def foresee(self, blocks: int) -> None:
        """So many blocks are to be expected: ``grow_ahead`` makes room for as many as memory allows."""
        blocks = min(blocks, int(self.state[k.MAX_BLOCKS]))
        wanted = {table: _capacity_for(table, blocks + ROOM) for table in BLOCK_TABLES}
        more = sum(k.ENTRY_BYTES[t] * max(0, wanted[t] - self.capacity(t)) for t in BLOCK_TABLES)
        affordable = min(1.0, GROWN_AHEAD * available_bytes() / max(more, 1))
        for table, capacity in wanted.items():
            now = self.capacity(table)
            self._foreseen[table] = max(self._foreseen[table], int(now + affordable * (capacity - now)))

    def grow_ahead(self) -> bool:
        """Begin to move what has less than the foreseen capacity; whether anything had."""
        small = [t for t, foreseen in self._foreseen.items() if foreseen > self.capacity(t)]
        for table in small:
            if table not in self._old:
                self._grow_table(table)
        return bool(small)

    def make_room(self, *, to_store: bool = True) -> None:
        """After this, the kernels can store (or only remove) at least one block, mostly ``ROOM`` of them."""
        self.advance(k.MOVING_ROOM)
        wanted = int(self.state[k.WANTED])
        self.state[k.WANTED] = 0
        for table in k.ENTRY_BYTES:
            room = 3 * (ROOM + wanted) if table in MARKS else ROOM
            while self._table_room(table) < room:
                self._grow_table(table)
        self._grow_pool(k.SET_POOL, ROOM + 2, (4,), np.uint64)
        self._grow_pool(k.SMALL_POOL, ROOM + 2, (k.SMALL_SET,), np.int32)
        self._grow_pool(k.BITS_POOL, ROOM + 2, (int(self.state[k.BIT_WORDS]),), np.uint64)
        if to_store and self._is_full():
            for _ in range(RECLAIMS_BEFORE_EVICTION):
                if not (self.reclaim(RECLAIM_POSITIONS) and self._is_full()):
                    break
            if self._is_full():
                self._evict(min(ROOM, int(self.state[k.MAX_BLOCKS]) // 16 + 1))

    def _is_full(self) -> bool:
        return self.used(k.NODES) >= int(self.state[k.MAX_BLOCKS])

    def ensure_slots(self, slots: int) -> None:
        """Make room for slot numbers below ``slots``."""
        if slots <= self.slot_capacity:
            return
        capacity = 1 << (max(slots, 64) - 1).bit_length()
        self.slot_holder = self._resized(k.SLOT_HOLDER, (capacity,), np.int32, fill=-1)
        self.slot_tier = self._resized(k.SLOT_TIER, (capacity,), np.int32)
        self.slot_blocks = self._resized(k.SLOT_BLOCKS, (capacity,), np.int64)
        self.slot_gaps = self._resized(k.SLOT_GAPS, (capacity,), np.int64)
        self.dead_bits = self._resized(k.DEAD_BITS, (capacity // 64,), np.uint64)
        self._resized(k.SCRATCH_BITS, (capacity // 64,), np.uint64)
        self.slot_capacity = capacity
        self.state[k.BIT_WORDS] = capacity // 64
        rows = int(self.state[k.BITS_POOL + k.POOL_CAPACITY])
        self._resize_pool(k.BITS_POOL, rows, (capacity // 64,), np.uint64)

    def ensure_holders(self, holders: int) -> None:
        """Make room for holder rows below ``holders``."""
        if holders <= self.holder_capacity:
            return
        capacity = 1 << (max(holders, 64) - 1).bit_length()
        self.holder_slots = self._resized(k.HOLDER_SLOTS, (capacity, k.TIERS), np.int32, fill=-1)
        self._resized(k.NEED, (capacity,), np.int32, fill=k.TIERS)
        self._resized(k.ALIVE, (capacity,), np.int32)
        self.holder_capacity = capacity

    def positions(self, table: int) -> list[NDArray[np.uint32]]:
        """All positions of the table, one row of 32-bit words each, in the order of their homes.

        Of a table that is being moved, the new one and what is left of the old. The arrays are not copies.
        """
        entry_words = k.ENTRY_BYTES[table] // 4
        parts = []
        moved = int(self.state[table + k.CURSOR]) if table in self._old else 0
        for memory, first in ((self._tables[table], 0), (self._old.get(table), moved)):
            if memory is not None:
                words = memory.bytes[: memory.size // (4 * entry_words) * 4 * entry_words].view(np.uint32)
                parts.append(words.reshape(-1, entry_words)[first:])
        return parts

    def refill(self, table: int, rows: NDArray[np.uint32]) -> None:
        """Put the entries among ``positions`` into this table, which must be empty."""
        rows = np.ascontiguousarray(rows)
        capacity = max(self.capacity(table), _capacity_for(table, len(rows) + 4 * ROOM))
        while True:
            self._new_table(table, capacity)
            self.state[table + k.USED] = 0
            if not k.refill(self.address, table, rows.ctypes.data, len(rows)):
                return
            self._spare[table] = 2 * self._spare[table] + len(rows)

    def pool(self, pool: int) -> NDArray[Any]:
        """The rows of a pool that were ever used."""
        return self._owned[pool + k.ROWS][: int(self.state[pool + k.NEXT])]

    def refill_pool(self, pool: int, rows: NDArray[Any], live: int, free: int) -> None:
        count = len(rows)
        self._resize_pool(pool, max(count + 2 * ROOM, 2 * ROOM), rows.shape[1:], rows.dtype)
        self._owned[pool + k.ROWS][:count] = rows
        self.state[pool + k.LIVE], self.state[pool + k.NEXT], self.state[pool + k.FREE] = live, count, free

    def _own(self, word: int, array: NDArray[Any]) -> None:
        self._owned[word] = array
        self.state[word] = array.ctypes.data

    def _resized(self, word: int, shape: tuple[int, ...], dtype: Any, fill: int = 0) -> NDArray[Any]:
        array = np.zeros(shape, dtype) if fill == 0 else np.full(shape, fill, dtype)
        before = self._owned.get(word)
        if before is not None:
            array[tuple(slice(0, length) for length in before.shape)] = before
        self._own(word, array)
        return array

    def _table_room(self, table: int) -> int:
        if self.state[table + k.CROWDED]:
            return 0
        return self.capacity(table) * _percent(table) // 100 - self.used(table)

    def _new_table(self, table: int, capacity: int) -> None:
        positions = capacity + self._spare[table]
        memory = TableMemory(positions * k.ENTRY_BYTES[table])
        self._tables[table] = memory
        self.state[table + k.ENTRIES] = memory.address
        self.state[table + k.END] = memory.address + positions * k.ENTRY_BYTES[table]
        self.state[table + k.CAPACITY] = capacity
        self.state[table + k.CROWDED] = 0

    def _grow_table(self, table: int) -> None:
        self.finish_growth(table)
        if self.state[table + k.CROWDED]:
            self._spare[table] *= 2
        capacity = self.capacity(table)
        self._old[table] = self._tables[table]
        self.state[table + k.OLD_ENTRIES] = self.state[table + k.ENTRIES]
        self.state[table + k.OLD_END] = self.state[table + k.END]
        self.state[table + k.OLD_CAPACITY] = capacity
        self.state[table + k.CURSOR] = 0
        self.state[k.MOVING] += 1
        step = LARGE_STEP.get(table, OTHER_STEP) if capacity >= DOUBLING_BELOW else 2
        self._new_table(table, max(int(capacity * step), self._foreseen.get(table, 0)))
        self._move(table, MOVES_AT_LEAST)

    def _move(self, table: int, positions: int) -> None:
        if k.migrate(self.address, table, positions) == 0:
            del self._old[table]
            return
        entry_bytes = k.ENTRY_BYTES[table]
        cursor = int(self.state[table + k.CURSOR])
        unused_from = int(k.unused_from(self.address, table, HUGE_PAGE)) - self._tables[table].address
        self._old[table].hand_over(cursor * entry_bytes, self._tables[table], unused_from)

    def _evict(self, blocks: int) -> None:
        """Drop blocks: cold ends of chains with one holder first, then shared ones, at last anything."""
        self.finish_growth(k.FANOUT)
        target = self.used(k.NODES) - blocks
        for shared in (0, 0, 0, 0, 1, 1, 1, 1):
            if self.used(k.NODES) <= target:
                return
            k.drop_leaves(self.address, self.used(k.NODES) - target, shared)
            self._make_room_to_remove()
        self.finish_growth(k.NODES)
        position = 0
        positions = int(self.state[k.NODES + k.CAPACITY]) + self._spare[k.NODES]
        while self.used(k.NODES) > target and position < positions:
            position = int(k.drop_any(self.address, self.used(k.NODES) - target, position))
            self._make_room_to_remove()

    def _make_room_to_remove(self) -> None:
        largest = 2 * int(self.state[k.BIT_WORDS]) * 64 + 2
        for table in (*MARKS, k.SETS):
            while self._table_room(table) < 3 * (ROOM + largest):
                self._grow_table(table)
            self.finish_growth(table)
        self._grow_pool(k.SET_POOL, ROOM + largest, (4,), np.uint64)
        self._grow_pool(k.SMALL_POOL, ROOM + largest, (k.SMALL_SET,), np.int32)
        self._grow_pool(k.BITS_POOL, ROOM + largest, (int(self.state[k.BIT_WORDS]),), np.uint64)

    def _grow_pool(self, pool: int, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        capacity = int(self.state[pool + k.POOL_CAPACITY])
        if capacity - int(self.state[pool + k.LIVE]) < rows:
            self._resize_pool(pool, max(2 * capacity, int(self.state[pool + k.LIVE]) + rows), shape, dtype)

    def _resize_pool(self, pool: int, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        array = self._resized(pool + k.ROWS, (rows, *shape), dtype)
        self.state[pool + k.POOL_CAPACITY] = rows
        self.state[pool + k.ROW_BYTES] = array.strides[0]
