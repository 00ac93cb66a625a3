"""Slots: one number per incarnation of (holder, tier).

Clearing a holder retires its slots, which makes their residencies invisible at once, whatever their
number. A later sweep takes retired slots out of the holder sets; only then is a number used again.
"""

from __future__ import annotations

from typing import Any

from cache_index import kernels as k
from cache_index.arrays import MOVES_PER_BLOCK, KernelArrays
from cache_index.residency import Holder, Tier, UnknownHolderError

SWEEP_PER_BLOCK = 16  # positions that are swept per block applied
SWEEP_PER_CALL = 256
STALE_LINKS_FACTOR = 1.5  # growth of LINKS after which a pass looks for links of nodes that are gone
STALE_LINKS = 4096
MAINTAIN_BLOCKS = 256  # applied before maintenance is worth a call; it takes some 50 us then
NO_SLOT = -1

# FANOUT before NODES: what a retired slot lacks is to be forgotten before its blocks are
SWEEPS = {k.FANOUT: k.sweep_fanout, k.COPIES: k.sweep_copies, k.NODES: k.sweep}


class Slots:
    """Holder rows, their slots, and the sweep of the retired ones."""

    def __init__(self, arrays: KernelArrays) -> None:
        self._arrays = arrays
        self._holders: list[Holder | None] = []
        self._row_of: dict[Holder, int] = {}
        self._slots_of: dict[Holder, list[int]] = {}  # holder_slots once more: quicker to look up from here
        self._free_rows: list[int] = []
        self._next_slot = 0
        self._free_slots: list[int] = []
        self._retired: list[int] = []  # wait for the next sweep
        self._sweeping: list[int] = []  # the running sweep takes them out
        self._swept_capacity: dict[int, int] = {}  # of the tables in this sweep, to notice their growth
        self._links_wanted = False  # a pass over LINKS is due
        self._links_before = 0  # links that the last pass left
        self.blocks_due = 0  # applied since the last maintenance
        self.levels_shape = (0, k.TIERS)  # of match results
        self.registrations = 0  # grows when holders come or go
        arrays.reclaim = self.reclaim

    @property
    def rows(self) -> int:
        """Rows of match results: registered holders and rows that are free for reuse."""
        return len(self._holders)

    @property
    def numbers(self) -> int:
        """Slot numbers ever used."""
        return self._next_slot

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
            self.levels_shape = (row + 1, k.TIERS)
            self._arrays.ensure_holders(row + 1)
        self._row_of[holder] = row
        self._slots_of[holder] = [NO_SLOT] * len(Tier)
        self.registrations += 1
        return row

    def unregister(self, holder: Holder) -> None:
        row = self._row_of.get(holder)
        if row is not None:
            self._retire_row(row, None)
            del self._row_of[holder], self._slots_of[holder]
            self._holders[row] = None
            self._free_rows.append(row)
            self.registrations += 1

    def rows_by_holder(self) -> dict[Holder, int]:
        """Of all registered holders."""
        return dict(self._row_of)

    def row(self, holder: Holder) -> int | None:
        return self._row_of.get(holder)

    def holder(self, row: int) -> Holder | None:
        """Whose row this is, None for one that is free."""
        return self._holders[row]

    def existing(self, holder: Holder, tier: Tier) -> int | None:
        """The slot of (holder, tier) if it has one."""
        slots = self._slots_of.get(holder)
        return None if slots is None or slots[tier] == NO_SLOT else slots[tier]

    def of(self, holder: Holder, tier: Tier) -> int:
        """The slot of (holder, tier), made when missing; UnknownHolderError if not registered."""
        slots = self._slots_of.get(holder)
        if slots is None:
            raise UnknownHolderError(holder)
        slot = slots[tier]
        return slot if slot != NO_SLOT else self._make(holder, tier)

    def _make(self, holder: Holder, tier: Tier) -> int:
        row, slot = self._row_of[holder], self._new_slot()
        self._arrays.slot_holder[slot] = row
        self._arrays.slot_tier[slot] = tier
        self._arrays.slot_blocks[slot] = 0
        self._arrays.slot_gaps[slot] = 0
        self._arrays.holder_slots[row, tier] = self._slots_of[holder][tier] = slot
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

    def exported(self) -> dict[str, Any]:
        """What ``restore`` needs besides the arrays."""
        return {
            "holders": [None if each is None else [each.instance_id, each.rank] for each in self._holders],
            "free_rows": self._free_rows,
            "next_slot": self._next_slot,
            "free_slots": self._free_slots,
            "retired": self._retired + self._sweeping,
        }

    def restore(self, exported: dict[str, Any]) -> None:
        """Become what was exported; ``arrays`` must have its slots and holders by then."""
        self._holders = [None if each is None else Holder(*each) for each in exported["holders"]]
        self.levels_shape = (len(self._holders), k.TIERS)
        self._row_of = {each: row for row, each in enumerate(self._holders) if each is not None}
        self._free_rows = list(exported["free_rows"])
        self.registrations += 1
        self._next_slot = exported["next_slot"]
        self._free_slots = list(exported["free_slots"])
        self._retired = list(exported["retired"])
        self._slots_of = {each: self._arrays.holder_slots[row].tolist() for each, row in self._row_of.items()}

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
        if arrays.grow_ahead():
            return True
        if not self._sweeping:
            if not self._retired:
                return self._reclaim_links(positions)
            self._begin_sweep()
        for table, sweep in SWEEPS.items():
            if arrays.state[table + k.SWEPT] < 0:
                continue
            if arrays.capacity(table) != self._swept_capacity[table]:  # moved meanwhile
                self._start_over(table)
            if sweep(arrays.address, positions) > 0:
                arrays.make_room(to_store=False)
                return True
            arrays.state[table + k.SWEPT] = -1
        self._end_sweep()
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
            arrays.holder_slots[row, each] = NO_SLOT
            holder = self._holders[row]
            if holder is not None:
                self._slots_of[holder][each] = NO_SLOT
            arrays.slot_holder[slot] = -1
            self._retired.append(slot)

    def _begin_sweep(self) -> None:
        arrays = self._arrays
        self._sweeping, self._retired = self._retired, []
        arrays.dead_bits[:] = 0
        for slot in self._sweeping:
            arrays.dead_bits[slot >> 6] |= k.ONE << k.u64(slot & 63)
        for table in SWEEPS:
            self._start_over(table)

    def _start_over(self, table: int) -> None:
        self._swept_capacity[table] = self._arrays.capacity(table)
        self._arrays.state[table + k.SWEPT] = 0

    def _end_sweep(self) -> None:
        self._free_slots += self._sweeping
        self._sweeping = []
        self._links_wanted = True

    def _reclaim_links(self, positions: int) -> bool:
        """Drop links of nodes that are gone; False when no pass runs."""
        arrays = self._arrays
        if not self._links_wanted:
            return False
        if arrays.state[k.LINKS + k.SWEPT] < 0 or arrays.capacity(k.LINKS) != self._swept_capacity[k.LINKS]:
            self._start_over(k.LINKS)
        if k.sweep_links(arrays.address, positions) == 0:
            arrays.state[k.LINKS + k.SWEPT] = -1
            self._links_wanted = False
            self._links_before = arrays.used(k.LINKS)
        return True

    def maintain(self, blocks: int) -> None:
        """A share of the growing and reclaiming, in proportion to the blocks just applied."""
        self.blocks_due += blocks
        if self.blocks_due < MAINTAIN_BLOCKS:
            return
        blocks, self.blocks_due = self.blocks_due, 0
        arrays = self._arrays
        if arrays.growing:
            arrays.advance(blocks)
        elif arrays.grow_ahead():
            return
        elif self._retired or self._sweeping or self._links_wanted:
            self.reclaim(SWEEP_PER_BLOCK * blocks + SWEEP_PER_CALL)
        elif self._has_many_links():
            self._links_wanted = True

    def _has_many_links(self) -> bool:
        """Whether LINKS may hold many of nodes that are gone; a node can have several names, too."""
        links = self._arrays.used(k.LINKS) - STALE_LINKS
        return links > self._arrays.used(k.NODES) and links > STALE_LINKS_FACTOR * self._links_before
