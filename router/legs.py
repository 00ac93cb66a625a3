"""One request to one instance: the prefill leg's answer is collected, the decode leg's spliced through."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from conductor.placement import FailureKind, Target, Usage
from router.error_shapes import error_shape
from router.framing import BodyFramer, ResponseHead
from router.upstream import UpstreamConnection, UpstreamFailure, UpstreamUnreachable
from router.usage import usage_from_tail

if TYPE_CHECKING:
    from router.attempt import Attempt

_SMALL_PIECE_BYTES = 32  # "[DONE]" and the last chunk arrive in pieces of this size: no usage in them
# Finds them in half the time that bytes.count takes for two bytes.
_ENDS_OF_EVENTS = re.compile(rb"\n\n").findall
_LINE_FEED = 10
_SEAM = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")  # between two chunks, which proxies may cut anywhere
_CUT_BYTES = 2_048  # where counts stand that may have been cut
_EVENT_BYTES = 16_384  # more than a stream's last event has
_MAX_HELD_BYTES = 256 * 1024  # of an incomplete chunk; beyond it, it is passed on as it comes


class Leg:
    """Sends the request on a pooled connection, or on a new one when that turns out to be stale."""

    __slots__ = (
        "_body",
        "_head",
        "_task",
        "attempt",
        "connection",
        "deadline_s",
        "head",
        "limit_s",
        "reads",
        "reads_seen",
        "sink",
        "target",
        "unread_bytes_seen",
    )

    def __init__(
        self, attempt: Attempt, target: Target, head: bytes, body: bytes | bytearray, limit_s: float
    ) -> None:
        """``limit_s`` is how long its answer may take."""
        self.attempt = attempt
        self.target = target
        self.limit_s = limit_s
        self.deadline_s = attempt.services.clock() + limit_s
        self.connection: UpstreamConnection | None = None
        self.head: ResponseHead | None = None
        self.sink: list[bytes] | None = None
        self.reads = 0
        self.reads_seen = 0
        self.unread_bytes_seen = 0
        self._head = head
        self._body = body
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        target = self.target
        connection = self.attempt.services.pool.instance(target).take()
        if connection is None:
            self._task = asyncio.get_running_loop().create_task(self._connect_and_send())
        else:
            self.connection = connection
            connection.send(self, self._head, self._body)

    def expect(self, now_s: float, limit_s: float) -> None:
        """What comes next should be here ``limit_s`` from now."""
        self.limit_s = limit_s
        self.deadline_s = now_s + limit_s

    def abort(self) -> None:
        """Drop the request at once; the engine sees its connection close."""
        if self._task is not None:
            self._task.cancel()
        if self.connection is not None:
            self.connection.abort()
            self.connection = None

    def timed_out(self, waited_for: str) -> None:
        self.abort()
        self.attempt.leg_failed(self, UpstreamFailure(FailureKind.TIMEOUT, waited_for))

    def lost(self, reason: str) -> None:
        """The instance is known to be gone before this leg noticed."""
        self.abort()
        self.attempt.leg_failed(self, UpstreamFailure(FailureKind.UNREACHABLE, reason))

    def forget_request(self) -> None:
        """The request cannot be sent again: release its bytes."""
        self._body = self._head = b""

    def response_failed(self, failure: UpstreamFailure) -> None:
        self.connection = None
        if failure.stale:
            self._task = asyncio.get_running_loop().create_task(self._connect_and_send())
        else:
            self.attempt.leg_failed(self, failure)

    async def _connect_and_send(self) -> None:
        try:
            try:
                connection = await self.attempt.services.pool.connect(self.target)
            except UpstreamUnreachable as error:
                self._task = None
                self.attempt.leg_failed(self, error.failure)
            else:
                self._task = None
                self._send(connection)
        except Exception:
            self.attempt.fail_unexpectedly()

    def _send(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        connection.send(self, self._head, self._body)

    def _collect(self) -> None:
        assert self.connection is not None
        self.sink = self.connection.sink = []

    def _collected(self) -> bytes:
        return b"".join(self.sink or ())

    def _check_collected(self, limit_bytes: int) -> bool:
        """Whether the answer stays below the limit; gives the leg up when it does not."""
        if sum(map(len, self.sink or ())) <= limit_bytes:
            return True
        self.abort()
        failure = UpstreamFailure(FailureKind.ERROR, f"the answer exceeds {limit_bytes} bytes")
        self.attempt.leg_failed(self, failure)
        return False

    # ResponseReceiver, completed by the subclasses

    def fail_unexpectedly(self) -> None:
        self.attempt.fail_unexpectedly()

    def response_head(self, head: ResponseHead) -> None:
        raise NotImplementedError

    def response_data(self, data: bytes) -> None:
        raise NotImplementedError

    def response_complete(self) -> None:
        raise NotImplementedError


class PrefillLeg(Leg):
    """Collects the prefill instance's answer."""

    __slots__ = ()

    def response_head(self, head: ResponseHead) -> None:
        self.head = head
        self._collect()

    def response_data(self, data: bytes) -> None:
        self._check_collected(self.attempt.services.settings.max_collected_bytes)

    def response_complete(self) -> None:
        self.connection = None
        assert self.head is not None
        body = self._collected()
        if self.head.status >= 500:
            self.attempt.engine_error(self, self.head.status, body)
        else:
            self.attempt.prefill_answered(self, self.head, body)


class BootstrapLeg(PrefillLeg):
    """Asks the server beside the prefill instance where its KV will be."""

    __slots__ = ()

    def response_complete(self) -> None:
        self.connection = None
        assert self.head is not None
        self.attempt.bootstrap_answered(self, self.head, self._collected())


class DecodeLeg(Leg):
    """Splices the decode instance's response to the client.

    Of an event stream only whole chunks are passed on, so that a stream which breaks can still be ended
    with an error event. Nothing is written before the first body byte: until then another instance can
    take over.
    """

    __slots__ = (
        "_counts",
        "_events",
        "_held",
        "_last",
        "_outbox",
        "_tail",
        "_tail_before",
        "_transport",
        "_whole_chunks",
        "started",
    )

    def __init__(
        self, attempt: Attempt, target: Target, head: bytes, body: bytes | bytearray, limit_s: float
    ) -> None:
        super().__init__(attempt, target, head, body, limit_s)
        self.started = False
        self._whole_chunks = False
        self._held = b""
        self._events = 0
        self._counts = False
        self._last = b""
        self._tail = b""
        self._tail_before = b""
        self._outbox = attempt.services.outbox
        self._transport = attempt.transport

    @property
    def events(self) -> int:
        """Server-sent events passed on, the last one of the stream included."""
        return self._events

    def usage(self) -> Usage:
        tail, head = self._tail, self.head
        if head is not None and head.event_stream:  # what comes last is an event, which is short
            tail = tail[-_EVENT_BYTES:]
        if len(tail) <= 4_096:
            tail = self._tail_before + tail
        if head is not None and head.chunked:
            tail = tail[:-_CUT_BYTES] + _SEAM.sub(b"", tail[-_CUT_BYTES:])
        return usage_from_tail(tail)

    def response_head(self, head: ResponseHead) -> None:
        self.head = head
        self._counts = head.event_stream or head.content_length is None
        if head.status >= 500:
            self._collect()
        elif head.chunked:
            if self.attempt.client_takes_chunks:
                self._whole_chunks = head.event_stream
            else:
                self._collect()

    def response_data(self, data: bytes) -> None:
        self.reads += 1
        if self.sink is not None:
            if self.head is not None and self.head.status >= 500:
                self._check_collected(self.attempt.services.settings.max_collected_bytes)
                return
            data = b"".join(self.sink)
            self.sink.clear()
        elif self._whole_chunks:
            connection = self.connection
            assert connection is not None and connection.framer is not None
            if self._held or connection.framer.boundary != len(data):
                data = self._hold_back(data, connection.framer)
        if not data:
            return
        if self._counts:
            self._events += len(_ENDS_OF_EVENTS(data))
            if data[0] == _LINE_FEED and self._last[-1:] == b"\n" and self._last[-2:] != b"\n\n":
                self._events += 1
        self._last = data
        if len(data) > _SMALL_PIECE_BYTES:
            self._tail_before = self._tail
            self._tail = data
        if self.started:
            self._outbox.write(self._transport, data)
        else:
            self._start(data)

    def response_complete(self) -> None:
        self.connection = None
        assert self.head is not None
        if self.head.status >= 500:
            self.attempt.engine_error(self, self.head.status, self._collected())
            return
        if not self.started:
            self._start(b"")
        self.attempt.response_finished(self)

    def end_broken_stream(self, message: str) -> bool:
        """Finish the client's event stream with an error event; False where that is impossible."""
        head = self.head
        if head is None or not head.event_stream or head.encoded:
            return False
        event = error_shape(self.attempt.endpoint).last_event(message, self._last)
        if head.chunked and self.attempt.client_takes_chunks:
            if not self._whole_chunks or not self._last.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n")):
                return False
            self._outbox.write(self._transport, b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            return True
        if head.content_length is not None or not self._last.endswith((b"\n\n", b"\r\n\r\n")):
            return False
        self._outbox.write(self._transport, event)
        return True

    def _start(self, data: bytes) -> None:
        assert self.head is not None
        first = self.attempt.response_started(self, self.head) + data
        self.started = True
        self._outbox.write(self._transport, first)

    def _hold_back(self, data: bytes, framer: BodyFramer) -> bytes:
        """The bytes that may go out now; the beginning of an incomplete chunk waits for its end."""
        boundary = framer.boundary
        held = self._held
        if boundary:
            self._held = data[boundary:]
            return held + data[:boundary]
        if len(held) + len(data) > _MAX_HELD_BYTES:
            self._held = b""
            self._whole_chunks = False
            return held + data
        self._held = held + data
        return b""
