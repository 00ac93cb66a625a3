"""An engine's KV event sockets: PUB for live batches and ROUTER for replays, in vLLM's wire format."""

import struct
import threading
import time

import msgspec
import zmq
from waiting import wait_for


class KvPublisher:
    """Publishes batches of events and replays them from the beginning; close it at the end.

    ``like`` another one, which is closed: a restarted engine at its endpoints.
    """

    def __init__(self, like: "KvPublisher | None" = None) -> None:
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.endpoint = self._bound(self._publisher, like.endpoint if like else "tcp://127.0.0.1:*")
        self.replay_endpoint = self._bound(
            self._router, like.replay_endpoint if like else "tcp://127.0.0.1:*"
        )
        self._batches: list[bytes] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._replay, daemon=True)
        self._thread.start()

    def _bound(self, listener: zmq.Socket, endpoint: str) -> str:
        wait_for(lambda: self._try_bind(listener, endpoint))
        return listener.getsockopt(zmq.LAST_ENDPOINT).decode()

    def _try_bind(self, listener: zmq.Socket, endpoint: str) -> bool:
        try:
            listener.bind(endpoint)
        except zmq.ZMQError:  # the former owner of the port is still closing
            return False
        return True

    def stored(
        self,
        hashes: list[int],
        tokens: list[int],
        block_size: int,
        *,
        parent: int | None = None,
        medium: str = "GPU",
    ) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": block_size,
            "lora_id": None,
            "medium": medium,
        }
        self.publish([event])

    def removed(self, hashes: list[int], *, medium: str = "GPU") -> None:
        self.publish([{"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}])

    def publish(self, events: list[dict]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        with self._lock:
            sequence = len(self._batches)
            self._batches.append(payload)
            self._publisher.send_multipart([b"", struct.pack(">Q", sequence), payload])

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._context.destroy(0)

    def _replay(self) -> None:
        while not self._closed.is_set():
            if not self._router.poll(20):
                continue
            client, _, start = self._router.recv_multipart()
            with self._lock:
                batches = list(enumerate(self._batches))[struct.unpack(">Q", start)[0] :]
            for sequence, payload in batches:
                self._router.send_multipart([client, b"", b"", struct.pack(">Q", sequence), payload])
            self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
