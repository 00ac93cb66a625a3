"""An index fed by streams over real sockets, from a publisher that behaves like an engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq
from waiting import wait_for

from cache_index import (
    CacheIndex,
    Holder,
    Namespace,
    StreamConfig,
    StreamStats,
    VllmEventSource,
    sequence_hashes,
)
from cache_index.hashing import Hashes

HOLDER = Holder("engine", 0)
NAMESPACE = Namespace("tiny", 4)


class Engine:
    """PUB socket plus a ROUTER that replays, as vLLM has them; ports may be taken over from another."""

    def __init__(self, *, like: Engine | None = None, replayable: bool = True) -> None:
        self._context = zmq.Context()
        self._publisher = self._socket(zmq.PUB)
        self._port = self._bind(self._publisher, like._port if like else None)
        self._router = self._socket(zmq.ROUTER) if replayable else None
        if self._router is not None:
            self._replay_port = self._bind(self._router, like._replay_port if like else None)
        self.first_kept = 0
        self.batches: list[bytes] = []
        self.requests: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        created = self._context.socket(kind)
        created.setsockopt(zmq.LINGER, 0)
        return created

    def _bind(self, listener: zmq.Socket[bytes], port: int | None) -> int:
        if port is None:
            return listener.bind_to_random_port("tcp://127.0.0.1")
        wait_for(lambda: self._try_bind(listener, port))
        return port

    def _try_bind(self, listener: zmq.Socket[bytes], port: int) -> bool:
        try:
            listener.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError:
            return False
        return True

    def config(self, holder: Holder = HOLDER, **options: Any) -> StreamConfig:
        replay_endpoint = None if self._router is None else f"tcp://127.0.0.1:{self._replay_port}"
        return StreamConfig(holder, "tiny", f"tcp://127.0.0.1:{self._port}", replay_endpoint, **options)

    def publish(self, *events: dict[str, Any], lost: bool = False, topic: bytes | None = b"kv") -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.batches.append(payload)
        if not lost:
            self.send(len(self.batches) - 1, payload, topic)

    def send(self, sequence: int, payload: bytes, topic: bytes | None = b"kv") -> None:
        frames = [sequence.to_bytes(8, "big"), payload]
        self._publisher.send_multipart(frames if topic is None else [topic, *frames])

    def send_frames(self, *frames: bytes) -> None:
        self._publisher.send_multipart(list(frames))

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._router is None or not self._router.poll(20):
                self._stop.wait(0.01)
                continue
            identity, empty, first = self._router.recv_multipart()
            assert empty == b""
            self.requests.append(int.from_bytes(first, "big"))
            for sequence in range(max(self.requests[-1], self.first_kept), len(self.batches)):
                answer = [identity, b"", b"kv", sequence.to_bytes(8, "big"), self.batches[sequence]]
                self._router.send_multipart(answer)
            self._router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(0)


def stored(engine_hash: int, token: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash],
        "parent_block_hash": parent,
        "token_ids": [token] * 4,
        "block_size": 4,
        "medium": "GPU",
    }


def hashes_of(*tokens: int) -> Hashes:
    return sequence_hashes(np.repeat(np.array(tokens, np.uint32), 4), 4)


class Feed:
    """An index fed by a source."""

    def __init__(self, index: CacheIndex | None = None) -> None:
        self.index = CacheIndex() if index is None else index
        self.source = VllmEventSource(self.index)
        self.source.start()

    def stats(self, holder: Holder = HOLDER) -> StreamStats:
        return next(each for each in self.source.stream_stats() if each.holder == holder)

    def blocks(self, *tokens: int, holder: Holder = HOLDER) -> int:
        """Matched prefix of a prompt that repeats each token for a block."""
        row = self.index.holder_id(holder)
        assert row is not None
        return int(self.index.match(NAMESPACE, hashes_of(*tokens))[row, 0])

    def follow(self, engine: Engine, holder: Holder = HOLDER, **options: Any) -> None:
        self.source.add_stream(engine.config(holder, **options))
        wait_for(lambda: self.stats(holder).state != "connecting")


Make = Callable[..., Engine]
