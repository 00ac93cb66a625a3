"""One request to one instance: the prefill leg's answer is collected, the decode leg's spliced through."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from conductor.placement import FailureKind, Target, Usage
from router.error_shapes import error_shape
from router.framing import BodyFramer, ResponseHead
from router.upstream import UpstreamFailure, UpstreamUnreachable
from router.usage import usage_from_tail

if TYPE_CHECKING:
    from router.attempt import Attempt
    from router.inference import Body

_SMALL_PIECE_BYTES = 32  # "[DONE]" and the last chunk arrive in pieces of this size: no usage in them
# Finds them in half the time that bytes.count takes for two bytes.
_ENDS_OF_EVENTS = re.compile(rb"\n\n").findall
_LINE_FEED = 10
_SEAM = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")  # between two chunks, which proxies may cut anywhere
_CUT_BYTES = 2_048  # where counts stand that may have been cut
_EVENT_BYTES = 16_384  # more than a stream's last event has
_MAX_HELD_BYTES = 256 * 1024  # of an incomplete chunk; beyond it, it is passed on as it comes


class Leg:
    """Sends a request at once on a pooled connection, or on a new one when there is none or that is stale.

    ``started``: the client has got a part of the response, and the rest follows.
    """

    __slots__ = (
        "_body",
        "_deadline_s",
        "_head",
        "_task",
        "attempt",
        "connection",
        "limit_s",
        "started",
        "target",
    )

    def __init__(self, attempt: Attempt, target: Target, head: bytes, body: Body, limit_s: float) -> None:
        """``limit_s`` is how long its answer may take."""
        self.attempt = attempt
        self.target = target
        self.limit_s = limit_s
        self.started = False
        self._deadline_s: float | None = None
        self._head = head
        self._body = body
        self._task: asyncio.Task[None] | None = None
        self.connection = connection = attempt.services.pool.take(target)
        if connection is None:
            self._connect()
        else:
            connection.send(self, head, body)

    def _connect(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._connect_and_send())

    def expect(self, limit_s: float) -> None:
        """What comes next should be here ``limit_s`` from now."""
        self.limit_s = limit_s
        self._deadline_s = None

    def is_late(self, now_s: float) -> bool:
        """Asked periodically. The limit counts from the first time: most answers are there before that."""
        if self._deadline_s is None:
            self._deadline_s = now_s + self.limit_s
        return now_s >= self._deadline_s

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

    def response_failed(self, failure: UpstreamFailure) -> None:
        self.connection = None
        if failure.stale:
            self._connect()
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
                self.connection = connection
                connection.send(self, self._head, self._body)
        except Exception:
            self.attempt.fail_unexpectedly()

    def _collect(self) -> list[bytes]:
        assert self.connection is not None
        sink = self.connection.sink = []
        return sink

    def _is_short(self, body_bytes: int) -> bool:
        """Whether the answer can be collected; gives the leg up when it cannot."""
        limit_bytes = self.attempt.services.settings.max_collected_bytes
        if body_bytes <= limit_bytes:
            return True
        self.abort()
        failure = UpstreamFailure(FailureKind.ERROR, f"the answer exceeds {limit_bytes} bytes")
        self.attempt.leg_failed(self, failure)
        return False

    # ResponseReceiver, completed by the subclasses

    def fail_unexpectedly(self) -> None:
        self.attempt.fail_unexpectedly()

    def response_whole(self, head: ResponseHead, body: bytes) -> None:
        raise NotImplementedError

    def response_head(self, head: ResponseHead) -> None:
        raise NotImplementedError

    def response_data(self, data: bytes) -> None:
        raise NotImplementedError

    def response_complete(self) -> None:
        raise NotImplementedError


class PrefillLeg(Leg):
    """Collects the prefill instance's answer."""

    __slots__ = ("_collected", "_response_head")

    def response_whole(self, head: ResponseHead, body: bytes) -> None:
        self.connection = None
        if self._is_short(len(body)):
            self._answered(head, body)

    def response_head(self, head: ResponseHead) -> None:
        self._response_head = head
        self._collected = self._collect()

    def response_data(self, data: bytes) -> None:
        self._is_short(sum(map(len, self._collected)))

    def response_complete(self) -> None:
        self.connection = None
        self._answered(self._response_head, b"".join(self._collected))

    def _answered(self, head: ResponseHead, body: bytes) -> None:
        if head.status >= 500:
            self.attempt.engine_error(self, head.status, body)
        else:
            self.attempt.prefill_answered(self, head, body)


class BootstrapLeg(PrefillLeg):
    """Asks the server beside the prefill instance where its KV will be."""

    __slots__ = ()

    def _answered(self, head: ResponseHead, body: bytes) -> None:
        self.attempt.bootstrap_answered(self, head, body)


class DecodeLeg(Leg):
    """Splices the decode instance's response to the client.

    Of an event stream only whole chunks are passed on, so that a stream which breaks can still be ended
    with an error event. Nothing is written before the first body byte: until then another instance can
    take over. ``events`` are the server-sent events passed on, the last one of the stream included.
    """

    __slots__ = (
        "_client_takes_chunks",
        "_counts",
        "_head_received",
        "_held",
        "_last",
        "_outbox",
        "_sink",
        "_tail",
        "_tail_before",
        "_transport",
        "_whole_chunks",
        "events",
        "reads",
        "reads_seen",
        "unread_bytes_seen",
    )

    def response_whole(self, head: ResponseHead, body: bytes) -> None:
        """There is nothing to follow; it begins and ends at the same time."""
        self.connection = None
        attempt = self.attempt
        if head.status >= 500:
            attempt.engine_error(self, head.status, body)
            return
        services = attempt.services
        now_s = services.clock()
        first = attempt.response_started(self, head, now_s)
        services.outbox.write(attempt.exchange.door.transport, first + body)
        usage, events = None, 0
        if head.event_stream:
            events = len(_ENDS_OF_EVENTS(body))
        if head.status < 300:
            usage = usage_from_tail(body[-_EVENT_BYTES:] if events else body)
        attempt.response_finished(usage, events, now_s)

    def response_head(self, head: ResponseHead) -> None:
        """It comes in pieces: what is needed to follow it is set up now."""
        attempt = self.attempt
        self._head_received = head
        self._outbox = attempt.services.outbox
        self._transport = attempt.exchange.door.transport
        self._counts = head.event_stream or head.content_length is None
        takes_chunks = self._client_takes_chunks = attempt.exchange.head.client_takes_chunks
        self._whole_chunks = head.chunked and head.event_stream and takes_chunks
        self._sink: list[bytes] | None = None
        if head.status >= 500 or (head.chunked and not takes_chunks):
            self._sink = self._collect()
        self._held = self._last = self._tail = self._tail_before = b""
        self.events = self.reads = self.reads_seen = self.unread_bytes_seen = 0

    def response_data(self, data: bytes) -> None:
        self.reads += 1
        if self._sink is not None:
            if self._head_received.status >= 500:
                self._is_short(sum(map(len, self._sink)))
                return
            data = b"".join(self._sink)
            self._sink.clear()
        elif self._whole_chunks:
            connection = self.connection
            assert connection is not None and connection.framer is not None
            if self._held or connection.framer.boundary != len(data):
                data = self._hold_back(data, connection.framer)
        if not data:
            return
        if self._counts:
            self.events += len(_ENDS_OF_EVENTS(data))
            if data[0] == _LINE_FEED and self._last[-1:] == b"\n" and self._last[-2:] != b"\n\n":
                self.events += 1
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
        attempt, head = self.attempt, self._head_received
        if head.status >= 500:
            attempt.engine_error(self, head.status, b"".join(self._sink or ()))
            return
        if not self.started:
            self._start(b"")
        usage = self._usage(head) if head.status < 300 else None
        attempt.response_finished(usage, self.events, attempt.services.clock())

    def end_broken_stream(self, message: str) -> bool:
        """Finish the client's event stream with an error event; False where that is impossible."""
        head = self._head_received
        if not head.event_stream or head.encoded:
            return False
        event = error_shape(self.attempt.exchange.head.endpoint).last_event(message, self._last)
        if head.chunked and self._client_takes_chunks:
            if not self._whole_chunks or not self._last.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n")):
                return False
            self._outbox.write(self._transport, b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            return True
        if head.content_length is not None or not self._last.endswith((b"\n\n", b"\r\n\r\n")):
            return False
        self._outbox.write(self._transport, event)
        return True

    def _start(self, data: bytes) -> None:
        attempt = self.attempt
        first = attempt.response_started(self, self._head_received, attempt.services.clock()) + data
        self.started = True
        self.expect(attempt.services.settings.stall_timeout_s)
        self._body = self._head = b""  # it cannot be sent again
        self._outbox.write(self._transport, first)

    def _usage(self, head: ResponseHead) -> Usage:
        tail = self._tail
        if head.event_stream:  # what comes last is an event, which is short
            tail = tail[-_EVENT_BYTES:]
        if len(tail) <= 4_096:
            tail = self._tail_before + tail
        if head.chunked:
            tail = tail[:-_CUT_BYTES] + _SEAM.sub(b"", tail[-_CUT_BYTES:])
        return usage_from_tail(tail)

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
