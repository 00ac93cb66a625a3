"""KV events over ZMQ in vLLM's wire format, with vLLM's replay socket.

A batch is three frames, topic, sequence number (8 bytes, big-endian) and msgpack of
``[timestamp, events, data-parallel rank]``. A DEALER that sends ``[b"", first sequence number]`` to the replay
socket gets ``[b"", topic, sequence number, payload]`` for every batch still buffered, then
``[b"", b"", 0xff * 8, b""]``. Other requests are dropped silently, as vLLM drops them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from simulator.block_hash import digest_as_int
from simulator.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

END_OF_REPLAY: Final = b"\xff" * 8


class EventEncoding(StrEnum):
    """Events as maps (vLLM 0.32) or as positional arrays (older releases)."""

    MAP = "map"
    ARRAY = "array"


class HashEncoding(StrEnum):
    """Block hashes as unsigned 64-bit integers (the default), 32 bytes, or signed 64-bit integers."""

    INT = "int"
    BYTES = "bytes"
    SIGNED = "signed"


@dataclass(frozen=True, slots=True)
class EventFormat:
    events: EventEncoding = EventEncoding.MAP
    hashes: HashEncoding = HashEncoding.INT

    def payload(self, events: Sequence[KvEvent], rank: int, timestamp_s: float) -> bytes:
        """One batch in msgpack."""
        return msgspec.msgpack.encode([timestamp_s, [self.event(event) for event in events], rank])

    def event(self, event: KvEvent) -> Any:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved(digests, medium):
                hashes = [self.hash(digest) for digest in digests]
                if self.events is EventEncoding.ARRAY:
                    return ["BlockRemoved", hashes, medium]
                return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": 0}
            case AllBlocksCleared():
                array = self.events is EventEncoding.ARRAY
                return ["AllBlocksCleared"] if array else {"type": "AllBlocksCleared"}

    def hash(self, digest: bytes) -> int | bytes:
        match self.hashes:
            case HashEncoding.BYTES:
                return digest
            case HashEncoding.INT:
                return digest_as_int(digest)
            case HashEncoding.SIGNED:
                return int.from_bytes(digest[-8:], "big", signed=True)

    def _stored(self, event: BlockStored) -> Any:
        parent = None if event.parent is None else self.hash(event.parent)
        hashes = [self.hash(digest) for digest in event.digests]
        extra_keys: list[list[str] | None] = [None] * len(hashes)
        if event.salt is not None:
            extra_keys[0] = [event.salt]
        if self.events is EventEncoding.ARRAY:
            fields = [hashes, parent, event.tokens, event.block_size, None, event.medium]
            return ["BlockStored", *fields, *([None, extra_keys] if event.salt is not None else [])]
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": event.tokens,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if event.session_id is not None:
            stored["session_id"] = event.session_id
        return stored


class KvEventPublisher:
    """The PUB and the replay socket of one rank; sequence numbers start at 0."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        address: str,
        event_port: int,
        replay_port: int | None,
        topic: str,
        rank: int,
        event_format: EventFormat,
        buffer_steps: int = 10_000,
    ) -> None:
        self._topic = topic.encode()
        self._rank = rank
        self._format = event_format
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.event_port = event_port
        self.replay_port = replay_port
        # PUB never blocks, so a plain socket will do; it drops for subscribers that lag 100,000 batches.
        self._pub: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._pub.bind(f"tcp://{address}:{event_port}")
        self._router: zmq.asyncio.Socket | None = None
        if replay_port is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.set_hwm(0)  # a ROUTER would drop what exceeds it
            self._router.bind(f"tcp://{address}:{replay_port}")

    def source(self) -> dict[str, Any]:
        """This rank's entry of ``GET /kv_event_sources``."""
        replay = None if self.replay_port is None else f"tcp://*:{self.replay_port}"
        return {
            "endpoint": f"tcp://*:{self.event_port}",
            "replay_endpoint": replay,
            "buffer_steps": self._buffer.maxlen,
            "topic": self._topic.decode(),
        }

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch; nothing is sent for an empty one."""
        if not events:
            return
        payload = self._format.payload(events, self._rank, time.time())
        self._buffer.append((self._sequence, payload))
        self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload), copy=True)
        self._sequence += 1

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        if self._router is None:
            return
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue
            peer, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in [entry for entry in self._buffer if entry[0] >= start]:
                number = sequence.to_bytes(8, "big")
                await self._router.send_multipart([peer, b"", self._topic, number, payload])
            await self._router.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
