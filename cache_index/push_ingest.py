"""Applying cache events that publishers push: order by event id, and names linked to blocks. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cache_index.cache_events import CacheEvent
from cache_index.events import MalformedEventError
from cache_index.hashing import Hashes, Namespace, canonical_hash, chain_hashes, fold_extra_keys
from cache_index.ingest import IngestCounters
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier
from cache_index.streams import StreamStats

MAX_STREAMS = 4096
_NO_FOLDS = np.empty(0, np.uint64)

Outcome = Literal["applied", "duplicate"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Event ids that a stream never brought: what it had reported before was voided."""

    holder: Holder
    expected: int
    received: int


@dataclass(slots=True)
class _PushStream:
    """One publisher's events of one holder."""

    holder: Holder
    last_event_id: int = -1
    last_timestamp: float | None = None
    complete: bool = False
    tiers: set[Tier] = field(default_factory=set)  # told of, and voided by a gap; others are not ours
    applied: int = 0
    gaps: int = 0
    counters: IngestCounters = field(default_factory=IngestCounters)
    last_event_at_s: float | None = None


class PushIngest:
    """Pushed events in the index. A publisher's holder is ``Holder(backend_id, dp_rank)``.

    With tokens, blocks are hashed anew and the publisher's hashes are only names. Without, its hashes must
    be the sequence hashes of this index (XXH3-64 chain, seed 1337), as RFC #1527 recommends.

    Callers on several threads hold ``lock`` from the first event of a request to its last.
    """

    def __init__(self, index: CacheIndex, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self._index = index
        self._clock = clock
        self._streams: dict[Holder, _PushStream] = {}
        self._domains: dict[tuple[str, str], np.uint64] = {}

    def apply(self, event: CacheEvent, *, unplaced: int = 0) -> tuple[Outcome, Gap | None]:
        """Apply one event. MalformedEventError when it cannot be applied, which voids nothing.

        ``unplaced`` is how many events before this one came along but could not be read at all, so that
        their ids are not missing.
        """
        holder = Holder(event.backend_id, event.rank)
        stream = self._stream(holder)
        gap = self._order(stream, event, unplaced)
        if gap is None and event.event_id < stream.last_event_id + 1:
            return "duplicate", None
        stream.last_event_id, stream.last_timestamp = event.event_id, event.timestamp
        stream.last_event_at_s = self._clock()
        try:
            self._change(stream, event)
        except MalformedEventError:
            self.count_rejected(stream.holder)
            raise
        stream.applied += 1
        stream.counters.events += 1
        return "applied", gap

    def reject(self, holder: Holder, event_id: int) -> bool:
        """An event came but could not be read. Whether its id was the next one, which is then not missing."""
        stream = self._streams.get(holder)
        if stream is None:
            return False
        self.count_rejected(holder)
        if event_id != stream.last_event_id + 1:
            return False
        stream.last_event_id = event_id
        return True

    def count_rejected(self, holder: Holder) -> None:
        stream = self._streams[holder]
        stream.counters.malformed_events += 1
        stream.complete = False

    def forget(self, holder: Holder) -> None:
        """Drop a publisher's stream and what it told."""
        with self.lock:
            stream = self._streams.pop(holder, None)
            if stream is not None:
                self._void(stream)

    def stream_stats(self) -> list[StreamStats]:
        """Without the lock, which is held for a whole request's events: who asks is the event loop."""
        streams = list(self._streams.values())
        return [
            StreamStats(
                holder=stream.holder,
                state="warm" if stream.complete else "cold",
                last_seq=stream.last_event_id,
                batches=stream.applied,
                events=stream.counters.events,
                gaps=stream.gaps,
                replays=0,
                malformed_frames=0,
                malformed_events=stream.counters.malformed_events,
                unknown_events=stream.counters.unknown_events,
                unresolved_blocks=stream.counters.unresolved_blocks,
                last_event_at_s=stream.last_event_at_s,
            )
            for stream in streams
        ]

    def _stream(self, holder: Holder) -> _PushStream:
        stream = self._streams.get(holder)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                raise MalformedEventError("backend_id", f"more than {MAX_STREAMS} publishers")
            stream = self._streams[holder] = _PushStream(holder)
        self._index.register(holder)
        return stream

    def _order(self, stream: _PushStream, event: CacheEvent, unplaced: int) -> Gap | None:
        """Void what is in doubt. A step back with a later time is a publisher that began anew."""
        expected = stream.last_event_id + 1
        if stream.last_event_id < 0:
            stream.complete = event.event_id <= 1
            return None
        if event.event_id < expected:
            if (
                event.timestamp is not None
                and stream.last_timestamp is not None
                and event.timestamp > stream.last_timestamp
            ):
                self._void(stream)
                stream.last_event_id = -1
                stream.complete = event.event_id <= 1
            return None
        if event.event_id - expected <= unplaced:
            return None
        stream.gaps += 1
        stream.complete = False
        self._void(stream)
        return Gap(stream.holder, expected, event.event_id)

    def _void(self, stream: _PushStream) -> None:
        for tier in stream.tiers:
            self._index.clear(stream.holder, tier)

    def _change(self, stream: _PushStream, event: CacheEvent) -> None:
        if event.kind == "cleared":
            for tier in stream.tiers if event.tier is None else stream.tiers & {event.tier}:
                self._index.clear(stream.holder, tier)
            return
        if event.model is None:
            raise MalformedEventError("model_name", "is missing")
        domain = self._domain(event.model, event.tenant)
        names = np.array(event.names, np.uint64) ^ domain
        tier = Tier.DEVICE if event.tier is None else event.tier
        if event.kind == "removed":
            stream.counters.unresolved_blocks += self._index.remove_linked(stream.holder, tier, names)
            return
        if event.block_size is None:
            raise MalformedEventError("block_size", "is missing")
        namespace = Namespace(event.model, event.block_size, event.lora, event.tenant)
        parent = 0
        if event.parent is not None:
            resolved = self._index.resolve(event.parent ^ int(domain), namespace)
            if resolved is None and event.token_ids is not None:
                stream.counters.unresolved_blocks += len(names)
                return
            parent = event.parent if resolved is None else resolved
        hashes = _sequence_hashes(event, parent)
        stream.tiers.add(tier)
        self._index.store_linked(stream.holder, tier, namespace, hashes, names, parent=parent)

    def _domain(self, model: str, tenant: str) -> np.uint64:
        """Separates the names of different models in the index."""
        domain = self._domains.get((model, tenant))
        if domain is None:
            domain = np.uint64(canonical_hash(["pushed hashes", model, tenant]))
            self._domains[model, tenant] = domain
        return domain


def _sequence_hashes(event: CacheEvent, parent: int) -> Hashes:
    if event.token_ids is None:
        return np.array(event.names, np.uint64)
    if event.parent is None and event.base_block_idx:
        raise MalformedEventError("parent_hash", f"is missing below block {event.base_block_idx}")
    assert event.block_size is not None
    if len(event.token_ids) != len(event.names) * event.block_size:
        raise MalformedEventError(
            "token_ids",
            f"{len(event.token_ids)} tokens are not {len(event.names)} blocks of {event.block_size}",
        )
    folds = _NO_FOLDS
    if event.salt and event.parent is None:
        folds = np.array([fold_extra_keys([event.salt])], np.uint64)
    return chain_hashes(np.array(event.token_ids, np.uint32), event.block_size, parent=parent, folds=folds)
