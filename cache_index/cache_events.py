"""Cache events in the envelope of RFC #1527, which stores and connectors publish whatever the transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache_index.residency import Tier

EventKind = Literal["stored", "removed", "cleared"]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What happened to blocks of one holder. Names are the publisher's hashes as u64.

    Publishers leave out what they do not know; without ``token_ids`` only somebody who knows the
    publisher's hashing can tell which prefix a block is.
    """

    event_id: int
    kind: EventKind
    backend_id: str
    rank: int = 0
    tenant: str = "default"
    model: str | None = None
    block_size: int | None = None
    lora: str | None = None
    salt: str | None = None
    tier: Tier | None = None
    timestamp: float | None = None
    names: tuple[int, ...] = ()
    parent: int | None = None
    base_block_idx: int | None = None
    token_ids: tuple[int, ...] | None = None
