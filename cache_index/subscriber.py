"""Live ZeroMQ publications: one receiver thread for all feeds that need no replay.

Messages are ``[topic, sequence (8 bytes, big-endian), payload]``, as engines and stores publish them;
publishers without topics leave the first frame out.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

log = structlog.get_logger(__name__)

MESSAGES_PER_TURN = 128  # per feed, before the others get theirs
HEARTBEAT_MS = 5_000
IDLE_MS = 1_000


def _ignore_connection(_connected: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Feed:
    """A publisher to follow. The handlers run on the receiver thread, one at a time, and must not block."""

    endpoint: str
    topic: str
    on_message: Callable[[int, bytes], None]  # sequence number, payload
    on_malformed: Callable[[str], None]  # frames that are no message; the reason
    on_connection: Callable[[bool], None] = _ignore_connection  # whether there is a connection now


class _Followed:
    """Sockets of one feed. Only the receiver thread touches them."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.removed = False
        self.subscriber: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.setsockopt(zmq.LINGER, 0)
        self.subscriber.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, self.feed.topic.encode())
        self.monitor = self.subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.subscriber.connect(self.feed.endpoint)

    def close(self) -> None:
        if self.subscriber is not None:
            if self.monitor is not None:
                self.subscriber.disable_monitor()
                self.monitor.close(0)
            self.subscriber.close(0)
        self.subscriber = self.monitor = None

    def serve(self) -> None:
        """Connections first: a message of a new connection must find what the old one left cleared."""
        with suppress(zmq.Again):
            while self.monitor is not None:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
                self.feed.on_connection(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        with suppress(zmq.Again):
            for _ in range(MESSAGES_PER_TURN):
                if self.subscriber is None or self.removed:
                    return
                self._message(self.subscriber.recv_multipart(zmq.NOBLOCK))

    def _message(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.feed.on_malformed(f"expected topic, 8 bytes and a payload, got {len(frames)} frames")
            return
        self.feed.on_message(int.from_bytes(frames[-2], "big"), frames[-1])


class Subscriber:
    """Follows feeds until they are dropped. Methods may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # held while a handler runs, so that a removal is final
        self._followed: dict[Hashable, _Followed] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._poller = zmq.Poller()
        self._owners: dict[Any, _Followed] = {}

    def start(self) -> None:
        """Begin to receive, from feeds added before too."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._receive, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()

    def follow(self, key: Hashable, feed: Feed) -> None:
        """Receive a feed; one of the same key is replaced."""
        self.unfollow(key)
        followed = _Followed(feed)
        with self._lock:
            self._followed[key] = followed
        self._order(lambda: self._open(followed))

    def unfollow(self, key: Hashable) -> None:
        """No handler of the feed is called any more once this has returned."""
        with self._lock:
            followed = self._followed.pop(key, None)
            if followed is None:
                return
            followed.removed = True
        self._order(lambda: self._close(followed))

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # enough wake-ups are on their way, or it is closed
            self._wake_sender.send(b"\0")

    def _receive(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        try:
            while not self._closed:
                ready = dict(self._poller.poll(IDLE_MS))
                if ready.pop(self._wake_receiver.fileno(), None):
                    with suppress(BlockingIOError):
                        while self._wake_receiver.recv(4096):
                            pass
                    while self._commands:
                        self._commands.popleft()()
                for followed in {owner for each in ready if (owner := self._owners.get(each)) is not None}:
                    self._serve(followed)
        finally:
            for followed in {*self._owners.values()}:
                followed.close()
            self._context.destroy(0)

    def _serve(self, followed: _Followed) -> None:
        with self._lock:
            if followed.removed:
                return
            try:
                followed.serve()
            except Exception:  # a fault in one handler must not stop the other feeds
                log.exception("feed.failed", feed=self._name, endpoint=followed.feed.endpoint)

    def _open(self, followed: _Followed) -> None:
        if followed.removed:
            return
        try:
            followed.open(self._context)
        except zmq.ZMQError as error:
            log.error("feed.not_opened", endpoint=followed.feed.endpoint, reason=str(error))
            followed.close()
        for each in (followed.subscriber, followed.monitor):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)
                self._owners[each] = followed

    def _close(self, followed: _Followed) -> None:
        for each in (followed.subscriber, followed.monitor):
            if each is not None and self._owners.pop(each, None) is not None:
                self._poller.unregister(each)
        followed.close()
