"""Slots: one number per incarnation of (holder, tier).

Clearing a holder retires its slots, which makes their residencies invisible at once, whatever their
number. A later sweep takes retired slots out of the holder sets; only then is a number used again.
"""

from __future__ import annotations

from cache_index import kernels as k
from cache_index.arrays import MOVES_PER_BLOCK, KernelArrays
from cache_index.residency import Holder, Tier, UnknownHolderError

SWEEP_PER_BLOCK = 16  # positions that are swept per block applied
SWEEP_PER_CALL = 256
STALE_LINKS_FACTOR = 3  # links per node above which a pass over LINKS starts
STALE_LINKS = 4096


class Slots:
    """Holder rows, their slots, and the sweep of the retired ones."""

    def __init__(self, arrays: KernelArrays) -> None:
        self._arrays = arrays
        self._holders: list[Holder | None] = []
        self._row_of: dict[Holder, int] = {}
        self._free_rows: list[int] = []
        self._next_slot = 0
        self._free_slots: list[int] = []
        self._retired: list[int] = []  # wait for the next sweep
        self._sweeping: list[int] = []  # the running sweep takes them out
        self._sweep_capacity = 0
        self._links_cursor: int | None = None  # position of the running pass over LINKS

    @property
    def rows(self) -> int:
        """Rows of match results: registered holders and rows that are free for reuse."""
        return len(self._holders)

    @property
    def retired(self) -> int:
        return len(self._retired) + len(self._sweeping)

    def register(self, holder: Holder) -> int:
        row = self._row_of.get(holder)
        if row is not None:
            return row
        if self._free_rows:
            row = self._free_rows.pop()
            self._holders[row] = holder
        else:
            row = len(self._holders)
            self._holders.append(holder)
            self._arrays.ensure_holders(row + 1)
        self._row_of[holder] = row
        return row

    def unregister(self, holder: Holder) -> None:
        row = self._row_of.pop(holder, None)
        if row is not None:
            self._retire_row(row, None)
            self._holders[row] = None
            self._free_rows.append(row)

    def row(self, holder: Holder) -> int | None:
        return self._row_of.get(holder)

    def existing(self, holder: Holder, tier: Tier) -> int | None:
        """The slot of (holder, tier) if it has one."""
        row = self._row_of.get(holder)
        if row is None:
            return None
        slot = int(self._arrays.holder_slots[row, tier])
        return slot if slot >= 0 else None

    def of(self, holder: Holder, tier: Tier) -> int:
        """The slot of (holder, tier), made when missing; UnknownHolderError if not registered."""
        row = self._row_of.get(holder)
        if row is None:
            raise UnknownHolderError(holder)
        slot = int(self._arrays.holder_slots[row, tier])
        if slot < 0:
            slot = self._new_slot()
            self._arrays.slot_holder[slot] = row
            self._arrays.slot_tier[slot] = tier
            self._arrays.slot_blocks[slot] = 0
            self._arrays.holder_slots[row, tier] = slot
        return slot

    def clear(self, holder: Holder, tier: Tier | None) -> None:
        row = self._row_of.get(holder)
        if row is not None:
            self._retire_row(row, tier)

    def owner(self, slot: int) -> tuple[Holder, Tier] | None:
        """Who a slot belongs to, None once it is retired."""
        row = int(self._arrays.slot_holder[slot])
        holder = self._holders[row] if row >= 0 else None
        return None if holder is None else (holder, Tier(int(self._arrays.slot_tier[slot])))

    def live(self) -> list[tuple[Holder, Tier, int, int]]:
        """(holder, tier, slot, blocks) of every slot in use."""
        found = []
        for holder, row in self._row_of.items():
            for tier in Tier:
                slot = int(self._arrays.holder_slots[row, tier])
                if slot >= 0:
                    found.append((holder, tier, slot, int(self._arrays.slot_blocks[slot])))
        return found

    def reclaim(self, positions: int) -> bool:
        """Sweep about that many positions; False when nothing is left to do."""
        arrays = self._arrays
        if arrays.growing:  # sweeping a table while it moves would miss entries
            arrays.advance(positions // MOVES_PER_BLOCK)
            return True
        if not self._sweeping:
            if not self._retired:
                return self._reclaim_links(positions)
            self._begin_sweep()
        if arrays.capacity(k.NODES) != self._sweep_capacity:  # moved meanwhile: entries changed places
            self._start_over()
        if k.sweep(arrays.address, positions) == 0:
            self._end_sweep()
        else:
            arrays.make_room()
        return True

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        slot = self._next_slot
        self._next_slot += 1
        self._arrays.ensure_slots(slot + 1)
        return slot

    def _retire_row(self, row: int, tier: Tier | None) -> None:
        arrays = self._arrays
        for each in Tier if tier is None else (tier,):
            slot = int(arrays.holder_slots[row, each])
            if slot < 0:
                continue
            arrays.holder_slots[row, each] = -1
            arrays.slot_holder[slot] = -1
            self._retired.append(slot)

    def _begin_sweep(self) -> None:
        arrays = self._arrays
        self._sweeping, self._retired = self._retired, []
        arrays.dead_bits[:] = 0
        for slot in self._sweeping:
            arrays.dead_bits[slot >> 6] |= k.ONE << k.u64(slot & 63)
        k.sweep_copies(arrays.address)
        self._start_over()

    def _start_over(self) -> None:
        self._sweep_capacity = self._arrays.capacity(k.NODES)
        self._arrays.state[k.SWEEP_CURSOR] = 0

    def _end_sweep(self) -> None:
        self._arrays.state[k.SWEEP_CURSOR] = -1
        self._free_slots += self._sweeping
        self._sweeping = []
        self._links_cursor = 0

    def _reclaim_links(self, positions: int) -> bool:
        """Drop links of nodes that are gone; False when no pass runs."""
        arrays = self._arrays
        if self._links_cursor is None:
            return False
        self._links_cursor = int(k.sweep_links(arrays.address, self._links_cursor, positions))
        if self._links_cursor >= arrays.capacity(k.LINKS):
            self._links_cursor = None
        return True

    def maintain(self, blocks: int) -> None:
        """A share of the growing and reclaiming, in proportion to the blocks just applied."""
        arrays = self._arrays
        arrays.prepare()
        if arrays.growing:
            arrays.advance(blocks)
        elif self._retired or self._sweeping or self._links_cursor is not None:
            self.reclaim(SWEEP_PER_BLOCK * blocks + SWEEP_PER_CALL)
        elif arrays.used(k.LINKS) > STALE_LINKS_FACTOR * arrays.used(k.NODES) + STALE_LINKS:
            self._links_cursor = 0
