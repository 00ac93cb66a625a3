"""Our index and the RadixTree of NVIDIA Dynamo behind the same calls; what each is given is encoded untimed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from workloads.fleet import Hashes, Stored

from cache_index import CacheIndex, Holder, Namespace, Tier

NAMESPACE = Namespace("model", 16)


class Ours:
    """The index by engine keys and sequence hashes, as the event streams feed it."""

    def __init__(self, workers: int) -> None:
        self.index = CacheIndex()
        self.fleet = [Holder(f"w{number}") for number in range(workers)]
        for holder in self.fleet:
            self.index.register(holder)

    def encode_store(self, event: Stored) -> tuple[Holder, Hashes, Hashes, int]:
        return self.fleet[event.worker], event.hashes, event.hashes + np.uint64(1), event.parent or 0

    def encode_remove(self, worker: int, hashes: Hashes) -> tuple[Holder, Hashes]:
        return self.fleet[worker], hashes + np.uint64(1)

    def apply(self, encoded: Sequence[Any]) -> None:
        index = self.index
        for each in encoded:
            if len(each) == 4:
                holder, hashes, engine_keys, parent = each
                index.store_linked(holder, Tier.DEVICE, NAMESPACE, hashes, engine_keys, parent=parent)
            else:
                index.remove_linked(each[0], Tier.DEVICE, each[1])

    def encode_query(self, hashes: Hashes) -> Hashes:
        return hashes

    def match(self, query: Hashes) -> object:
        return self.index.match(NAMESPACE, query)

    def deepest(self, query: Hashes) -> int:
        return int(self.index.match(NAMESPACE, query).max())


class Dynamo:
    """The peer through its Python binding."""

    def __init__(self, module: Any) -> None:
        self._tree = module.RadixTree()
        self._events = 0

    def _encoded(self, worker: int, data: dict[str, Any]) -> tuple[int, bytes]:
        self._events += 1
        event = {"event_id": self._events, "data": data, "dp_rank": 0}
        return worker, json.dumps(event, separators=(",", ":")).encode()

    def encode_store(self, event: Stored) -> tuple[int, bytes]:
        blocks = [{"block_hash": each, "tokens_hash": each} for each in event.hashes.tolist()]
        return self._encoded(event.worker, {"stored": {"parent_hash": event.parent, "blocks": blocks}})

    def encode_remove(self, worker: int, hashes: Hashes) -> tuple[int, bytes]:
        return self._encoded(worker, {"removed": {"block_hashes": hashes.tolist()}})

    def apply(self, encoded: Sequence[Any]) -> None:
        apply_event = self._tree.apply_event
        for worker, event in encoded:
            apply_event(worker, event)
        self._tree.find_matches([1])  # returns when all is applied

    def encode_query(self, hashes: Hashes) -> list[int]:
        found: list[int] = hashes.tolist()
        return found

    def match(self, query: list[int]) -> object:
        return self._tree.find_matches(query)

    def deepest(self, query: list[int]) -> int:
        return max(self._tree.find_matches(query).scores.values(), default=0)


def find_dynamo() -> Any:
    try:
        return importlib.import_module("dynamo.llm")
    except ImportError:
        return None
