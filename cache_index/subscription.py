"""One ZeroMQ subscription: the live socket, and the monitor that tells of its connections.

Messages are ``[topic, sequence (8 bytes, big-endian), payload]``, as engines and stores publish them;
publishers without topics leave the first frame out.
"""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from cache_index.readiness import Owner, Readiness

RECEIVE_HIGH_WATER_MARK = 100_000
HEARTBEAT_MS = 5_000


class Subscription:
    """Connected from the start, and watched for ``owner``; for the thread of ``readiness`` only.

    ZMQError when the endpoint is none, or there are too many sockets.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        topic: str,
        readiness: Readiness[Owner],
        owner: Owner,
    ) -> None:
        self._forget = readiness.forget
        self._socket = context.socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
            # Tells of a new connection even when no message follows.
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            self._socket.connect(endpoint)
            readiness.watch(self._monitor, owner)
            readiness.watch(self._socket, owner)
        except (zmq.ZMQError, OSError):
            self.close()
            raise

    def close(self) -> None:
        if self._monitor is not None:
            self._forget(self._monitor)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self._forget(self._socket)
        self._socket.close(0)

    def connections(self) -> Iterator[bool]:
        """What happened to the connection since the last call: whether it came up or was lost, in order."""
        while self._monitor is not None and int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def messages(self, most: int) -> list[list[bytes]]:
        """What has arrived; when that is as much as wanted, there may be more."""
        return received(self._socket, most)


def received(source: zmq.Socket[bytes], most: int) -> list[list[bytes]]:
    """At most so many messages of a socket, all that it has if they are fewer."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < most:
            messages.append(source.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages


def numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload of a message, None if it has not that form."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
