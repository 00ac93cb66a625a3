"""A paged KV cache with prefix reuse: physical blocks, reference counts, LRU eviction, and its events.

As in vLLM, a digest can be stored several times: a request that recomputes a block which is already cached
(the last block of a fully cached, block-aligned prompt) gets a second physical copy with its own store and
its own removal. Blocks are freed tail first, so that a chain is evicted from its leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.block_hash import HashChain
from simulator.host_tier import MEDIUM as HOST_MEDIUM
from simulator.host_tier import HostBlock, HostTier

DEVICE_MEDIUM = "GPU"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one chain became resident; ``parent`` is the digest before the first."""

    digests: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    block_size: int
    salt: str | None = None  # of the first block, when that is a chain's first
    session_id: str | None = None
    medium: str = DEVICE_MEDIUM


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    digests: tuple[bytes, ...]
    medium: str = DEVICE_MEDIUM


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class _PendingStore:
    block: int  # physical; 0 for a re-reported hit
    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str | None
    session_id: str | None


class KvCache:
    """``blocks`` physical blocks of ``block_size`` tokens, numbered from 1.

    Every operation is constant time per block. Events gather until `drain_events`, removals before stores, those
    of ``host`` behind the device's.
    """

    def __init__(
        self, blocks: int, block_size: int, *, batch_removals: bool = False, host: HostTier | None = None
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, not {blocks} of {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self.batch_removals = batch_removals
        self.host = host
        self._pinned: dict[bytes, int] = {}  # digest -> the physical block that a pin refers to
        self._references = [0] * (blocks + 1)
        self._digest: list[bytes | None] = [None] * (blocks + 1)
        self._copies: dict[bytes, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks + 1))
        self._cleared = False
        self._removed: list[bytes] = []
        self._stored: list[_PendingStore | None] = []
        self._stored_at: dict[int, int] = {}  # physical block -> index in _stored

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks some request or lease refers to; cached blocks nobody uses count as free."""
        return self.blocks - len(self._free)

    @property
    def usage(self) -> float:
        return self.used_blocks / self.blocks

    def lookup(self, chain: HashChain) -> list[int]:
        """Physical blocks of the longest cached prefix of ``chain``, the last token's block left out."""
        return self._held(chain, chain.usable_blocks())

    def acquire(self, blocks: Sequence[int]) -> None:
        """Refer to cached blocks, so that they cannot be evicted."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def evictable(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free now, and would be lost to others if acquired."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting the least recently used; needs that many free blocks."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def commit(self, block: int, chain: HashChain, index: int, session_id: str | None = None) -> None:
        """Say that ``block`` now holds block ``index`` of ``chain``, ready for others to use."""
        if self._digest[block] is not None:
            raise RuntimeError(f"block {block} is already committed")
        digest = chain.digests(index + 1)[index]
        self._digest[block] = digest
        self._copies.setdefault(digest, {})[block] = None
        self._stored_at[block] = len(self._stored)
        self._stored.append(self._pending(block, chain, index, session_id))
        if self.host is not None:
            self.host.store(chain, index, index + 1)

    def report_hit(self, chain: HashChain, index: int, session_id: str | None = None) -> None:
        """Announce a cached block again, as vLLM does on request; no removal will match it."""
        chain.digests(index + 1)
        self._stored.append(self._pending(0, chain, index, session_id))

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a chain, given head first; the tail is freed first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
            digest = self._digest[block]
            if self.host is not None and digest is not None:
                self.host.use(digest)

    @property
    def pinned_blocks(self) -> int:
        return len(self._pinned)

    def place(self, chain: HashChain, stop: int) -> int:
        """Cache what has arrived of the first ``stop`` blocks; how many are here now, free ones permitting."""
        held = self._held(chain, stop)
        self.acquire(held)
        arrived = self.allocate(min(stop - len(held), self.free_blocks))
        for index, block in enumerate(arrived, len(held)):
            self.commit(block, chain, index)
        self.release(held + arrived)
        return len(held) + len(arrived)

    def held(self, chain: HashChain, stop: int) -> int:
        """How many of the first ``stop`` blocks are cached, without a gap."""
        return len(self._held(chain, stop))

    def drop(self, chain: HashChain, start: int, stop: int) -> int:
        """Forget blocks that nobody uses; how many that were."""
        dropped = 0
        for digest in chain.digests(stop)[start:stop]:
            for block in [b for b in self._copies.get(digest, ()) if self._references[b] == 0]:
                self._forget(block)
                self._free.move_to_end(block, last=False)
                dropped += digest not in self._copies
        return dropped

    def drop_all(self) -> int:
        """Forget all blocks that nobody uses; how many that were."""
        unused = [block for block in self._free if self._digest[block] is not None]
        for block in unused:
            self._forget(block)
        return len(unused)

    def pin(self, chain: HashChain, start: int, stop: int) -> int:
        """Refer to cached blocks until they are unpinned; how many of the first. At most half of all blocks."""
        pinned = 0
        for digest in chain.digests(stop)[start:stop]:
            if digest not in self._pinned:
                copies = self._copies.get(digest)
                if copies is None or len(self._pinned) >= self.blocks // 2:
                    break
                block = next(iter(copies))
                self.acquire([block])
                self._pinned[digest] = block
            pinned += 1
        return pinned

    def unpin(self, chain: HashChain, start: int, stop: int) -> int:
        """How many of these were pinned."""
        pinned = [digest for digest in chain.digests(stop)[start:stop] if digest in self._pinned]
        self.release([self._pinned.pop(digest) for digest in pinned])
        return len(pinned)

    def _held(self, chain: HashChain, stop: int) -> list[int]:
        found: list[int] = []
        for digest in chain.digests(stop)[:stop]:
            copies = self._copies.get(digest)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def reset(self) -> bool:
        """Forget everything cached; False, and no effect, while any block is in use."""
        if self.used_blocks:
            return False
        if self.host is not None:
            self.host.clear()
        self._copies.clear()
        self._digest = [None] * (self.blocks + 1)
        self._removed.clear()
        self._stored.clear()
        self._stored_at.clear()
        self._cleared = True
        return True

    def drain_events(self) -> list[KvEvent]:
        """Events since the last call: a clear, removals, stores. Changes that cancelled out are left out."""
        events: list[KvEvent] = [AllBlocksCleared()] if self._cleared else []
        if self.batch_removals and self._removed:
            events.append(BlockRemoved(tuple(self._removed)))
        else:
            events.extend(BlockRemoved((digest,)) for digest in self._removed)
        run: list[_PendingStore] = []
        for store in self._stored:
            if store is None:
                continue
            if run and not self._continues(run[-1], store):
                events.append(self._stored_event(run))
                run = []
            run.append(store)
        if run:
            events.append(self._stored_event(run))
        self._cleared = False
        self._removed.clear()
        self._stored.clear()
        self._stored_at.clear()
        return events + self._host_events()

    def residency(self) -> dict[bytes, int]:
        """Number of physical copies of every cached digest."""
        return {digest: len(copies) for digest, copies in self._copies.items()}

    def references(self) -> list[int]:
        """References to each physical block, block 0 being none."""
        return list(self._references)

    def check_invariants(self) -> None:
        """Assert that free list, references and digests agree."""
        for block in range(1, self.blocks + 1):
            assert self._references[block] >= 0, f"block {block} released too often"
            assert (block in self._free) == (self._references[block] == 0), f"block {block} lost"
            digest = self._digest[block]
            assert digest is None or block in self._copies[digest], f"block {block} not findable"
        committed = sum(digest is not None for digest in self._digest)
        assert committed == sum(len(copies) for copies in self._copies.values())
        assert all(self._copies.values())

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is None:
            return
        self._digest[block] = None
        copies = self._copies[digest]
        del copies[block]
        if not copies:
            del self._copies[digest]
        # Removals are published before stores, so a store that nobody has seen yet is taken back instead.
        unseen = self._stored_at.pop(block, None)
        if unseen is None:
            self._removed.append(digest)
        else:
            self._stored[unseen] = None

    def _pending(self, block: int, chain: HashChain, index: int, session_id: str | None) -> _PendingStore:
        salt = chain.salt if index == 0 else None
        tokens = tuple(chain.block_tokens(index))
        digest = chain.digests(index + 1)[index]
        return _PendingStore(block, digest, chain.parent(index), tokens, salt, session_id)

    def _host_events(self) -> list[KvEvent]:
        if self.host is None:
            return []
        removed, stored = self.host.take_changes()
        events: list[KvEvent] = [BlockRemoved(tuple(removed), HOST_MEDIUM)] if removed else []
        runs: list[list[HostBlock]] = []
        for block in stored:
            if runs and block.parent == runs[-1][-1].digest:
                runs[-1].append(block)
            else:
                runs.append([block])
        events.extend(
            BlockStored(
                digests=tuple(block.digest for block in run),
                parent=run[0].parent,
                tokens=tuple(token for block in run for token in block.tokens),
                block_size=self.block_size,
                salt=run[0].salt,
                medium=HOST_MEDIUM,
            )
            for run in runs
        )
        return events

    @staticmethod
    def _continues(last: _PendingStore, store: _PendingStore) -> bool:
        return store.parent == last.digest and store.session_id == last.session_id

    def _stored_event(self, run: list[_PendingStore]) -> BlockStored:
        first = run[0]
        return BlockStored(
            digests=tuple(store.digest for store in run),
            parent=first.parent,
            tokens=tuple(token for store in run for token in store.tokens),
            block_size=self.block_size,
            salt=first.salt,
            session_id=first.session_id,
        )
