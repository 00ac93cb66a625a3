"""Connections to engines: one response at a time, kept alive and reused per instance."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from conductor.placement import FailureKind, Target
from router.framing import MAX_HEAD_BYTES, BodyFramer, FramingError, ResponseHead
from router.known_answers import KNOWN_ANSWERS
from router.outbox import Outbox

if TYPE_CHECKING:
    from router.inference import Body


@dataclass(frozen=True, slots=True)
class UpstreamFailure:
    """Why no (complete) response came. ``stale``: a reused connection closed before a byte was answered."""

    kind: FailureKind
    detail: str
    stale: bool = False


class UpstreamUnreachable(Exception):
    """No connection could be made in time."""

    def __init__(self, failure: UpstreamFailure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class ResponseReceiver(Protocol):
    """Takes one response: all of it at once, or its head, then data, then that it is complete; or its failure.

    When all of it is there, the connection is free again.
    """

    def response_whole(self, head: ResponseHead, body: bytes) -> None: ...

    def response_head(self, head: ResponseHead) -> None: ...

    def response_data(self, data: bytes) -> None:
        """Body bytes as received, framing included."""

    def response_complete(self) -> None: ...

    def response_failed(self, failure: UpstreamFailure) -> None: ...

    def fail_unexpectedly(self) -> None:
        """One of the others raised what nobody foresaw; called where the exception is handled."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine; carries one exchange at a time.

    ``sink`` may be set by the receiver on ``response_head``: decoded payload is collected there.
    ``answered``: a part of the response has come. ``framer`` follows one that comes in pieces.
    """

    __slots__ = (
        "_head_buffer",
        "_keep_alive",
        "_outbox",
        "_sent_in_turn",
        "answered",
        "framer",
        "idle_since_s",
        "pool",
        "receiver",
        "reused",
        "sink",
        "transport",
    )

    def __init__(self, pool: InstancePool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.receiver: ResponseReceiver | None = None
        self.framer: BodyFramer | None = None
        self.sink: list[bytes] | None = None
        self.answered = False
        self.reused = False
        self.idle_since_s = 0.0
        self._outbox = pool.outbox
        self._sent_in_turn = 0
        self._head_buffer = b""
        self._keep_alive = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pool.open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.forget(self)
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        framer = self.framer
        try:
            if exc is None and framer is not None and framer.close_delimited:
                receiver.response_complete()
                return
            reason = f"connection lost: {exc}" if exc else "the engine closed the connection"
            where = "in the middle of its response" if self.answered else "before it answered"
            stale = self.reused and not self.answered
            receiver.response_failed(UpstreamFailure(FailureKind.UNREACHABLE, f"{reason} {where}", stale))
        except Exception:
            receiver.fail_unexpectedly()

    def send(self, receiver: ResponseReceiver, head: bytes, body: Body) -> None:
        """Write one request soon; its response goes to ``receiver``."""
        self.receiver = receiver
        outbox = self._outbox
        self._sent_in_turn = outbox.turn
        if len(body) <= 65_536:
            outbox.write(self.transport, head + body)
        else:
            outbox.write_both(self.transport, head, body)

    def data_received(self, data: bytes) -> None:
        receiver = self.receiver
        framer = self.framer
        try:
            if framer is None or receiver is None:
                self._head_received(data)
                return
            end = framer.feed(data, 0, self.sink)
            if end < len(data):
                data = data[:end]
                self._keep_alive = False  # bytes behind the response: the connection cannot be trusted
            receiver.response_data(data)
            if framer.complete:
                self._finish()
        except FramingError as error:
            self._broken(str(error))
        except Exception:
            if receiver is None:
                raise
            receiver.fail_unexpectedly()
            if self.receiver is receiver:
                self.abort()

    def _head_received(self, data: bytes) -> None:
        """Raises FramingError."""
        receiver = self.receiver
        if receiver is None:  # unsolicited bytes on an idle connection
            self.transport.abort()
            return
        if self._sent_in_turn == self._outbox.turn:  # the request is not written yet
            if self.reused:
                self._spoke_unasked()
                return
            self._outbox.flush()
        if self._head_buffer:
            data = self._head_buffer + data
            self._head_buffer = b""
        while (end := data.find(b"\r\n\r\n")) >= 0:
            if end > MAX_HEAD_BYTES:
                raise _head_too_long()
            head = KNOWN_ANSWERS[data[:end]]
            data = data[end + 4 :]
            if head.status >= 200:
                break
            if head.status == 101:
                raise FramingError("the engine switched protocols without being asked")
        else:
            if len(data) > MAX_HEAD_BYTES:
                raise _head_too_long()
            if b"\n\n" in data:
                raise FramingError("the response head's lines do not end in CRLF")
            self.answered = True
            self._head_buffer = data
            return
        if head.content_length == len(data) and not head.bodiless:  # as most short ones come
            self.receiver = None
            self.pool.release(self, reusable=head.keep_alive)
            receiver.response_whole(head, data)
            return
        self.answered = True
        framer = self.framer = BodyFramer(head)
        self._keep_alive = head.keep_alive and not framer.close_delimited
        receiver.response_head(head)
        if self.receiver is not receiver:  # given up by the receiver
            return
        end = framer.feed(data, 0, self.sink)
        if end < len(data):
            data = data[:end]
            self._keep_alive = False
        if data:
            receiver.response_data(data)
        if framer.complete:
            self._finish()

    def _finish(self) -> None:
        """Of a response that came in pieces."""
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        self.framer = self.sink = None
        self.answered = False
        self.transport.resume_reading()
        self.pool.release(self, reusable=self._keep_alive)
        receiver.response_complete()

    def _spoke_unasked(self) -> None:
        """Engines do before they close an idle connection: it means nobody, and the request can go another way."""
        receiver, self.receiver = self.receiver, None
        self.transport.abort()
        if receiver is not None:
            detail = "the engine spoke before it was asked"
            receiver.response_failed(UpstreamFailure(FailureKind.UNREACHABLE, detail, stale=True))

    def _broken(self, detail: str) -> None:
        receiver, self.receiver = self.receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.response_failed(UpstreamFailure(FailureKind.ERROR, f"malformed response: {detail}"))

    def abort(self) -> None:
        """Drop the exchange and the connection at once; the receiver hears nothing more."""
        self.receiver = None
        self.transport.abort()


class InstancePool:
    """The connections to one host and port; the most recently used idle one is taken first."""

    def __init__(self, outbox: Outbox, *, max_idle: int, clock: Callable[[], float]) -> None:
        self.outbox = outbox
        self.max_idle = max_idle
        self.clock = clock
        self.idle: deque[UpstreamConnection] = deque()
        self.open_connections: set[UpstreamConnection] = set()
        self.connecting = 0

    def release(self, connection: UpstreamConnection, *, reusable: bool = True) -> None:
        """Nobody uses it any more: keep it for the next request, or close it."""
        transport, idle = connection.transport, self.idle
        reusable = reusable and not transport.is_closing() and not transport.get_write_buffer_size()
        if not reusable or len(idle) >= self.max_idle:
            transport.close()
            return
        connection.reused = True
        connection.idle_since_s = self.clock()
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        self.open_connections.discard(connection)
        if connection.receiver is None and connection in self.idle:
            self.idle.remove(connection)

    def close_idle_since(self, limit_s: float) -> None:
        idle = self.idle
        while idle and idle[0].idle_since_s < limit_s:
            idle.popleft().transport.close()


class UpstreamPool:
    """Connections to every instance of the cluster; ``tls`` is for those that speak it."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        connect_timeout_s: float,
        max_idle_connections: int,
        idle_timeout_s: float,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._outbox = outbox
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._max_idle_connections = max_idle_connections
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._instances: dict[str, InstancePool] = {}  # by URL

    def take(self, target: Target) -> UpstreamConnection | None:
        """A connection that is idle and open, if there is one."""
        pool = self._instances.get(target.url)
        if pool is not None:
            idle = pool.idle
            while idle:
                connection = idle.pop()
                if not connection.transport.is_closing():
                    return connection
        return None

    def instance(self, target: Target) -> InstancePool:
        pool = self._instances.get(target.url)
        if pool is None:
            pool = self._instances[target.url] = InstancePool(
                self._outbox, max_idle=self._max_idle_connections, clock=self._clock
            )
        return pool

    async def connect(self, target: Target) -> UpstreamConnection:
        """A fresh connection. Raises UpstreamUnreachable."""
        host, port = target.host, target.port
        pool = self.instance(target)
        connection = UpstreamConnection(pool)
        pool.connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, host, port, ssl=self._tls_context() if target.tls else None
                )
        except TimeoutError:
            detail = f"no connection to {host}:{port} within {self._connect_timeout_s:g} s"
            raise UpstreamUnreachable(UpstreamFailure(FailureKind.UNREACHABLE, detail)) from None
        except ssl.SSLCertVerificationError as error:
            detail = (
                f"the certificate of {host}:{port} is not accepted: {error.verify_message.rstrip('.')}; "
                "'routing.engine_tls' says which are"
            )
            raise UpstreamUnreachable(UpstreamFailure(FailureKind.UNREACHABLE, detail)) from None
        except (OSError, UnicodeError) as error:  # a host name may have no encoding for the wire
            detail = f"cannot connect to {host}:{port}: {getattr(error, 'strerror', None) or error}"
            raise UpstreamUnreachable(UpstreamFailure(FailureKind.UNREACHABLE, detail)) from None
        except asyncio.CancelledError:
            if connection.transport is not None:
                connection.transport.abort()
            raise
        finally:
            pool.connecting -= 1
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def sweep(self) -> None:
        """Close connections that were idle for too long; forget instances without any."""
        limit_s = self._clock() - self._idle_timeout_s
        for url, pool in list(self._instances.items()):
            pool.close_idle_since(limit_s)
            if not pool.open_connections and not pool.connecting:
                del self._instances[url]

    def close(self) -> None:
        for pool in self._instances.values():
            for connection in list(pool.open_connections):
                connection.transport.abort()


def _head_too_long() -> FramingError:
    return FramingError(f"the response head exceeds {MAX_HEAD_BYTES} bytes")
