"""The index of residencies: a radix tree in hash-addressed form.

A sequence hash names a whole prefix, so the child of a node is one hash probe away and the tree is a
flat table: key -> (holder set, parent, depth). Keys are ``sequence hash ^ namespace domain``. Holder
sets are interned, so neighbouring blocks with the same holders share one, and matching does no set work
between the positions where it changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k
from cache_index.arrays import NO_LIMIT, KernelArrays
from cache_index.assumed_runs import AssumedRuns
from cache_index.changes import Changes
from cache_index.hashing import DEFAULT_SEED, Hashes, Namespace, Tokens, salt_folds
from cache_index.kernel_set import entry_point
from cache_index.residency import HeldRange, Holder, HotPrefix, IndexStats, Tier
from cache_index.self_check import ensure_ready
from cache_index.slots import MAINTAIN_BLOCKS, Slots
from cache_index.tree_view import TreeView, view_below, view_from_roots

RECLAIM_POSITIONS = 1 << 14
_U64, _U32, _I32 = np.dtype(np.uint64), np.dtype(np.uint32), np.dtype(np.int32)
_contiguous, _empty, _zeros = (
    np.ascontiguousarray,
    np.empty,
    np.zeros,
)  # found faster: a match takes less than a microsecond
_NO_KEYS = np.empty(0, np.uint64)


class CacheIndex:
    """Which holder has which block, in which tier. Thread-safe; kernels run without the GIL.

    A block stored several times by one (holder, tier) has as many copies and needs as many removes, up
    to ``kernels.MAX_EXTRA_COPIES`` beyond the first.

    ``max_blocks`` bounds the number of distinct blocks. When a store finds the index full, ends of chains
    are dropped that were neither stored nor matched lately, those with one holder first; the blocks before
    them stay and match as they did. ``stats().dropped_residencies`` counts them.
    """

    def __init__(self, *, expected_blocks: int = 0, max_blocks: int | None = None) -> None:
        if max_blocks is not None and max_blocks <= 0:
            raise ValueError(f"max_blocks must be positive, not {max_blocks}")
        ensure_ready()
        self._lock = threading.Lock()
        self._arrays = KernelArrays(expected_blocks, max_blocks)
        self._slots = Slots(self._arrays)
        self._store, self._match = entry_point(k.store), entry_point(k.match)
        self._match_tokens = entry_point(k.match_tokens)
        self._secrets = int(k.secrets_for(DEFAULT_SEED).ctypes.data)  # which stay where they are
        self._remove, self._remove_linked = entry_point(k.remove), entry_point(k.remove_linked)
        self._apply, self._assume = entry_point(k.apply), entry_point(k.assume)
        self._exchange = entry_point(k.exchange)
        self._held_run = entry_point(k.held_run)

    @property
    def max_blocks(self) -> int | None:
        limit = int(self._arrays.state[k.MAX_BLOCKS])
        return None if limit == NO_LIMIT else limit

    def expect(self, blocks: int) -> None:
        """So many blocks may come to be held at once: make room for them ahead, in the background.

        That happens with ``reclaim`` and with changes to the index. Room is never taken back, and never made for
        more than ``max_blocks``, or beyond a quarter of the available memory.
        """
        with self._lock:
            self._arrays.foresee(blocks)

    def register(self, holder: Holder) -> int:
        """The holder's row in match results; the same one until it is unregistered."""
        with self._lock:
            return self._slots.register(holder)

    def unregister(self, holder: Holder) -> None:
        """Forget a holder: O(1), its residencies are invisible at once. Its row may be given away."""
        with self._lock:
            self._slots.unregister(holder)

    @property
    def registrations(self) -> int:
        """Another number whenever a holder was registered or unregistered."""
        return self._slots.registrations

    def registered(self) -> tuple[int, dict[Holder, int]]:
        """``registrations``, and the row of every holder at that moment."""
        with self._lock:
            return self._slots.registrations, self._slots.rows_by_holder()

    def holder_id(self, holder: Holder) -> int | None:
        return self._slots.row(holder)

    def holder(self, row: int) -> Holder | None:
        """Whose row of match results this is."""
        return self._slots.holder(row)

    def store(
        self, holder: Holder, tier: Tier, namespace: Namespace, hashes: Hashes, *, parent: int = 0
    ) -> None:
        """Add consecutive blocks of one chain; ``parent`` is the sequence hash before them (0: none).

        Raises UnknownHolderError for a holder that is not registered.
        """
        self._stored(holder, tier, namespace.domain_word, _contiguous(hashes, _U64), _NO_KEYS, parent)

    def store_linked(
        self,
        holder: Holder,
        tier: Tier,
        namespace: Namespace,
        hashes: Hashes,
        engine_keys: Hashes,
        *,
        parent: int = 0,
    ) -> None:
        """Like store; ``engine_keys`` are other names of the same blocks, for ``remove_linked``."""
        hashes, engine_keys = _contiguous(hashes, _U64), _contiguous(engine_keys, _U64)
        self._stored(holder, tier, namespace.domain_word, hashes, engine_keys, parent)

    def _stored(
        self, holder: Holder, tier: Tier, domain: np.uint64, hashes: Hashes, engine_keys: Hashes, parent: int
    ) -> None:
        with self._lock:
            slot = self._slots.of(holder, tier)
            address, blocks, done = self._arrays.address, len(hashes), 0
            while (done := self._store(address, slot, hashes, engine_keys, domain, parent, done)) < blocks:
                self._arrays.make_room()
            self._slots.maintain(blocks)

    def remove(self, holder: Holder, tier: Tier, namespace: Namespace, hashes: Hashes) -> None:
        """Take away one copy of each block; blocks that (holder, tier) does not have are ignored."""
        self._removed(holder, tier, namespace.domain_word, hashes)

    def remove_keys(self, holder: Holder, tier: Tier, keys: Hashes) -> None:
        """Like remove, of any namespaces; ``keys`` are ``sequence hash ^ domain``."""
        self._removed(holder, tier, k.ZERO, keys)

    def _removed(self, holder: Holder, tier: Tier, domain: np.uint64, hashes: Hashes) -> None:
        hashes = _contiguous(hashes, _U64)
        with self._lock:
            slot = self._slots.existing(holder, tier)
            if slot is None:
                return
            done = 0
            while (done := self._remove(self._arrays.address, slot, hashes, domain, done)) < len(hashes):
                self._arrays.make_room(to_store=False)
            self._slots.maintain(len(hashes))

    def remove_linked(self, holder: Holder, tier: Tier, engine_keys: Hashes) -> int:
        """Like remove, by the engine keys given to store_linked. Returns how many were unknown."""
        engine_keys = _contiguous(engine_keys, _U64)
        with self._lock:
            slot = self._slots.existing(holder, tier)
            if slot is None:
                return 0
            blocks, done, unknown = len(engine_keys), 0, 0
            while True:
                missed: int
                done, missed = self._remove_linked(self._arrays.address, slot, engine_keys, done)
                unknown += missed
                if done == blocks:
                    break
                self._arrays.make_room(to_store=False)
            self._slots.maintain(blocks)
            return unknown

    def apply(self, owners: Sequence[tuple[Holder, Tier]], namespace: Namespace, changes: Changes) -> None:
        """`store` and `remove` for many holders at once, in the order of the changes.

        For a block or two at a time that takes a tenth of the time. Raises UnknownHolderError, with nothing
        applied, when one of ``owners`` is not registered.
        """
        rows, chains, removed = changes.rows, changes.chains, changes.removed
        domain = namespace.domain_word
        with self._lock:
            slots = np.array([self._slots.of(holder, tier) for holder, tier in owners], np.int64)
            address, stop, row, done, blocks = self._arrays.address, len(rows), 0, 0, 0
            while True:
                row, done, some = self._apply(address, slots, rows, chains, removed, domain, row, done)
                blocks += some
                if row == stop:
                    break
                self._arrays.make_room()
            self._slots.maintain(blocks)

    def assume(
        self,
        holder: Holder,
        assumed: AssumedRuns,
        namespace: Namespace,
        hashes: Hashes,
        number: int,
        now_s: float,
    ) -> int:
        """Begin a run in a holder's book, and store and remove on its device what comes and goes by that.

        Returns from how many runs the new one took blocks. Nothing was done where that is negative: see the kernel.
        No other thread runs meanwhile. Raises UnknownHolderError for a holder that is not registered.
        """
        hashes, domain = _contiguous(hashes, _U64), namespace.domain_word
        slots, address = self._slots, self._arrays.address
        with self._lock:
            slot = slots.of(holder, Tier.DEVICE)
            runs: int
            runs, known, new, lost, done = self._assume(
                assumed.address, address, slot, hashes, domain, number, now_s
            )
            blocks = lost + new
            if done < blocks:
                gone, came = assumed.lost(lost), hashes[known : known + new]
                parent = hashes[known - 1] if known else 0
                while done < blocks:
                    self._arrays.make_room(to_store=done >= lost)
                    done = self._exchange(address, slot, gone, came, domain, parent, done)
            slots.blocks_due += blocks
            if slots.blocks_due >= MAINTAIN_BLOCKS:
                slots.maintain(0)
        return runs

    def resolve(self, engine_key: int, namespace: Namespace) -> int | None:
        """The sequence hash of the block that was stored with this engine key, None if unknown."""
        with self._lock:
            key = int(k.resolve(self._arrays.address, np.uint64(engine_key)))
        return key ^ namespace.domain if key else None

    def clear(self, holder: Holder, tier: Tier | None = None) -> None:
        """Drop what a holder has in one tier or in all: O(1), visible at once, reclaimed later."""
        with self._lock:
            self._slots.clear(holder, tier)

    def match(self, namespace: Namespace, hashes: Hashes) -> NDArray[np.int32]:
        """How much of a prompt every holder has: ``[holder_id, tier]`` is the longest contiguous prefix,
        in blocks, of which each block is in one of the tiers up to ``tier``.

        Exact. Positions are skipped only where holders provably have all blocks between (see ``kernels.gaps``):
        O(holders + holder changes * log(blocks matched)), and one look-up per gap on the way.
        """
        hashes = _contiguous(hashes, _U64)
        domain = namespace.domain_word
        with self._lock:
            levels = _zeros(self._slots.levels_shape, _I32)
            self._match(self._arrays.address, hashes, domain, levels)
        return levels

    def match_tokens(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        known: Hashes | None = None,
    ) -> tuple[Hashes, NDArray[np.int32]]:
        """`sequence_hashes` of a prompt, of which the first may be ``known``, and `match` of them."""
        tokens = _contiguous(tokens, _U32)
        block_size, domain = namespace.block_size, namespace.domain_word
        hashes = _empty(len(tokens) // block_size, _U64)
        folds = _NO_KEYS if not cache_salt else salt_folds(cache_salt)
        with self._lock:
            levels = _zeros(self._slots.levels_shape, _I32)
            self._match_tokens(
                self._arrays.address,
                tokens,
                block_size,
                DEFAULT_SEED,
                self._secrets,
                folds,
                _NO_KEYS if known is None else _contiguous(known, _U64),
                domain,
                hashes,
                levels,
            )
        return hashes, levels

    def held_run(
        self, holder: Holder, tier: Tier, namespace: Namespace, hashes: Hashes, *, alone: bool = False
    ) -> int:
        """How many of these blocks, from the first on, one holder has, each in a tier up to this one; ``alone``:
        each in this tier.

        O(blocks); that is less than a match where there are many holders.
        """
        hashes = _contiguous(hashes, _U64)
        with self._lock:
            row = self._slots.row(holder)
            if row is None:
                return 0
            slots = self._arrays.holder_slots[row, tier if alone else 0 : tier + 1]
            return int(self._held_run(self._arrays.address, slots, hashes, namespace.domain_word))

    def best_holder(
        self, namespace: Namespace, hashes: Hashes, start: int = 0, stop: int | None = None
    ) -> dict[Tier, HeldRange]:
        """Per tier, who has most of ``hashes[start:stop]`` without a gap from ``start`` on, in tiers up to it.

        Whether the holder has the blocks before ``start`` does not matter. A tier up to which nobody has
        the first block is left out; of equal holders the one registered first is named.
        """
        levels = self.match(namespace, hashes[start:stop])
        best: dict[Tier, HeldRange] = {}
        if len(levels) == 0:
            return best
        for tier, row in zip(Tier, levels.argmax(axis=0).tolist(), strict=True):
            holder = self._slots.holder(row)
            if holder is not None and levels[row, tier] > 0:
                best[tier] = HeldRange(holder, int(levels[row, tier]))
        return best

    def hot_prefixes(self, *, limit: int = 20) -> list[HotPrefix]:
        """Where most of the recent matches ended, most first; the more holders, the earlier among equals.

        Counts are estimates: a few thousand blocks are tracked, and rare ones give way.
        """
        with self._lock:
            counted = self._arrays.heat[self._arrays.heat[:, 1] > 0].tolist()
            found = []
            description = np.empty(3, np.uint64)
            for key, matches in counted:
                if k.describe_node(self._arrays.address, np.uint64(key), description):
                    depth, parent, holders = description.tolist()
                    found.append(HotPrefix(key, parent or None, _known(depth), matches, holders))
        found.sort(key=lambda prefix: (-prefix.matches, -prefix.holders, prefix.hash))
        return found[:limit]

    def reclaim(self, positions: int = RECLAIM_POSITIONS) -> bool:
        """Do a bounded piece of background work (growth, sweep). False when nothing is left to do.

        Changes to the index do it in passing; an idle thread may call this too.
        """
        with self._lock:
            return self._slots.reclaim(positions)

    def residencies(self, holder: Holder, tier: Tier | None = None) -> set[tuple[int, Tier]]:
        """(sequence hash ^ namespace domain, tier) of every block of a holder. Scans the whole index."""
        found: set[tuple[int, Tier]] = set()
        with self._lock:
            self._arrays.finish_growth(k.NODES)
            for each in Tier if tier is None else (tier,):
                slot = self._slots.existing(holder, each)
                if slot is not None:
                    keys = np.empty(int(self._arrays.slot_blocks[slot]), np.uint64)
                    k.keys_of_slot(self._arrays.address, slot, keys)
                    found.update((key, each) for key in keys.tolist())
        return found

    def held_blocks(self, holder: Holder, tier: Tier) -> int:
        """How many blocks a holder has in a tier; O(1)."""
        with self._lock:
            slot = self._slots.existing(holder, tier)
            return 0 if slot is None else int(self._arrays.slot_blocks[slot])

    def held_counts(self, rows: NDArray[np.int64], tiers: NDArray[np.int64]) -> NDArray[np.int64]:
        """`held_blocks` of many, holders by their rows in match results; 0 for row -1."""
        with self._lock:
            slots = self._arrays.holder_slots[rows, tiers]
            held = self._arrays.slot_blocks[slots]
        return np.where((rows >= 0) & (slots >= 0), held, 0)

    def stats(self) -> IndexStats:
        """Sizes; O(holders)."""
        with self._lock:
            by_holder: dict[Holder, dict[Tier, int]] = {}
            total = 0
            for holder, tier, _, blocks in self._slots.live():
                by_holder.setdefault(holder, {})[tier] = blocks
                total += blocks
            return IndexStats(
                blocks=self._arrays.used(k.NODES),
                residencies=total,
                residencies_by_holder=by_holder,
                bytes=self._arrays.nbytes,
                retired_slots=self._slots.retired,
                max_blocks=self.max_blocks,
                dropped_residencies=int(self._arrays.state[k.DROPPED]),
                gaps=self._arrays.used(k.GAPS),
            )

    def tree(self, *, limit: int = 100) -> TreeView:
        """At most ``limit`` blocks, those near the roots first. Reads the whole table, a page at a time."""
        return view_from_roots(self, limit)

    def subtree(self, root: int, *, limit: int = 100) -> TreeView | None:
        """A block (sequence hash ^ namespace domain) and those that continue it; None when it is unknown."""
        return view_below(self, root, limit)


def _known(depth: int) -> int | None:
    return None if depth == k.UNKNOWN else depth
