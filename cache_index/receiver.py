"""A thread that receives from many sockets and carries out what other threads order."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import structlog
import zmq

from cache_index.readiness import Readiness
from cache_index.turn_lock import TurnLock

log = structlog.get_logger(__name__)

MAX_SOCKETS = 65_535  # the library's own limit is 1,023
IDLE_MS = 1_000

Owner = TypeVar("Owner")


class Receiver(Generic[Owner]):
    """Calls ``serve`` with the owners of sockets that have something to read, over and over.

    ``serve`` returns in how many milliseconds it wants to be called again at the latest. It takes ``lock``
    itself, so that what it does may be divided; orders are carried out with the lock held. ``end`` closes
    the sockets. All three run on the receiver's thread; a fault while serving or in an order is logged and
    stops nothing.
    """

    def __init__(self, name: str, serve: Callable[[set[Owner]], int], end: Callable[[], None]) -> None:
        self.lock = TurnLock()
        self.readiness: Readiness[Owner | None] = Readiness()  # None owns the wake-up
        self.context: zmq.Context[zmq.Socket[bytes]]  # from the start of the thread on
        self._name = name
        self._serve = serve
        self._end = end
        self._orders: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self.readiness.watch_descriptor(self._wake_receiver.fileno(), None)
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread, which begins with the orders given before."""
        with self.lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread; orders given from now on are ignored."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._wake()
        if self._thread is not None:
            self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()
        self.readiness.close()

    def order(self, command: Callable[[], None]) -> None:
        """Have it done on the thread, after all orders before."""
        with self.lock:
            if not self._closed:
                self._orders.append(command)
                self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough wake-ups are on their way
            self._wake_sender.send(b"\0")

    def _run(self) -> None:
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        timeout_ms = IDLE_MS
        while not self._closed:
            ready = self.readiness.wait(timeout_ms)
            if None in ready:
                self._carry_out()
            try:
                timeout_ms = self._serve({owner for owner in ready if owner is not None})
            except Exception:
                log.exception("receiver.failed", receiver=self._name)
                timeout_ms = IDLE_MS
        try:
            self._end()
        finally:
            self.context.destroy(0)

    def _carry_out(self) -> None:
        with suppress(BlockingIOError):
            while len(self._wake_receiver.recv(4096)) == 4096:
                pass
        while self._orders:
            with self.lock:
                try:
                    self._orders.popleft()()
                except Exception:
                    log.exception("receiver.order_failed", receiver=self._name)
