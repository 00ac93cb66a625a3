"""Which of many ZeroMQ sockets have something to read, at a cost of those that have, not of all.

A ZeroMQ socket's file descriptor tells of *changes*: it is readable while the socket has news from its
I/O thread, and taking news (by a read that finds nothing more, or by asking for events) silences it even
if messages are left. So an owner must read until nothing comes, or be named to ``again``.
"""

from __future__ import annotations

import select
from typing import Any, Generic, TypeVar

import zmq

Owner = TypeVar("Owner")


class Readiness(Generic[Owner]):
    """Sockets and plain file descriptors, each with an owner. For one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, Owner] = {}
        self._descriptors: dict[zmq.Socket[Any], int] = {}
        self._again: set[Owner] = set()

    def watch_descriptor(self, descriptor: int, owner: Owner) -> None:
        self._owners[descriptor] = owner
        self._epoll.register(descriptor, select.EPOLLIN)

    def watch(self, source: zmq.Socket[Any], owner: Owner) -> None:
        """From now on; what the socket has already makes its owner ready as well."""
        descriptor = int(source.getsockopt(zmq.FD))
        self._descriptors[source] = descriptor
        self.watch_descriptor(descriptor, owner)
        self._again.add(owner)

    def forget(self, source: zmq.Socket[Any]) -> None:
        """To be called before the socket is closed: its descriptor may then be another's."""
        descriptor = self._descriptors.pop(source, None)
        if descriptor is not None:
            self._epoll.unregister(descriptor)
            del self._owners[descriptor]

    def again(self, owner: Owner) -> None:
        """The owner has left something unread."""
        self._again.add(owner)

    def drop(self, owner: Owner) -> None:
        """The owner, whose sockets are forgotten, is not to be woken any more."""
        self._again.discard(owner)

    def wait(self, timeout_ms: int) -> set[Owner]:
        """Owners with something to read; waits for the first one at most ``timeout_ms``."""
        ready, self._again = self._again, set()
        found = self._epoll.poll(0 if ready else timeout_ms / 1000)
        ready.update(self._owners[descriptor] for descriptor, _ in found)
        return ready

    def close(self) -> None:
        self._epoll.close()
