"""TensorRT-LLM's KV cache events, as its server answers them to ``/kv_cache_events``.

A list of ``{"event_id", "data": {"type": ...}, "window_size", "attention_dp_rank"?}``. ``stored`` names
blocks of one chain with their tokens and cache level, ``removed`` names blocks, ``updated`` tells that a
block changed its level, ``created`` is sent once per attention window when the cache is set up. Event ids
count from 0 in every rank. Source: the event serializer of TensorRT-LLM 1.x and its issue threads.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_index.events import MalformedEventError
from cache_index.residency import Tier

_MASK_64 = (1 << 64) - 1
_TIERS = {0: Tier.DEVICE, 1: Tier.HOST, 2: Tier.DISK}  # by cache level


@dataclass(frozen=True, slots=True)
class TrtBlock:
    """One block; it may be partial. ``keys`` are what makes equal tokens unequal blocks."""

    name: int
    token_ids: NDArray[np.uint32]
    tier: Tier
    lora: str | None
    salt: str | None
    keys: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class TrtStored:
    parent: int | None
    blocks: tuple[TrtBlock, ...]


@dataclass(frozen=True, slots=True)
class TrtRemoved:
    names: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrtMoved:
    name: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class TrtCreated: ...


@dataclass(frozen=True, slots=True)
class TrtCleared: ...


@dataclass(frozen=True, slots=True)
class TrtUnchanged:
    """An event that changes no residency: a new priority."""


TrtData = TrtStored | TrtRemoved | TrtMoved | TrtCreated | TrtCleared | TrtUnchanged


@dataclass(frozen=True, slots=True)
class TrtEvent:
    """``data`` is None for an unknown type, or the error when it could not be read."""

    event_id: int
    rank: int
    window: int | None
    data: TrtData | MalformedEventError | None


def decode_event(item: object) -> TrtEvent:
    """Raises MalformedEventError when not even the place in the stream can be told."""
    if not isinstance(item, dict):
        raise MalformedEventError("event", f"expected an object, got {type(item).__name__}")
    event_id = item.get("event_id")
    if not isinstance(event_id, int) or isinstance(event_id, bool) or event_id < 0:
        raise MalformedEventError("event_id", f"expected a number from 0 on, got {event_id!r:.40}")
    rank = item.get("attention_dp_rank")
    if rank is not None and (not isinstance(rank, int) or rank < 0):
        raise MalformedEventError("attention_dp_rank", f"expected a rank, got {rank!r:.40}")
    window = item.get("window_size")
    try:
        data: TrtData | MalformedEventError | None = _data(item.get("data"))
    except MalformedEventError as error:
        data = error
    return TrtEvent(event_id, rank or 0, window if isinstance(window, int) else None, data)


def _data(data: object) -> TrtData | None:
    if not isinstance(data, dict):
        raise MalformedEventError("data", f"expected an object, got {type(data).__name__}")
    kind = data.get("type")
    if kind == "stored":
        blocks = data.get("blocks")
        if not isinstance(blocks, list):
            raise MalformedEventError("data.blocks", f"expected an array, got {type(blocks).__name__}")
        parent = data.get("parent_hash")
        name = None if parent is None else _name(parent, "data.parent_hash")
        return TrtStored(name, tuple(_block(block) for block in blocks))
    if kind == "removed":
        names = data.get("block_hashes")
        if not isinstance(names, list):
            raise MalformedEventError("data.block_hashes", f"expected an array, got {type(names).__name__}")
        return TrtRemoved(tuple(_name(each, "data.block_hashes") for each in names))
    if kind == "updated":
        level = data.get("cache_level")
        if level is None:
            return TrtUnchanged()
        new = level.get("new_value") if isinstance(level, dict) else None
        return TrtMoved(
            _name(data.get("block_hash"), "data.block_hash"), _tier(new, "data.cache_level.new_value")
        )
    if kind == "created":
        return TrtCreated()
    if kind in ("cleared", "all_cleared"):
        return TrtCleared()
    return None


def _block(block: object) -> TrtBlock:
    if not isinstance(block, dict):
        raise MalformedEventError("data.blocks", f"expected objects, got {type(block).__name__}")
    tokens = block.get("tokens")
    if not isinstance(tokens, list):
        raise MalformedEventError("data.blocks.tokens", f"expected an array, got {type(tokens).__name__}")
    try:
        token_ids = np.frombuffer(array("I", [token["token_id"] for token in tokens]), np.uint32)
        extra_ids = [token.get("token_extra_id") or 0 for token in tokens]
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise MalformedEventError("data.blocks.tokens", f"expected token objects: {error!r}") from error
    keys: list[object] = []
    if any(extra_ids):
        keys.append(["token_extra_id", *extra_ids])
    if block.get("mm_keys"):
        keys.append(["mm_keys", block["mm_keys"]])
    lora, salt = block.get("lora_id"), block.get("cache_salt")
    return TrtBlock(
        name=_name(block.get("block_hash"), "data.blocks.block_hash"),
        token_ids=token_ids,
        tier=_tier(block.get("cache_level", 0), "data.blocks.cache_level"),
        lora=None if lora is None else f"id:{lora}",
        salt=None if salt is None else str(salt),
        keys=tuple(keys),
    )


def _name(value: object, field: str) -> int:
    """Numbers modulo 2**64; of a hexadecimal digest the last eight bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value & _MASK_64
    if isinstance(value, str):
        try:
            return int(value, 16) & _MASK_64
        except ValueError:
            pass
    raise MalformedEventError(field, f"expected a hash, got {value!r:.40}")


def _tier(level: object, field: str) -> Tier:
    tier = _TIERS.get(level) if isinstance(level, int) else None
    if tier is None:
        raise MalformedEventError(field, f"expected a cache level, got {level!r:.40}")
    return tier
