"""Which chunks LMCache servers hold, told by their event streams. No I/O; time is an argument.

A chunk is resident once all its shards are. Chunks stand in the same index as blocks, in namespaces of their
own, under LMCache's own hashes: a prompt is matched by computing those. Memory of a server (L1) is gone with
its process; what it wrote to disk or to a shared store (L2) stays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_index.hashing import Namespace, Tokens
from cache_index.lmcache_keys import CHUNK_TOKENS, KvRank, chunk_keys
from cache_index.radix import CacheIndex
from cache_index.replay import StreamState
from cache_index.residency import Holder, Tier
from cache_index.zmq_source import StreamStats

HEARTBEAT_TIMEOUT_S = 30.0  # LMCache servers send one every 5 s
MAX_SERVERS = 4096
MAX_NAMESPACES = 4096  # kept at hand, not a limit
_NETWORK_BACKENDS = ("s3", "valkey", "redis", "mooncake", "hf3fs", "infinistore", "p2p")

EventType = Literal["store", "delete", "access", "config"]
Outcome = Literal["applied", "duplicate", "stale"]


@dataclass(frozen=True, slots=True)
class ChunkObject:
    """One shard of one chunk."""

    key: int  # lmcache_keys.index_key of the chunk's hash
    model: str
    kv_rank: int
    group: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ObjectBatch:
    """A change of one kind to objects in one backend of one server."""

    instance_id: str
    incarnation: int
    sequence: int
    kind: EventType
    tier: Literal["l1", "l2"]
    backend: str
    shared: bool
    objects: tuple[ChunkObject, ...] = ()


@dataclass(frozen=True, slots=True)
class LMCacheServer:
    """A registered server."""

    instance_id: str
    ip: str
    http_port: int
    registered_at_s: float
    metadata: dict[str, str] = field(default_factory=dict)
    p2p_advertised_url: str = ""
    mq_port: int = 0


@dataclass(slots=True)
class _Stream:
    """Where a server's event stream stands."""

    incarnation: int
    sequence: int = 0
    complete: bool = True
    batches: int = 0
    events: int = 0
    gaps: int = 0
    unkeyed: int = 0  # objects of other groups, which prompts are not looked up by
    last_event_at_s: float | None = None


class _Shards(NamedTuple):
    """Shards of a chunk as bits: those that are present, and those that make it whole."""

    present: int
    needed: int

    @property
    def whole(self) -> bool:
        return self.present & self.needed == self.needed


@dataclass(slots=True)
class _Store:
    """One backend of a server, or one shared by all: shards present, by chunk."""

    holder: Holder
    tier: Tier
    shards: dict[tuple[Namespace, int], _Shards] = field(default_factory=dict)


class LMCacheDirectory:
    """Servers, their streams, and the chunks they hold. Thread-safe.

    A server's holder is ``Holder(instance_id)``, a shared store's ``Holder("lmcache:" + backend)``.
    """

    def __init__(self, index: CacheIndex, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._index = index
        self._chunk_tokens = chunk_tokens
        self._servers: dict[str, LMCacheServer] = {}
        self._seen_at_s: dict[str, float] = {}
        self._streams: dict[str, _Stream] = {}
        self._namespaces: dict[tuple[str, str, int], Namespace] = {}
        self._lock = threading.Lock()
        self._stores: dict[tuple[str, str, str], _Store] = {}  # instance ("" when shared), tier, backend

    def servers(self) -> list[LMCacheServer]:
        with self._lock:
            return list(self._servers.values())

    def register(self, server: LMCacheServer, now_s: float) -> bool:
        """Whether the server was known. ValueError when there are too many."""
        with self._lock:
            known = server.instance_id in self._servers
            self._see(server.instance_id, now_s)
            self._servers[server.instance_id] = server
            self._index.register(Holder(server.instance_id))
            return known

    def heartbeat(self, instance_id: str, now_s: float) -> bool:
        """False for an unknown server, which has to register again."""
        with self._lock:
            if instance_id not in self._servers:
                return False
            self._see(instance_id, now_s)
            return True

    def deregister(self, instance_id: str) -> None:
        """The server is gone, and its memory with it."""
        with self._lock:
            self._deregister(instance_id)

    def expire(self, now_s: float, *, timeout_s: float = HEARTBEAT_TIMEOUT_S) -> list[str]:
        """Deregister servers that have been silent; their ids."""
        with self._lock:
            silent = [each for each, seen_s in self._seen_at_s.items() if seen_s + timeout_s <= now_s]
            for instance_id in silent:
                self._deregister(instance_id)
            return silent

    def apply(self, batch: ObjectBatch, now_s: float) -> Outcome:
        """Apply one batch; batches of a server come in order.

        A missing one voids what the server holds by itself; what it told of shared stores is kept, for these
        others tell of too. Events of servers that are not registered are taken as well: a server's two ways
        to us are independent. ValueError when there are too many servers.
        """
        with self._lock:
            return self._apply(batch, now_s)

    def _apply(self, batch: ObjectBatch, now_s: float) -> Outcome:
        stream = self._streams.get(batch.instance_id)
        if stream is not None and batch.incarnation < stream.incarnation:
            return "stale"
        if (
            stream is not None
            and batch.incarnation == stream.incarnation
            and batch.sequence <= stream.sequence
        ):
            return "duplicate"
        if stream is None or batch.incarnation > stream.incarnation:
            if stream is not None:
                self._void(batch.instance_id, "l1")
            self._see(batch.instance_id, now_s)
            stream = self._streams[batch.instance_id] = _Stream(batch.incarnation)
        if batch.sequence > stream.sequence + 1:
            stream.gaps += 1
            stream.complete = False
            self._void(batch.instance_id, None)
        stream.sequence = batch.sequence
        stream.batches += 1
        stream.events += len(batch.objects)
        stream.last_event_at_s = now_s
        self._seen_at_s[batch.instance_id] = now_s
        if batch.kind in ("store", "delete"):
            self._change(stream, batch)
        return "applied"

    def match(self, model: str, tokens: Tokens, *, world: int = 1, salt: str = "") -> NDArray[np.int32]:
        """How much of a prompt each holder has, in tokens: ``[holder_id, tier]`` as CacheIndex.match.

        ``world`` is the number of shards of the engine that asks (tensor times pipeline parallelism).
        """
        namespace = Namespace(model, self._chunk_tokens, tenant=f"lmcache:{world}:{salt}")
        keys = chunk_keys(tokens, self._chunk_tokens)
        return self._index.match(namespace, keys) * np.int32(self._chunk_tokens)

    def stream_stats(self) -> list[StreamStats]:
        with self._lock:
            return [self._stats(instance_id, stream) for instance_id, stream in self._streams.items()]

    def _stats(self, instance_id: str, stream: _Stream) -> StreamStats:
        state: StreamState = "warm" if stream.complete else "cold"
        return StreamStats(
            holder=Holder(instance_id),
            state=state if instance_id in self._servers else "connecting",
            last_seq=stream.sequence,
            batches=stream.batches,
            events=stream.events,
            gaps=stream.gaps,
            replays=0,
            malformed_frames=0,
            malformed_events=0,
            unknown_events=0,
            unresolved_blocks=stream.unkeyed,
            last_event_at_s=stream.last_event_at_s,
        )

    def _see(self, instance_id: str, now_s: float) -> None:
        if instance_id not in self._seen_at_s and len(self._seen_at_s) >= MAX_SERVERS:
            raise ValueError(f"more than {MAX_SERVERS} servers")
        self._seen_at_s[instance_id] = now_s

    def _deregister(self, instance_id: str) -> None:
        self._servers.pop(instance_id, None)
        self._seen_at_s.pop(instance_id, None)
        self._streams.pop(instance_id, None)
        self._void(instance_id, "l1")

    def _change(self, stream: _Stream, batch: ObjectBatch) -> None:
        store = self._store(batch)
        for each in batch.objects:
            if each.group:  # a prompt's chunks are looked up in group 0
                stream.unkeyed += 1
                continue
            self._change_object(store, each, batch.kind == "store")

    def _change_object(self, store: _Store, each: ChunkObject, stored: bool) -> None:
        shard = KvRank.unpack(each.kv_rank)
        namespace = self._namespace(each.model, each.salt, shard.world)
        chunk = (namespace, each.key)
        needed = (1 << max(shard.local_world, 1)) - 1
        before = store.shards.get(chunk, _Shards(0, needed))
        bit = 1 << shard.local_rank
        after = before._replace(present=before.present | bit if stored else before.present & ~bit)
        if after.present:
            store.shards[chunk] = after
        else:
            store.shards.pop(chunk, None)
        key = np.array([each.key], np.uint64)
        if after.whole and not before.whole:
            self._index.store(store.holder, store.tier, namespace, key)
        elif before.whole and not after.whole:
            self._index.remove(store.holder, store.tier, namespace, key)

    def _store(self, batch: ObjectBatch) -> _Store:
        owner = "" if batch.shared else batch.instance_id
        place = (owner, batch.tier, batch.backend)
        store = self._stores.get(place)
        if store is None:
            holder = Holder(f"lmcache:{batch.backend}" if batch.shared else batch.instance_id)
            store = self._stores[place] = _Store(holder, _tier(batch))
        self._index.register(store.holder)
        return store

    def _void(self, instance_id: str, tier: Literal["l1", "l2"] | None) -> None:
        """Drop what a server itself holds, in one tier or both."""
        for place, store in list(self._stores.items()):
            if place[0] != instance_id or tier not in (None, place[1]):
                continue
            self._remove_whole(store)
            del self._stores[place]

    def _remove_whole(self, store: _Store) -> None:
        """Other backends of the holder may share the tier, so chunks go one namespace at a time."""
        by_namespace: dict[Namespace, list[int]] = {}
        for (namespace, key), shards in store.shards.items():
            if shards.whole:
                by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            self._index.remove(store.holder, store.tier, namespace, np.array(keys, np.uint64))

    def _namespace(self, model: str, salt: str, world: int) -> Namespace:
        """Engines of another parallelism cannot use each other's shards."""
        known = self._namespaces.get((model, salt, world))
        if known is None:
            if len(self._namespaces) >= MAX_NAMESPACES:
                self._namespaces.clear()
            known = Namespace(model, self._chunk_tokens, tenant=f"lmcache:{world}:{salt}")
            self._namespaces[model, salt, world] = known
        return known


def _tier(batch: ObjectBatch) -> Tier:
    if batch.tier == "l1":
        return Tier.POD if batch.shared else Tier.HOST
    if batch.shared or batch.backend.lower().startswith(_NETWORK_BACKENDS):
        return Tier.REMOTE
    return Tier.DISK
