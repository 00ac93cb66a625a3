"""KV events in one normal form, and the decoder of vLLM's wire format (SGLang's is the same).

A payload is msgpack ``[timestamp, events, data_parallel_rank]``. An event is a map with a ``type`` key
(current engines) or an array that begins with its type (older ones, fields in the order of the maps).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_index.cache_groups import PARTIAL_KINDS
from cache_index.event_batch import Batch, read_batch
from cache_index.event_batch import MalformedEventError as MalformedEventError
from cache_index.residency import Tier

_MASK_64 = (1 << 64) - 1
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_CLEARED_FIELDS = ("medium",)


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one chain are now in a tier. Engine hashes are the engine's own, as u64."""

    engine_hashes: NDArray[np.uint64]
    parent_engine_hash: int | None
    token_ids: NDArray[np.uint32]
    block_size: int
    tier: Tier = Tier.DEVICE
    lora: str | None = None
    extra_keys: tuple[tuple[object, ...], ...] | None = None  # per block, without the LoRA name
    group: int | None = None  # KV cache group of a hybrid model, and the kind of its layers
    kind: str | None = None
    names_extra_keys: bool = False  # the event has extra keys of its own; a salt beside them is none

    @property
    def bare(self) -> bool:
        """Whether the blocks may have extra keys that the event leaves out: see ``extra_keys``."""
        return self.extra_keys is None and self.tier is not Tier.DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One physical copy of each block has left a tier."""

    engine_hashes: NDArray[np.uint64]
    tier: Tier = Tier.DEVICE
    group: int | None = None
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Everything is gone, from one tier or from all."""

    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class PartialGroupChanged:
    """Something was stored in a KV cache group that does not hold whole prefixes, nobody can say what."""

    group: int | None


Event = BlocksStored | BlocksRemoved | BlocksCleared | PartialGroupChanged


EventBatch = Batch[Event]


def decode_batch(payload: bytes) -> EventBatch:
    """Read one payload. MalformedEventError if it is no batch at all; bad events are set aside."""
    return read_batch(payload, _event)


def _event(item: object) -> Event | None:
    """The event, None when its type is not known here."""
    if isinstance(item, dict):
        kind, fields = item.get("type"), item
    elif isinstance(item, list) and item:
        kind = item[0]
        names = _POSITIONS.get(kind, ()) if isinstance(kind, str) else ()
        fields = dict(zip(names, item[1:], strict=False))
    else:
        raise MalformedEventError("event", f"expected a map or an array, got {type(item).__name__}")
    if not isinstance(kind, str):
        raise MalformedEventError("type", f"expected a text, got {type(kind).__name__}")
    if kind in ("BlockRemoved", "BlockStored"):
        group, group_kind = _group(fields)
        if kind == "BlockStored":
            return _stored_in(fields, group, group_kind)
        return BlocksRemoved(_hashes(fields), _tier(fields) or Tier.DEVICE, group, group_kind)
    if kind == "AllBlocksCleared":
        return BlocksCleared(_tier(fields))
    return None


_POSITIONS = {
    "BlockStored": _STORED_FIELDS,
    "BlockRemoved": _REMOVED_FIELDS,
    "AllBlocksCleared": _CLEARED_FIELDS,
}


def _group(fields: dict[str, object]) -> tuple[int | None, str | None]:
    """KV cache group and the kind of its layers."""
    group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
    if group is not None and (type(group) is not int or not 0 <= group < 1 << 32):
        raise MalformedEventError("group_idx", f"expected a number from 0 on, got {group!r:.40}")
    if kind is not None and not isinstance(kind, str):
        raise MalformedEventError("kv_cache_spec_kind", f"expected a text, got {type(kind).__name__}")
    return group, kind


def _stored_in(fields: dict[str, object], group: int | None, kind: str | None) -> Event:
    if kind not in PARTIAL_KINDS:
        return _stored(fields, group, kind)
    try:
        return _stored(fields, group, kind)
    except MalformedEventError:  # such groups may have fewer hashes than tokens: that is no fault
        return PartialGroupChanged(group)


def _stored(fields: dict[str, object], group: int | None, kind: str | None) -> BlocksStored:
    hashes = _hashes(fields)
    block_size = fields.get("block_size")
    if not isinstance(block_size, int) or not 0 < block_size < 1 << 63:
        raise MalformedEventError("block_size", f"expected a positive integer, got {block_size!r}")
    tokens = fields.get("token_ids")
    if not isinstance(tokens, list):
        raise MalformedEventError("token_ids", f"expected an array, got {type(tokens).__name__}")
    if len(tokens) != len(hashes) * block_size:
        raise MalformedEventError(
            "block_size", f"{len(tokens)} tokens are not {len(hashes)} blocks of {block_size}"
        )
    try:
        token_ids = np.frombuffer(array("I", tokens), np.uint32)
    except (TypeError, OverflowError) as error:
        raise MalformedEventError("token_ids", str(error)) from error
    parent = fields.get("parent_block_hash")
    lora_id, lora_name = fields.get("lora_id"), fields.get("lora_name")
    extra_keys = _extra_keys(fields.get("extra_keys"), len(hashes), (lora_name, lora_id))
    if lora_name is not None and not isinstance(lora_name, str):
        raise MalformedEventError("lora_name", f"expected a text, got {type(lora_name).__name__}")
    return BlocksStored(
        engine_hashes=hashes,
        parent_engine_hash=None if parent is None else _hash(parent, "parent_block_hash"),
        token_ids=token_ids,
        block_size=block_size,
        tier=_tier(fields) or Tier.DEVICE,
        # an adapter without a name still separates its blocks from those of the base model
        lora=lora_name if lora_name is not None or lora_id is None else f"id:{lora_id}",
        extra_keys=_salted(
            extra_keys,
            _salt(fields) if parent is None else "",
            len(hashes),
        ),
        group=group,
        kind=kind,
        names_extra_keys=extra_keys is not None,
    )


def _salt(fields: dict[str, object]) -> str:
    """SGLang's cache salt, which every event of a salted prompt repeats; empty: none."""
    salt = fields.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str):
        raise MalformedEventError("cache_salt", f"expected a text, got {type(salt).__name__}")
    return salt


def _salted(
    extra_keys: tuple[tuple[object, ...], ...] | None, salt: str, blocks: int
) -> tuple[tuple[object, ...], ...] | None:
    """The extra keys with the salt among those of the first block, where vLLM puts it."""
    if not salt or not blocks:
        return extra_keys
    first, *others = extra_keys or ((),) * blocks
    return extra_keys if salt in first else ((salt, *first), *others)


def _extra_keys(
    value: object, blocks: int, lora: tuple[object, object]
) -> tuple[tuple[object, ...], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != blocks:
        raise MalformedEventError("extra_keys", f"expected an array of {blocks} entries")
    if not any(value):
        return None
    adapter = next((key for key in lora if key is not None), None)
    return tuple(_keys_of_block(keys, adapter) for keys in value)


def _keys_of_block(keys: object, adapter: object) -> tuple[object, ...]:
    if keys is None:
        return ()
    if not isinstance(keys, list):
        raise MalformedEventError("extra_keys", f"expected arrays or null, got {type(keys).__name__}")
    if adapter is not None and adapter in keys:
        keys = list(keys)
        keys.remove(adapter)
    return tuple(keys)


def _tier(fields: dict[str, object]) -> Tier | None:
    medium = fields.get("medium")
    if medium is None:
        return None
    if not isinstance(medium, str):
        raise MalformedEventError("medium", f"expected a text, got {type(medium).__name__}")
    try:
        return Tier.parse(medium)
    except ValueError as error:
        raise MalformedEventError("medium", str(error)) from error


def _hashes(fields: dict[str, object]) -> NDArray[np.uint64]:
    values = fields.get("block_hashes")
    if not isinstance(values, list):
        raise MalformedEventError("block_hashes", f"expected an array, got {type(values).__name__}")
    try:
        return np.frombuffer(array("Q", values), np.uint64)  # unsigned integers, the usual case
    except (TypeError, OverflowError):
        return np.array([_hash(value, "block_hashes") for value in values], np.uint64)


def _hash(value: object, field: str) -> int:
    """Signed and unsigned integers modulo 2**64; of a digest its last eight bytes, big-endian."""
    if isinstance(value, int) and not isinstance(value, bool):
        if -(1 << 63) <= value <= _MASK_64:
            return value & _MASK_64
        raise MalformedEventError(field, f"{value} does not fit into 64 bits")
    if isinstance(value, bytes) and len(value) >= 8:
        return int.from_bytes(value[-8:], "big")
    raise MalformedEventError(field, f"expected an integer or at least 8 bytes, got {value!r:.40}")


def concatenated(hashes: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """One array of several; the only one is returned as it is."""
    return hashes[0] if len(hashes) == 1 else np.concatenate(hashes)
