"""Applying one stream's events to the index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cache_index.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    MalformedEventError,
    concatenated,
    decode_batch,
)
from cache_index.hashing import Hashes, Namespace, canonical_hash, chain_hashes, fold_extra_keys
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier
from cache_index.wire import BYTES_AT_ONCE, LARGEST_PAYLOAD, PAYLOADS_AT_ONCE, WireReader

_NO_FOLDS = np.empty(0, np.uint64)


@dataclass(slots=True)
class IngestCounters:
    """What a stream's events came to, since the stream was added."""

    events: int = 0
    unknown_events: int = 0
    malformed_events: int = 0
    unresolved_blocks: int = 0  # stored below an unknown parent, or removed without having been stored


class StreamIngest:
    """Translates the engine's block names into sequence hashes and applies events for one holder.

    ``block_size`` None accepts what the events say; otherwise events with another one are refused.
    """

    def __init__(
        self,
        index: CacheIndex,
        holder: Holder,
        model: str,
        *,
        tenant: str = "default",
        block_size: int | None = None,
    ) -> None:
        self._index = index
        self._holder = holder
        self._model = model
        self._tenant = tenant
        self._block_size = block_size
        self._namespaces: dict[tuple[int, str | None], Namespace] = {}
        # Removals do not repeat block size and adapter, so those do not separate engine hashes.
        self._domain = np.uint64(canonical_hash(["engine hashes", model, tenant]))
        self._reader = WireReader(index, holder, int(self._domain), block_size)
        self._decoded = IngestCounters()  # what went through `apply`; the reader has counters of its own

    @property
    def counters(self) -> IngestCounters:
        decoded, reader = self._decoded, self._reader
        return IngestCounters(
            events=decoded.events + reader.events,
            unknown_events=decoded.unknown_events + reader.unknown_events,
            malformed_events=decoded.malformed_events + reader.refused_events,
            unresolved_blocks=decoded.unresolved_blocks + reader.unresolved_blocks,
        )

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
            if isinstance(event, BlocksRemoved):
                if removals and removals[0].tier is not event.tier:
                    self._remove(removals)
                    removals = []
                removals.append(event)
                continue
            if removals:
                self._remove(removals)
                removals = []
            if isinstance(event, BlocksStored):
                self._store(event)
            else:
                self._clear(event)
        if removals:
            self._remove(removals)

    def clear(self, tier: Tier | None = None) -> None:
        """Forget what the stream has reported so far."""
        self._index.clear(self._holder, tier)

    def _store(self, event: BlocksStored) -> None:
        if self._block_size is not None and event.block_size != self._block_size:
            self._decoded.malformed_events += 1
            return
        namespace = self._namespace(event.block_size, event.lora)
        parent = 0
        if event.parent_engine_hash is not None:
            engine_key = event.parent_engine_hash ^ int(self._domain)
            resolved = self._index.resolve(engine_key, namespace)
            if resolved is None:
                self._decoded.unresolved_blocks += len(event.engine_hashes)
                return
            parent = resolved
        try:
            folds = _NO_FOLDS if event.extra_keys is None else _folds(event.extra_keys)
        except TypeError:  # a kind of key that has no canonical form
            self._decoded.malformed_events += 1
            return
        hashes = chain_hashes(event.token_ids, event.block_size, parent=parent, folds=folds)
        engine_keys = event.engine_hashes ^ self._domain
        self._index.store_linked(self._holder, event.tier, namespace, hashes, engine_keys, parent=parent)

    def _remove(self, events: Sequence[BlocksRemoved]) -> None:
        engine_keys = concatenated([event.engine_hashes for event in events]) ^ self._domain
        unknown = self._index.remove_linked(self._holder, events[0].tier, engine_keys)
        self._decoded.unresolved_blocks += unknown

    def _clear(self, event: BlocksCleared) -> None:
        self.clear(event.tier)

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
