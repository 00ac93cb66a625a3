"""Payloads of one stream, applied to the index by compiled kernels.

The usual forms of events never become Python objects. What ``wire_kernels`` does not read is left to the
caller, one payload at a time and in its place in the order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from cache_index import wire_kernels as w
from cache_index.cache_groups import MainGroup
from cache_index.extra_keys import ExtraKeyRecord
from cache_index.hashing import DEFAULT_SEED, Namespace, canonical_hash
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier
from cache_index.slots import Slots
from cache_index.wire_scratch import PAYLOADS_AT_ONCE, Scratch

__all__ = ["BYTES_AT_ONCE", "LARGEST_PAYLOAD", "PAYLOADS_AT_ONCE", "WireReader"]

BLOCKS_PER_HOLD = 1024  # blocks applied before others get the index: well below a millisecond
BYTES_AT_ONCE = 1 << 18
LARGEST_PAYLOAD = 1 << 24  # bytes; the program of a payload takes up to 26 times its size
MAX_NAMESPACES = 1024


class _Scratches(threading.local):
    scratch: Scratch | None = None

    def mine(self) -> Scratch:
        if self.scratch is None:
            self.scratch = Scratch(DEFAULT_SEED)
        return self.scratch


_scratches = _Scratches()


class WireReader:
    """Reads and applies payloads for one holder, as far as the kernels can.

    Only ``tiers`` are cleared when the engine has cleared its cache; None: all. The counters say what came
    of the payloads, since the reader was made.
    """

    def __init__(
        self,
        index: CacheIndex,
        holder: Holder,
        domain: int,
        block_size: int | None,
        tiers: frozenset[Tier] | None = None,
    ) -> None:
        self._index = index
        self._holder = holder
        self._domain = _signed(domain)
        self._block_size = block_size or 0
        self._tiers = tiers
        self._namespaces = np.zeros((8, 3), np.uint64)
        self._namespaces_address = int(self._namespaces.ctypes.data)
        self._namespace_rows = 0
        self.events = 0
        self.unknown_events = 0
        self.refused_events = 0
        self.unresolved_blocks = 0
        self.other_group_events = 0
        self.main_group = MainGroup()
        self.extra_keys = ExtraKeyRecord()
        self.clears = 0  # of all tiers that may be

    def add_namespace(self, namespace: Namespace) -> None:
        """Events of namespaces that were not added are left to the caller."""
        if self._namespace_rows == MAX_NAMESPACES:
            return
        if self._namespace_rows == len(self._namespaces):
            self._namespaces = np.concatenate([self._namespaces, np.zeros_like(self._namespaces)])
            self._namespaces_address = int(self._namespaces.ctypes.data)
        adapter = 0 if namespace.lora is None else canonical_hash(namespace.lora)
        self._namespaces[self._namespace_rows] = namespace.block_size, adapter, namespace.domain
        self._namespace_rows += 1

    def load(self, payloads: Sequence[bytes]) -> Scratch:
        """Begin with ``payloads``, at most PAYLOADS_AT_ONCE."""
        scratch = _scratches.mine()
        scratch.load(payloads)
        return scratch

    def apply_next(self, scratch: Scratch, first: int) -> int:
        """Apply the payloads from ``first`` up to one that is left to the caller, whose number it returns.

        Raises UnknownHolderError when something is stored and the holder is not registered.
        """
        work = scratch.work
        scratch.begin(first)
        work[w.STREAM_DOMAIN] = self._domain
        work[w.BLOCK_SIZE] = self._block_size
        work[w.NAMESPACES] = self._namespaces_address
        work[w.NAMESPACE_ROWS] = self._namespace_rows
        main_group, extra_keys = self.main_group, self.extra_keys
        work[w.MAIN_GROUP] = w.NO_GROUP if main_group.number is None else main_group.number
        work[w.PROVISIONAL] = main_group.provisional
        work[w.PUBLISHED] = extra_keys.published
        reached = int(w.read_payloads(scratch.address))
        main_group.number = None if work[w.MAIN_GROUP] == w.NO_GROUP else work[w.MAIN_GROUP]
        main_group.provisional = bool(work[w.PROVISIONAL])
        extra_keys.published = bool(work[w.PUBLISHED])
        self.events += work[w.EVENTS]
        self.unknown_events += work[w.UNKNOWN_EVENTS]
        self.refused_events += work[w.REFUSED_EVENTS]
        self.other_group_events += work[w.OTHER_GROUP_EVENTS]
        if work[w.OPERATIONS]:
            self._run(scratch)
        return reached

    def _run(self, scratch: Scratch) -> None:
        scratch.work[w.DOUBTFUL] = self.extra_keys.doubtful
        try:
            while self._run_some(scratch) != w.FINISHED:
                time.sleep(0)  # those who wait for the index get it now
        finally:
            self.unresolved_blocks += scratch.work[w.UNRESOLVED]
            self.extra_keys.doubtful = scratch.work[w.DOUBTFUL]

    def _run_some(self, scratch: Scratch) -> int:
        """Apply up to BLOCKS_PER_HOLD blocks; the kernel's answer."""
        index, work = self._index, scratch.work
        work[w.BUDGET] = BLOCKS_PER_HOLD
        work[w.APPLIED] = 0
        with index._lock:
            arrays, slots = index._arrays, index._slots
            self._find_slots(scratch)
            while True:
                answer = int(w.run_program(arrays.address, scratch.address))
                if answer == w.NO_ROOM:
                    arrays.make_room()
                elif answer == w.NO_SLOT:
                    tier = scratch.operation_tier()
                    scratch.slots[tier] = slots.of(self._holder, Tier(tier))
                elif answer == w.CLEARING:
                    tier = scratch.operation_tier()
                    self._clear(slots, None if tier == w.EVERY_TIER else Tier(tier))
                    work[w.OPERATION] += 1
                    self._find_slots(scratch)
                elif answer == w.FORGETTING:
                    self._forget(slots, scratch)
                    work[w.OPERATION] += 1
                    self._find_slots(scratch)
                else:
                    break
            slots.maintain(work[w.APPLIED])
        return answer

    def _forget(self, slots: Slots, scratch: Scratch) -> None:
        if scratch.operation_tier() == w.EVERY_TIER:
            self._drop(slots, None)
            return
        self.extra_keys.doubtful = scratch.work[w.DOUBTFUL]
        for tier in self.extra_keys.doubtful_tiers():
            self._drop(slots, tier)
        scratch.work[w.DOUBTFUL] = 0

    def _drop(self, slots: Slots, tier: Tier | None) -> None:
        if self._tiers is None:
            slots.clear(self._holder, tier)
        else:
            for each in self._tiers if tier is None else self._tiers & {tier}:
                slots.clear(self._holder, each)

    def _clear(self, slots: Slots, tier: Tier | None) -> None:
        self._drop(slots, tier)
        self.clears += tier is None or (self._tiers is not None and self._tiers <= {tier})

    def _find_slots(self, scratch: Scratch) -> None:
        row = self._index._slots.row(self._holder)
        scratch.slots[:] = -1 if row is None else self._index._arrays.holder_slots[row]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
