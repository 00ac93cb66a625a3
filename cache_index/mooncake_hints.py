"""What a Mooncake master's events say of its pool: hints, keyed only where the key is certain.

The master publishes object hashes without tokens. Where an engine stored the same hash *with* its tokens,
the object is that block. What nobody explained is counted and kept for a while, never guessed. Batch
removals, replica moves and disk offload publish nothing, so hints age: the oldest go when there are too many,
and a listing of the master's keys drops those whose objects are gone and brings those that were missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from cache_index.cache_events import CacheEvent
from cache_index.hashing import Hashes, Namespace, canonical_hash, chain_hashes, fold_extra_keys
from cache_index.named_blocks import NamedBlocks
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier

RETRIES_PER_EVENT = 4  # unkeyed objects looked up again, in turn
_NO_FOLDS = np.empty(0, np.uint64)


@dataclass(slots=True)
class HintCounters:
    """What the events came to, since the pool was added."""

    events: int = 0
    keyed: int = 0  # objects matched to a block
    unkeyed: int = 0  # objects that no engine had explained when they were stored
    unresolved: int = 0  # removals of objects that were never seen
    forgotten: int = 0  # oldest hints and objects dropped to stay within bounds
    unlisted: int = 0  # hints dropped because the master no longer lists their objects
    learned: int = 0  # objects that were known from a listing first


class Listing:
    """A listing under way: names that events told of since it was asked for, which know better."""

    def __init__(self) -> None:
        self.changed: set[int] = set()


class MooncakeHints:
    """The blocks of one pool. All are in the remote tier: the master tells neither node nor medium."""

    def __init__(
        self,
        index: CacheIndex,
        pool: Holder,
        model: str,
        block_size: int | None,
        *,
        tenant: str = "default",
        max_blocks: int = 1_000_000,
    ) -> None:
        self._index = index
        self._blocks = NamedBlocks(index, pool)
        self._unkeyed: dict[int, None] = {}  # in order of arrival
        self._model = model
        self._block_size = block_size
        self._tenant = tenant
        self._max_blocks = max_blocks
        # the names under which this model's engines link their blocks
        self._engine_names = canonical_hash(["engine hashes", model, tenant])
        self._listing: Listing | None = None
        self.counters = HintCounters()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def unkeyed(self) -> int:
        """Objects in the pool that nobody has explained so far."""
        return len(self._unkeyed)

    def apply(self, event: CacheEvent) -> None:
        """UnknownHolderError when the pool's holder is not registered."""
        self.counters.events += 1
        if self._listing is not None:
            self._listing.changed.update(event.names)
        if event.kind == "cleared":
            self.clear()
        elif event.kind == "removed":
            self._remove(event.names)
        elif event.model in (None, self._model):
            self._store(event)
        else:
            self.counters.unkeyed += len(event.names)
        self._retry()

    def clear(self) -> None:
        self._blocks.clear()
        self._unkeyed.clear()
        self._listing = None

    def begin_listing(self) -> Listing:
        """The master is about to be asked for its keys. A listing before it, and one that was cleared, is void."""
        self._listing = Listing()
        return self._listing

    def names(self) -> list[int]:
        """All objects known, explained or not."""
        return [*self._blocks, *self._unkeyed]

    def names_of(self, namespace: Namespace, hashes: Hashes) -> list[int | None]:
        """The objects that hold these blocks, None for those not in the pool. Goes through all hints."""
        wanted = set(hashes.tolist())
        found = {
            block.hash: name
            for name in self._blocks
            if (block := self._blocks.get(name)) is not None
            and block.hash in wanted
            and block.namespace == namespace
        }
        return [found.get(each) for each in hashes.tolist()]

    def is_current(self, listing: Listing) -> bool:
        return self._listing is listing

    def drop_unlisted(self, names: Iterable[int], listing: Listing) -> int:
        """The master does not list these. Returns how many hints that were."""
        gone = [name for name in names if name not in listing.changed] if self.is_current(listing) else []
        for name in gone:
            self._unkeyed.pop(name, None)
        hints = [name for name in gone if name in self._blocks]
        self._blocks.remove(hints)
        self.counters.unlisted += len(hints)
        return len(hints)

    def learn_listed(self, names: Iterable[int], listing: Listing) -> None:
        """The master lists these; those that nobody explained are tried again."""
        if self._block_size is None or not self.is_current(listing):
            return
        namespace = Namespace(self._model, self._block_size, None, self._tenant)
        for name in names:
            if name in self._blocks or name in listing.changed:
                continue
            self.counters.learned += name not in self._unkeyed
            if not self._store_explained(name, namespace):
                self._unkeyed[name] = None
        self._bound()

    def _store(self, event: CacheEvent) -> None:
        block_size = event.block_size or self._block_size
        if block_size is None:
            self.counters.unkeyed += len(event.names)
            return
        namespace = Namespace(self._model, block_size, event.lora, self._tenant)
        if event.token_ids is not None and self._store_tokens(event, namespace):
            return
        for name in event.names:
            if not self._store_explained(name, namespace):
                self._unkeyed[name] = None
                self.counters.unkeyed += 1
        self._bound()

    def _store_tokens(self, event: CacheEvent, namespace: Namespace) -> bool:
        tokens = np.array(event.token_ids, np.uint32)
        parent, folds = 0, _NO_FOLDS
        if event.parent is not None:
            known = self._blocks.get(event.parent)
            if known is None or known.namespace != namespace:
                return False
            parent = known.hash
        elif event.base_block_idx:
            return False
        elif event.salt:
            folds = np.array([fold_extra_keys([event.salt])], np.uint64)
        if len(tokens) != len(event.names) * namespace.block_size:
            return False
        hashes = chain_hashes(tokens, namespace.block_size, parent=parent, folds=folds)
        self._keyed(event.names, namespace, hashes, parent)
        return True

    def _store_explained(self, name: int, namespace: Namespace) -> bool:
        """Key an object by the block that an engine stored under the same hash."""
        found = self._index.resolve(name ^ self._engine_names, namespace)
        if found is None:
            return False
        self._keyed((name,), namespace, np.array([found], np.uint64), 0)
        return True

    def _keyed(self, names: tuple[int, ...], namespace: Namespace, hashes: Hashes, parent: int) -> None:
        self._blocks.store(names, Tier.REMOTE, namespace, hashes, parent=parent)
        self.counters.keyed += len(names)
        for name in names:
            self._unkeyed.pop(name, None)
        self._bound()

    def _remove(self, names: tuple[int, ...]) -> None:
        for name in names:
            if name in self._unkeyed:
                del self._unkeyed[name]
            else:
                self.counters.unresolved += self._blocks.remove([name])

    def _retry(self) -> None:
        """An object's event may overtake the engine's that explains it."""
        if self._block_size is None:
            return
        namespace = Namespace(self._model, self._block_size, None, self._tenant)
        for name in list(islice(self._unkeyed, RETRIES_PER_EVENT)):
            del self._unkeyed[name]
            if not self._store_explained(name, namespace):
                self._unkeyed[name] = None  # behind the others

    def _bound(self) -> None:
        excess = len(self._blocks) - self._max_blocks
        if excess > 0:
            self._blocks.remove(list(islice(self._blocks, excess)))
            self.counters.forgotten += excess
        while len(self._unkeyed) > self._max_blocks:
            del self._unkeyed[next(iter(self._unkeyed))]
            self.counters.forgotten += 1


def name_of(object_key: str) -> int | None:
    """The hash that the master derives from a numeric object key; None for others, which name no hash."""
    try:
        return int(object_key, 0) & ((1 << 64) - 1)
    except ValueError:
        return None
