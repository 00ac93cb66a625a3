"""Applying one stream's events to the index."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cache_index.cache_groups import PARTIAL_KINDS
from cache_index.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    MalformedEventError,
    concatenated,
    decode_batch,
)
from cache_index.hashing import Hashes, Namespace, canonical_hash, chain_hashes, fold_extra_keys
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier
from cache_index.streams import EngineTraits
from cache_index.wire import BYTES_AT_ONCE, LARGEST_PAYLOAD, PAYLOADS_AT_ONCE, WireReader

_NO_FOLDS = np.empty(0, np.uint64)


@dataclass(slots=True)
class IngestCounters:
    """What a stream's events came to, since the stream was added."""

    events: int = 0
    unknown_events: int = 0
    malformed_events: int = 0
    other_group_events: int = 0  # of KV cache groups beside the one that is followed: see cache_groups
    unresolved_blocks: int = 0  # stored below an unknown parent, bare and unknown, or removed but not stored


class StreamIngest:
    """Translates the engine's block names into sequence hashes and applies events for one holder.

    ``block_size`` None accepts what the events say; otherwise events with another one are refused.
    ``tiers`` are the only ones that are ever cleared as a whole, None: all.
    """

    def __init__(
        self,
        index: CacheIndex,
        holder: Holder,
        model: str,
        *,
        tenant: str = "default",
        block_size: int | None = None,
        tiers: Collection[Tier] | None = None,
    ) -> None:
        self._index = index
        self._holder = holder
        self._model = model
        self._tenant = tenant
        self._block_size = block_size
        self._tiers = None if tiers is None else frozenset(tiers)
        self._namespaces: dict[tuple[int, str | None], Namespace] = {}
        # Removals do not repeat block size and adapter, so those do not separate engine hashes.
        self._domain = np.uint64(canonical_hash(["engine hashes", model, tenant]))
        self._reader = WireReader(index, holder, int(self._domain), block_size, self._tiers)
        self._decoded = IngestCounters()  # what went through `apply`; the reader has counters of its own
        self._decoded_clears = 0

    @property
    def counters(self) -> IngestCounters:
        decoded, reader = self._decoded, self._reader
        return IngestCounters(
            events=decoded.events + reader.events,
            unknown_events=decoded.unknown_events + reader.unknown_events,
            malformed_events=decoded.malformed_events + reader.refused_events,
            other_group_events=decoded.other_group_events + reader.other_group_events,
            unresolved_blocks=decoded.unresolved_blocks + reader.unresolved_blocks,
        )

    @property
    def traits(self) -> EngineTraits:
        """What the stream has told of its engine's ways."""
        group, extra_keys = self._reader.main_group, self._reader.extra_keys
        return EngineTraits(group.number, group.provisional, extra_keys.published, extra_keys.doubtful)

    def resume(self, traits: EngineTraits) -> None:
        """Go on where another one stopped, with the index as that one left it."""
        group, extra_keys = self._reader.main_group, self._reader.extra_keys
        group.number, group.provisional = traits.main_group, traits.main_group_is_provisional
        extra_keys.published, extra_keys.doubtful = traits.publishes_extra_keys, traits.doubtful

    @property
    def clears(self) -> int:
        """How often the engine told that everything is gone of which the stream speaks."""
        return self._decoded_clears + self._reader.clears

    def apply_payloads(self, payloads: Sequence[bytes]) -> list[MalformedEventError]:
        """Apply payloads as they came from the engine, in their order; the fastest way.

        The same as ``apply(decode_batch(payload))`` for each of them. Returns the errors of those that
        are no batch at all. UnknownHolderError when the holder is not registered.
        """
        errors: list[MalformedEventError] = []
        for some in _portions(payloads):
            if len(some[0]) > LARGEST_PAYLOAD:
                self._decode(some[0], errors)
                continue
            scratch, done = self._reader.load(some), 0
            while (done := self._reader.apply_next(scratch, done)) < len(some):
                self._decode(some[done], errors)
                done += 1
        return errors

    def _decode(self, payload: bytes, errors: list[MalformedEventError]) -> None:
        """The long way, for what the compiled reader does not read."""
        try:
            self.apply(decode_batch(payload))
        except MalformedEventError as error:
            errors.append(error)

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch in its order. UnknownHolderError when the holder is not registered."""
        self._decoded.unknown_events += batch.unknown_events
        self._decoded.malformed_events += len(batch.rejected)
        self._decoded.events += len(batch.events)
        removals: list[BlocksRemoved] = []  # engines send one event per block: apply runs of them at once
        for event in batch.events:
            if self._displaces_main_group(event):
                self._remove(removals)
                self.clear()
            if not self._follows(event):
                self._decoded.other_group_events += 1
                continue
            if isinstance(event, BlocksRemoved):
                if removals and removals[0].tier is not event.tier:
                    self._remove(removals)
                removals.append(event)
                continue
            self._remove(removals)
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksCleared):
                self._clear(event)
        self._remove(removals)

    def clear(self, tier: Tier | None = None) -> None:
        """Forget what the stream has reported so far, of one tier or of all."""
        if self._tiers is None:
            self._index.clear(self._holder, tier)
            return
        for each in self._tiers if tier is None else self._tiers & {tier}:
            self._index.clear(self._holder, each)

    def _displaces_main_group(self, event: Event) -> bool:
        """Whether the event is of a KV cache group that is followed from now on, instead of another one."""
        if isinstance(event, BlocksStored | BlocksRemoved):
            return self._reader.main_group.gives_way_to(event.group, event.kind)
        return False

    def _follows(self, event: Event) -> bool:
        """Whether the event counts, or is of another KV cache group than the main one."""
        main_group = self._reader.main_group
        if isinstance(event, BlocksCleared):
            return True
        if isinstance(event, BlocksRemoved):
            return main_group.follows(event.group, event.kind, stored=False)
        if isinstance(event, BlocksStored) and not (
            event.kind in PARTIAL_KINDS and self._is_foreign(event.block_size)
        ):
            return main_group.follows(event.group, event.kind, stored=True)
        main_group.unusable(event.group)
        return False

    def _is_foreign(self, block_size: int) -> bool:
        return self._block_size is not None and block_size != self._block_size

    def _store(self, event: BlocksStored) -> None:
        if self._is_foreign(event.block_size):
            self._decoded.malformed_events += 1
            return
        namespace = self._namespace(event.block_size, event.lora)
        if event.names_extra_keys:
            self._extra_keys_are_published()
        parent = 0
        if event.parent_engine_hash is not None:
            engine_key = event.parent_engine_hash ^ int(self._domain)
            resolved = self._index.resolve(engine_key, namespace)
            if resolved is None:
                self._decoded.unresolved_blocks += len(event.engine_hashes)
                return
            parent = resolved
        engine_keys = event.engine_hashes ^ self._domain
        if event.bare:
            hashes = self._bare_hashes(event, namespace, engine_keys, parent)
            self._index.store_linked(
                self._holder, event.tier, namespace, hashes, engine_keys[: len(hashes)], parent=parent
            )
            return
        try:
            folds = _NO_FOLDS if event.extra_keys is None else _folds(event.extra_keys)
        except (TypeError, RecursionError):  # a kind of key that has no canonical form, or too deep a one
            self._decoded.malformed_events += 1
            return
        hashes = chain_hashes(event.token_ids, event.block_size, parent=parent, folds=folds)
        self._index.store_linked(self._holder, event.tier, namespace, hashes, engine_keys, parent=parent)

    def _extra_keys_are_published(self) -> None:
        record = self._reader.extra_keys
        if not record.published:
            record.published = True
            for tier in record.doubtful_tiers():
                self.clear(tier)
            record.doubtful = 0

    def _bare_hashes(
        self, event: BlocksStored, namespace: Namespace, engine_keys: Hashes, parent: int
    ) -> Hashes:
        """Sequence hashes of a bare store's blocks, as many as it is sure which they are: see ``extra_keys``."""
        record, size = self._reader.extra_keys, event.block_size
        hashes: list[int] = []
        for position, engine_key in enumerate(engine_keys.tolist()):
            known = self._index.resolve(engine_key, namespace)
            if known is None:
                if record.published:
                    self._decoded.unresolved_blocks += len(engine_keys) - position
                    break
                tokens = event.token_ids[position * size : (position + 1) * size]
                known = int(chain_hashes(tokens, size, parent=parent)[0])
                record.doubtful |= 1 << event.tier
            hashes.append(known)
            parent = known
        return np.array(hashes, np.uint64)

    def _remove(self, events: list[BlocksRemoved]) -> None:
        """Apply removals from one tier, and take them off the list."""
        if not events:
            return
        engine_keys = concatenated([event.engine_hashes for event in events]) ^ self._domain
        unknown = self._index.remove_linked(self._holder, events[0].tier, engine_keys)
        self._decoded.unresolved_blocks += unknown
        events.clear()

    def _clear(self, event: BlocksCleared) -> None:
        tier = event.tier
        self.clear(tier)
        self._decoded_clears += tier is None or (self._tiers is not None and self._tiers <= {tier})

    def _namespace(self, block_size: int, lora: str | None) -> Namespace:
        namespace = self._namespaces.get((block_size, lora))
        if namespace is None:
            namespace = Namespace(self._model, block_size, lora, self._tenant)
            self._reader.add_namespace(namespace)
            self._namespaces[block_size, lora] = namespace
        return namespace


def _portions(payloads: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut into pieces that stay in the processor's caches; a larger payload is one of its own."""
    start, size = 0, 0
    for number, payload in enumerate(payloads):
        if number > start and (size + len(payload) > BYTES_AT_ONCE or number - start == PAYLOADS_AT_ONCE):
            yield payloads[start:number]
            start, size = number, 0
        size += len(payload)
    if start < len(payloads):
        yield payloads[start:]


def _folds(extra_keys: Sequence[Sequence[object]]) -> Hashes:
    return np.array([fold_extra_keys(keys) for keys in extra_keys], np.uint64)
