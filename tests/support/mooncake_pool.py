"""A Mooncake pool: events as its master sends them, an engine that explains its hashes, the master itself."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from plain_publisher import PlainPublisher
from recordings import frames_of, recorded_lines

from cache_index import (
    CacheIndex,
    Holder,
    Namespace,
    StreamConfig,
    StreamIngest,
    StreamStats,
    Tier,
    decode_batch,
    sequence_hashes,
)
from cache_index.cache_events import CacheEvent
from cache_index.mooncake import MooncakeEventSource
from cache_index.mooncake_events import decode_master_batch
from cache_index.mooncake_hints import MooncakeHints

POOL, ENGINE = Holder("pool-0"), Holder("engine")
BLOCK = 4
NAMESPACE = Namespace("tiny", BLOCK)
TOKENS = list(range(12))


def recorded_frames() -> list[list[bytes]]:
    return [frames_of(record) for record in recorded_lines("mooncake_master_frames.jsonl")]


def recorded_events() -> list[Any]:
    return [record["payload"] for record in recorded_lines("mooncake_master_events.jsonl")]


def as_sent(event_id: int, kind: str, *names: int, **fields: Any) -> dict[str, Any]:
    """An envelope as the master fills it in."""
    return {
        "event_id": event_id,
        "timestamp": 1795209162913,
        "event_type": kind,
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "pool-0",
        "group_id": None,
        "medium": "cpu",
        "dp_rank": None,
        "seq_hashes": list(names),
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
        **fields,
    }


def decoded(*events: dict[str, Any]) -> list[CacheEvent]:
    batch = decode_master_batch(msgspec.msgpack.encode([1000, list(events), 0]))
    assert batch.rejected == ()
    return list(batch.events)


class Pool:
    """Hints beside an engine that explains object hashes."""

    def __init__(self, **options: Any) -> None:
        self.index = CacheIndex()
        self.index.register(POOL)
        self.index.register(ENGINE)
        self.hints = MooncakeHints(self.index, POOL, "tiny", BLOCK, **options)
        self._engine = StreamIngest(self.index, ENGINE, "tiny")

    def apply(self, *events: dict[str, Any]) -> None:
        for event in decoded(*events):
            self.hints.apply(event)

    def explain(self, names: list[int], tokens: list[int]) -> None:
        event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
        event |= {"token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}
        self._engine.apply(decode_batch(msgspec.msgpack.encode([0.0, [event], 0])))

    def evict(self, *names: int) -> None:
        events = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in names]
        self._engine.apply(decode_batch(msgspec.msgpack.encode([0.0, events, 0])))

    def pooled(self, tokens: list[int] = TOKENS) -> int:
        row = self.index.holder_id(POOL)
        assert row is not None
        hashes = sequence_hashes(np.array(tokens, np.uint32), BLOCK)
        return int(self.index.match(NAMESPACE, hashes)[row, Tier.REMOTE])


class Master(PlainPublisher):
    """A publisher as the master has it: no topic, sequences from 1, no replay."""

    sequence = 0

    def publish(self, *events: dict[str, Any]) -> None:
        self.send(msgspec.msgpack.encode([1000, list(events), 0]))

    def send(self, payload: bytes) -> None:
        self.sequence += 1
        self.send_frames(b"", self.sequence.to_bytes(8, "big"), payload)


class Following:
    """A pool that follows its master; close it at the end."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.explain([101, 102, 103], TOKENS)
        self.source = MooncakeEventSource(self.pool.index)
        self.source.start()
        self.master = Master()
        self.source.add_stream(self.stream())
        self.master.wait_for_subscriber()

    def stream(self) -> StreamConfig:
        return StreamConfig(POOL, "tiny", self.master.endpoint, None, block_size=BLOCK)

    def stats(self) -> StreamStats:
        return self.source.stream_stats()[0]

    def close(self) -> None:
        self.source.close()
        self.master.close()
