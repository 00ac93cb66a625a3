"""What LMCache servers tell: themselves, and changes to the objects that they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EventType = Literal["store", "delete", "access", "config"]


@dataclass(frozen=True, slots=True)
class ChunkObject:
    """One shard of one chunk. ``first_tokens`` are the tokens of a prompt's first chunk, where they are told."""

    key: int  # lmcache_keys.index_key of the chunk's hash
    model: str
    kv_rank: int
    group: int = 0
    salt: str = ""
    first_tokens: tuple[int, ...] = ()


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
