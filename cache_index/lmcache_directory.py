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
import structlog
from numpy.typing import NDArray

from cache_index.hashing import Namespace, Tokens
from cache_index.lmcache_keys import CHUNK_TOKENS, KvRank, chunk_keys
from cache_index.lmcache_match import match_chunks
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch
from cache_index.radix import CacheIndex
from cache_index.replay import StreamState
from cache_index.residency import Holder, Tier
from cache_index.streams import StreamStats

log = structlog.get_logger(__name__)

HEARTBEAT_TIMEOUT_S = 30.0  # LMCache servers send one every 5 s
DEPARTED_S = 3600.0  # how long the disk of a server that left is remembered
MAX_SERVERS = 4096
MAX_NAMESPACES = 4096  # kept at hand, not a limit
MAX_CHUNK_SIZES = 4  # a prompt is hashed once for each
_NETWORK_BACKENDS = ("s3", "valkey", "redis", "mooncake", "hf3fs", "infinistore", "p2p")

Outcome = Literal["applied", "duplicate", "stale"]


@dataclass(slots=True)
class _Stream:
    """Where a server's event stream stands."""

    incarnation: int
    sequence: int = 0
    complete: bool = True
    batches: int = 0
    events: int = 0
    gaps: int = 0
    unkeyed: int = 0  # objects that prompts are not looked up by: of other groups, or hashed in another way
    checked: bool = False  # its way of hashing was compared with ours
    last_event_at_s: float | None = None


class _Shards(NamedTuple):
    """Shards of a chunk as bits: those that are present, and those that make it whole."""

    present: int
    needed: int

    @property
    def whole(self) -> bool:
        return self.present & self.needed == self.needed


class ChunkSpace(NamedTuple):
    """What makes equal tokens unequal chunks: engines of another parallelism cannot use each other's shards."""

    model: str
    salt: str
    world: int


@dataclass(slots=True)
class _Store:
    """One backend of a server, or one shared by all: shards present, by chunk."""

    holder: Holder
    tier: Tier
    shards: dict[tuple[ChunkSpace, int], _Shards] = field(default_factory=dict)


_SERVER, _SHARED = "lmcache:", "lmcache-shared:"


def server_holder(instance_id: str) -> Holder:
    """The holder of what a server has by itself. Engines of the same name are other holders."""
    return Holder(_SERVER + instance_id)


def shared_holder(backend: str) -> Holder:
    """The holder of what lies in a store that several servers share."""
    return Holder(_SHARED + backend)


def is_lmcache(holder: Holder) -> bool:
    """Whether this is a server of LMCache or a store that its servers share, no engine."""
    return holder.instance_id.startswith((_SERVER, _SHARED))


class LMCacheDirectory:
    """Servers, their streams, and the chunks they hold. Thread-safe.

    What only reads takes a copy in one step of the interpreter instead of the lock, which is held for a tenth of a
    second while a batch of ten thousand objects is applied: placements must not wait for that.

    The fleet's chunk size is ``chunk_tokens``; other sizes are learned from servers that tell tokens.
    """

    def __init__(self, index: CacheIndex, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._index = index
        self._chunk_sizes: tuple[int, ...] = (chunk_tokens,)
        self._servers: dict[str, LMCacheServer] = {}
        self._seen_at_s: dict[str, float] = {}
        self._departed_at_s: dict[str, float] = {}
        self._streams: dict[str, _Stream] = {}
        self._namespaces: dict[ChunkSpace, Namespace] = {}
        self.chunks: dict[tuple[str, str], dict[int, int]] = {}  # whole chunks, by model and salt, by world
        self._stores: dict[tuple[str, str, str], _Store] = {}  # instance ("" when shared), tier, backend
        self._mounts: dict[str, frozenset[Holder]] = {}  # shared stores that a server told of
        self._lock = threading.Lock()
        self.version = 0  # grows when what `reach` answers may have changed

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Tokens of a chunk, for every kind of server known."""
        return self._chunk_sizes

    def servers(self) -> list[LMCacheServer]:
        return list(self._servers.values())

    def reach(self) -> list[tuple[LMCacheServer, tuple[Holder, ...]]]:
        """The registered servers, each with the holders that an engine loads from through it."""
        return [
            (server, (server_holder(name), *self._mounts.get(name, ())))
            for name, server in list(self._servers.items())
        ]

    def register(self, server: LMCacheServer, now_s: float) -> bool:
        """Whether the server was known. ValueError when there are too many."""
        with self._lock:
            known = server.instance_id in self._servers
            self._see(server.instance_id, now_s)
            self._servers[server.instance_id] = server
            self._index.register(server_holder(server.instance_id))
            self.version += 1
            return known

    def heartbeat(self, instance_id: str, now_s: float) -> bool:
        """False for an unknown server, which has to register again."""
        with self._lock:
            if instance_id not in self._servers:
                return False
            self._see(instance_id, now_s)
            return True

    def deregister(self, instance_id: str, now_s: float) -> None:
        """The server is gone, and its memory with it."""
        with self._lock:
            self._deregister(instance_id, now_s)

    def expire(self, now_s: float, *, timeout_s: float = HEARTBEAT_TIMEOUT_S) -> list[str]:
        """Deregister servers that have been silent; their ids. Forgets the disks of those that left long ago."""
        with self._lock:
            silent = [each for each, seen_s in self._seen_at_s.items() if seen_s + timeout_s <= now_s]
            for instance_id in silent:
                self._deregister(instance_id, now_s)
            for instance_id, departed_s in list(self._departed_at_s.items()):
                if departed_s + DEPARTED_S <= now_s:
                    self._void(instance_id, None)
                    self._forget_departed(instance_id)
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
        self._see(batch.instance_id, now_s)
        if stream is None or batch.incarnation > stream.incarnation:
            if stream is not None:
                self._void(batch.instance_id, "l1")
            stream = self._streams[batch.instance_id] = _Stream(batch.incarnation)
        if batch.sequence > stream.sequence + 1:
            stream.gaps += 1
            stream.complete = False
            self._void(batch.instance_id, None)
        stream.sequence = batch.sequence
        stream.batches += 1
        stream.events += len(batch.objects)
        stream.last_event_at_s = now_s
        if batch.kind in ("store", "delete"):
            self._change(stream, batch)
        return "applied"

    def match(
        self, model: str, tokens: Tokens, *, world: int | None = None, salt: str = ""
    ) -> NDArray[np.int32] | None:
        """How much of a prompt each holder has, in tokens: ``[holder_id, tier]`` as CacheIndex.match.

        None when nothing of the model is held, which costs one look-up. ``world`` is the number of shards of
        the engine that asks (tensor times pipeline parallelism); None: of whatever engines stored.
        """
        worlds = list(self.chunks.get((model, salt), ()))
        if not worlds or (world is not None and world not in worlds):
            return None
        spaces = [ChunkSpace(model, salt, each) for each in (worlds if world is None else (world,))]
        namespaces = [self._namespace(space) for space in spaces]
        return match_chunks(self._index, namespaces, tokens, self._chunk_sizes)

    def worlds(self, model: str, salt: str = "") -> list[int]:
        """Of how many shards the chunks are that are held of a model, most first."""
        held = dict(self.chunks.get((model, salt), {}))
        return sorted(held, key=lambda world: -held[world])

    def stream_stats(self) -> list[StreamStats]:
        return [self._stats(instance_id, stream) for instance_id, stream in list(self._streams.items())]

    def _stats(self, instance_id: str, stream: _Stream) -> StreamStats:
        state: StreamState = "warm" if stream.complete else "cold"
        return StreamStats(
            holder=server_holder(instance_id),
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
        self._departed_at_s.pop(instance_id, None)

    def _deregister(self, instance_id: str, now_s: float) -> None:
        known = self._seen_at_s.pop(instance_id, None) is not None
        self._servers.pop(instance_id, None)
        self._streams.pop(instance_id, None)
        self._mounts.pop(instance_id, None)
        self._void(instance_id, "l1")
        self.version += 1
        if any(place[0] == instance_id for place in self._stores):
            self._departed_at_s.setdefault(instance_id, now_s)
        elif known:
            self._forget_departed(instance_id)

    def _forget_departed(self, instance_id: str) -> None:
        self._departed_at_s.pop(instance_id, None)
        self._index.unregister(server_holder(instance_id))

    def _change(self, stream: _Stream, batch: ObjectBatch) -> None:
        store = self._store(batch)
        for each in batch.objects:
            if each.first_tokens and not stream.checked:
                self._compare_hashing(stream, batch.instance_id, each)
            if each.group:  # a prompt's chunks are looked up in group 0
                stream.unkeyed += 1
                continue
            self._change_object(store, each, batch.kind == "store")

    def _compare_hashing(self, stream: _Stream, instance_id: str, each: ChunkObject) -> None:
        """Once a stream: learn the size of a server's chunks, and whether it hashes them as we do."""
        stream.checked = True
        size = len(each.first_tokens)
        if int(chunk_keys(np.array(each.first_tokens, np.uint32), size)[0]) != each.key:
            stream.unkeyed += 1
            log.warning(
                "lmcache.foreign_hashes",
                server=instance_id,
                remedy="its chunks cannot be found; start LMCache with blake3 hashes and PYTHONHASHSEED=0",
            )
        elif size not in self._chunk_sizes and len(self._chunk_sizes) < MAX_CHUNK_SIZES:
            self._chunk_sizes = (*self._chunk_sizes, size)

    def _change_object(self, store: _Store, each: ChunkObject, stored: bool) -> None:
        shard = KvRank.unpack(each.kv_rank)
        space = ChunkSpace(each.model, each.salt, shard.world)
        chunk = (space, each.key)
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
            self._index.store(store.holder, store.tier, self._namespace(space), key)
            self._count(space, 1)
        elif before.whole and not after.whole:
            self._index.remove(store.holder, store.tier, self._namespace(space), key)
            self._count(space, -1)

    def _count(self, space: ChunkSpace, chunks: int) -> None:
        worlds = self.chunks.setdefault((space.model, space.salt), {})
        worlds[space.world] = worlds.get(space.world, 0) + chunks
        if not worlds[space.world]:
            del worlds[space.world]
            if not worlds:
                del self.chunks[space.model, space.salt]

    def _store(self, batch: ObjectBatch) -> _Store:
        owner = "" if batch.shared else batch.instance_id
        place = (owner, batch.tier, batch.backend)
        store = self._stores.get(place)
        if store is None:
            holder = shared_holder(batch.backend) if batch.shared else server_holder(batch.instance_id)
            store = self._stores[place] = _Store(holder, _tier(batch))
        self._index.register(store.holder)
        if batch.shared and store.holder not in self._mounts.get(batch.instance_id, ()):
            self._mounts[batch.instance_id] = self._mounts.get(batch.instance_id, frozenset()) | {
                store.holder
            }
            self.version += 1
        return store

    def _void(self, instance_id: str, tier: Literal["l1", "l2"] | None) -> None:
        """Drop what a server itself holds, in one tier or both."""
        for place, store in list(self._stores.items()):
            if place[0] != instance_id or tier not in (None, place[1]):
                continue
            self._remove_whole(store)
            del self._stores[place]

    def _remove_whole(self, store: _Store) -> None:
        """Other backends of the holder may share the tier, so chunks go one space at a time."""
        by_space: dict[ChunkSpace, list[int]] = {}
        for (space, key), shards in store.shards.items():
            if shards.whole:
                by_space.setdefault(space, []).append(key)
        for space, keys in by_space.items():
            self._index.remove(store.holder, store.tier, self._namespace(space), np.array(keys, np.uint64))
            self._count(space, -len(keys))

    def _namespace(self, space: ChunkSpace) -> Namespace:
        """Chunks of all sizes share one: chains of different sizes have different hashes."""
        known = self._namespaces.get(space)
        if known is None:
            if len(self._namespaces) >= MAX_NAMESPACES:
                self._namespaces.clear()
            known = Namespace(space.model, CHUNK_TOKENS, tenant=f"lmcache:{space.world}:{space.salt}")
            self._namespaces[space] = known
        return known


def _tier(batch: ObjectBatch) -> Tier:
    if batch.tier == "l1":
        return Tier.POD if batch.shared else Tier.HOST
    if batch.shared or batch.backend.lower().startswith(_NETWORK_BACKENDS):
        return Tier.REMOTE
    return Tier.DISK
