"""Decoding the KV events of a Mooncake master: msgpack ``[ms, [event maps], rank]``, RFC #1527 envelopes.

As recorded from a master with events enabled, most of an envelope is nil: no model, no block size, no
tokens, no parent, and nothing says which node holds the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache_index.cache_events import CacheEvent, EventKind
from cache_index.event_batch import Batch, MalformedEventError, read_batch
from cache_index.residency import Tier

_MASK_64 = (1 << 64) - 1
_KINDS: dict[object, EventKind] = {"stored": "stored", "removed": "removed", "cleared": "cleared"}


def decode_master_batch(payload: bytes) -> Batch[CacheEvent]:
    """Raises MalformedEventError when the payload is no batch at all; bad events are set aside."""
    return read_batch(payload, _event, ticks_per_s=1000)


def _event(item: object) -> CacheEvent | None:
    if not isinstance(item, dict):
        raise MalformedEventError("event", f"expected a map, got {type(item).__name__}")
    kind = _KINDS.get(item.get("event_type"))
    if kind is None:
        return None
    tokens = item.get("token_ids")
    medium = item.get("medium")
    try:
        tier = None if medium is None else Tier.parse(str(medium))
    except ValueError as error:
        raise MalformedEventError("medium", str(error)) from error
    parent = item.get("parent_hash")
    return CacheEvent(
        event_id=_typed(item, "event_id", int),
        kind=kind,
        backend_id=_typed(item, "backend_id", str),
        rank=_optional(item, "dp_rank", int) or 0,
        tenant=_optional(item, "tenant_id", str) or "default",
        model=_optional(item, "model_name", str),
        block_size=_optional(item, "block_size", int),
        lora=_optional(item, "lora_name", str),
        salt=_optional(item, "additional_salt", str),
        tier=tier,
        names=() if kind == "cleared" else _hashes(item.get("seq_hashes"), "seq_hashes"),
        parent=None if parent is None else _hashes([parent], "parent_hash")[0],
        base_block_idx=_optional(item, "base_block_idx", int),
        token_ids=None if tokens is None else _token_ids(tokens),
    )


def _typed(item: dict[str, Any], field: str, kind: type) -> Any:
    value = item.get(field)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedEventError(field, f"expected {kind.__name__}, got {value!r:.40}")
    return value


def _optional(item: dict[str, Any], field: str, kind: type) -> Any:
    return None if item.get(field) is None else _typed(item, field, kind)


def _hashes(values: object, field: str) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or not all(isinstance(value, int) for value in values):
        raise MalformedEventError(field, f"expected integers, got {values!r:.40}")
    return tuple(value & _MASK_64 for value in values)


def _token_ids(values: object) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or not all(
        isinstance(value, int) and 0 <= value < 1 << 32 for value in values
    ):
        raise MalformedEventError("token_ids", f"expected 32-bit token ids, got {values!r:.40}")
    return tuple(values)
