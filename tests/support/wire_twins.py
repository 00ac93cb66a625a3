"""One stream of events applied in both ways, compiled and readable, which must come to the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cache_index import CacheIndex, Holder, MalformedEventError, StreamIngest, decode_batch, kernels

HOLDER = Holder("engine")
STORED_ORDER = [
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
]
REMOVED_ORDER = ["block_hashes", "medium", "group_idx"]


class Stream:
    """An index of its own, fed in one of the two ways."""

    def __init__(self, *, compiled: bool, block_size: int | None = None) -> None:
        self.index = CacheIndex()
        self.index.register(HOLDER)
        self.ingest = StreamIngest(self.index, HOLDER, "tiny", block_size=block_size)
        self.errors: list[tuple[str, str]] = []
        self._compiled = compiled

    def apply(self, payloads: Sequence[bytes]) -> None:
        errors: list[MalformedEventError] = []
        if self._compiled:
            errors = self.ingest.apply_payloads(payloads)
        else:
            for payload in payloads:
                try:
                    self.ingest.apply(decode_batch(payload))
                except MalformedEventError as error:
                    errors.append(error)
        self.errors += [(error.field, error.reason) for error in errors]

    def state(self) -> dict[str, Any]:
        """Everything that can be seen of it, the copies of each residency included."""
        while self.index.reclaim():  # what was cleared is still counted until then
            pass
        stats = self.index.stats()
        return {
            "residencies": self.index.residencies(HOLDER),
            "blocks": stats.residencies_by_holder,
            "copies": self.index._arrays.used(kernels.COPIES),
            "nodes": sorted(
                (node.hash, node.parent or 0, node.depth or 0) for node in self.index.tree().nodes
            ),
            "counters": self.ingest.counters,
            "traits": self.ingest.traits,
            "errors": self.errors,
        }


def check_same(payloads: Sequence[bytes], group: int = 1, block_size: int | None = None) -> Stream:
    """Both ways, with a look after every group; returns the compiled one."""
    compiled = Stream(compiled=True, block_size=block_size)
    readable = Stream(compiled=False, block_size=block_size)
    for start in range(0, len(payloads), group):
        compiled.apply(payloads[start : start + group])
        readable.apply(payloads[start : start + group])
        assert compiled.state() == readable.state()
    return compiled


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored(hashes: Sequence[Any], tokens: Sequence[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": len(tokens) // len(hashes),
        **more,
    }


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The older encoding, in which trailing fields may be left out."""
    order = {"BlockStored": STORED_ORDER, "BlockRemoved": REMOVED_ORDER, "AllBlocksCleared": ["medium"]}
    values = [event.get(field) for field in order[event["type"]]]
    while values and values[-1] is None:
        values.pop()
    return [event["type"], *values]


KNOWN = batch(stored([900], [9, 9, 9, 9]))  # makes the namespace known to the compiled reader
