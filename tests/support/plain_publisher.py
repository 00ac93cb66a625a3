"""A publisher without replay: bound, restartable on the same port, numbering its messages or not."""

from __future__ import annotations

import zmq
from waiting import wait_for


class PlainPublisher:
    """Sends frames to whoever has subscribed; close it at the end."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        wait_for(lambda: self._bound(endpoint))
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()

    def _bound(self, endpoint: str) -> bool:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:  # the former owner of the port is still closing
            return False
        return True

    def wait_for_subscriber(self) -> None:
        self._wait_for(b"\x01")

    def wait_until_left(self) -> None:
        """The only subscriber unsubscribed or closed its connection."""
        self._wait_for(b"\x00")

    def _wait_for(self, kind: bytes) -> None:
        while self._socket.poll(20_000):
            if self._socket.recv().startswith(kind):
                return
        raise AssertionError("no subscriber came or went")

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def close(self) -> None:
        self._context.destroy(0)
