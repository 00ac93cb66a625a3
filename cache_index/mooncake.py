"""Following the KV events of Mooncake masters. They cannot be replayed: a gap voids the pool's hints.

Where the master's admin port is known, a listing of its keys brings them back, and takes away now and then
what no event told of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import structlog

from cache_index.events import MalformedEventError
from cache_index.hashing import Hashes, Namespace
from cache_index.mooncake_events import decode_master_batch
from cache_index.mooncake_hints import HintCounters, Listing, MooncakeHints
from cache_index.mooncake_listing import AT_LEAST_S, MasterListings
from cache_index.radix import CacheIndex
from cache_index.replay import StreamState
from cache_index.residency import Holder, UnknownHolderError
from cache_index.streams import StreamConfig, StreamStats
from cache_index.subscriber import Feed, Subscriber

log = structlog.get_logger(__name__)


DEFAULT_RECONCILE_S = 60.0


@dataclass(frozen=True, slots=True)
class MooncakeStream(StreamConfig):
    """A master's publisher, with its admin port (``http://host:port``) that is listed every so often."""

    admin_endpoint: str | None = None
    reconcile_s: float = DEFAULT_RECONCILE_S

    @classmethod
    def of(cls, config: StreamConfig, admin_endpoint: str | None, reconcile_s: float) -> MooncakeStream:
        given = {each.name: getattr(config, each.name) for each in fields(StreamConfig)}
        return cls(**given, admin_endpoint=admin_endpoint, reconcile_s=reconcile_s)


class _Pool:
    """One master's stream. Its methods are called with the source's lock held."""

    def __init__(self, config: StreamConfig, index: CacheIndex, clock: Callable[[], float]) -> None:
        self.config = config
        self.hints = MooncakeHints(
            index, config.holder, config.model, config.block_size, tenant=config.tenant
        )
        self.admin_endpoint = config.admin_endpoint if isinstance(config, MooncakeStream) else None
        self.reconcile_s = config.reconcile_s if isinstance(config, MooncakeStream) else DEFAULT_RECONCILE_S
        self.listing_due_s = clock()
        self._clock = clock
        self._expected: int | None = None
        self._connected = False
        self._complete = False
        self._batches = 0
        self._gaps = 0
        self._malformed_frames = 0
        self._malformed_events = 0
        self._unknown_events = 0
        self._last_event_at_s: float | None = None

    def connection(self, connected: bool) -> None:
        if connected and not self._connected:
            self.listing_due_s = self._clock()
            if self._batches:
                self.forget()  # whatever happened meanwhile is not told again
        self._connected = connected

    def message(self, sequence: int, payload: bytes) -> None:
        self._last_event_at_s = self._clock()
        if self._expected is None:
            self._complete |= sequence <= 1  # masters count from 1
        elif sequence != self._expected:
            self._gaps += sequence > self._expected
            self.forget()
            self._complete = sequence <= 1
        self._expected = sequence + 1
        try:
            batch = decode_master_batch(payload)
        except MalformedEventError as error:
            self.malformed(str(error))
            self._doubt()
            return
        self._batches += 1
        self._malformed_events += len(batch.rejected)
        self._unknown_events += batch.unknown_events
        try:
            for event in batch.events:
                self.hints.apply(event)
        except UnknownHolderError:
            log.debug("mooncake_stream.holder_unregistered", holder=self.config.holder)

    def malformed(self, reason: str) -> None:
        self._malformed_frames += 1
        if self._malformed_frames == 1:
            log.warning("mooncake_stream.malformed", holder=self.config.holder, reason=reason[:200])

    def forget(self) -> None:
        self.hints.clear()
        self._doubt()
        self._expected = None

    def _doubt(self) -> None:
        """Something was missed; a listing will tell."""
        self._complete = False
        self.listing_due_s = min(self.listing_due_s, self._clock() + AT_LEAST_S)

    def listed(self, listing: Listing) -> None:
        """The hints are what the master has, if nothing was missed since it was asked."""
        if self.hints.is_current(listing) and self._connected:
            self._complete = True

    @property
    def state(self) -> StreamState:
        if not self._connected:
            return "connecting"
        return "warm" if self._complete else "cold"

    def stats(self) -> StreamStats:
        counters = self.hints.counters
        return StreamStats(
            holder=self.config.holder,
            state=self.state,
            last_seq=-1 if self._expected is None else self._expected - 1,
            batches=self._batches,
            events=counters.events,
            gaps=self._gaps,
            replays=0,
            malformed_frames=self._malformed_frames,
            malformed_events=self._malformed_events,
            unknown_events=self._unknown_events,
            unresolved_blocks=self.hints.unkeyed + counters.unresolved,
            last_event_at_s=self._last_event_at_s,
        )


class MooncakeEventSource:
    """An EventSource of shared pools: a stream's holder is the pool, its endpoint the master's publisher."""

    def __init__(self, index: CacheIndex, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._lock = threading.RLock()
        self._pools: dict[Holder, _Pool] = {}
        self._subscriber = Subscriber("mooncake-events")
        self._listings = MasterListings(lambda: self._pools.values(), self._lock, clock)
        self._started = False

    def start(self) -> None:
        self._started = True
        self._subscriber.start()
        self._start_listings()

    def close(self) -> None:
        self._listings.close()
        self._subscriber.close()

    def add_stream(self, config: StreamConfig) -> None:
        """Follow a master; the pool's holder is registered. A stream of the same pool is replaced."""
        self.remove_stream(config.holder)
        self._index.register(config.holder)
        pool = _Pool(config, self._index, self._clock)
        with self._lock:
            self._pools[config.holder] = pool
        feed = Feed(
            config.endpoint,
            config.topic,
            on_message=lambda sequence, payload: self._locked(lambda: pool.message(sequence, payload)),
            on_malformed=lambda reason: self._locked(lambda: pool.malformed(reason)),
            on_connection=lambda connected: self._locked(lambda: pool.connection(connected)),
        )
        self._subscriber.follow(config.holder, feed)
        self._start_listings()

    def remove_stream(self, holder: Holder) -> None:
        self._subscriber.unfollow(holder)
        with self._lock:
            pool = self._pools.pop(holder, None)
            if pool is not None:
                pool.forget()

    def resync(self, holder: Holder) -> None:
        """Forget the pool's hints; the master repeats nothing."""
        with self._lock:
            pool = self._pools.get(holder)
            if pool is not None:
                pool.forget()

    def names_of(self, holder: Holder, namespace: Namespace, hashes: Hashes) -> list[int | None]:
        """The objects of a pool that hold these blocks, as far as its events and listings told."""
        with self._lock:
            pool = self._pools.get(holder)
            return [None] * len(hashes) if pool is None else pool.hints.names_of(namespace, hashes)

    def hint_counters(self, holder: Holder) -> HintCounters:
        with self._lock:
            return self._pools[holder].hints.counters

    def stream_stats(self) -> list[StreamStats]:
        with self._lock:
            return [pool.stats() for pool in self._pools.values()]

    def _start_listings(self) -> None:
        with self._lock:
            if self._started and any(pool.admin_endpoint for pool in self._pools.values()):
                self._listings.start()

    def _locked(self, action: Callable[[], None]) -> None:
        with self._lock:
            action()
