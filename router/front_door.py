"""The connection of a client: uvicorn's protocol, with inference requests taken over before ASGI.

Everything else a connection may carry (the REST API, metrics, docs) goes to the ASGI application as usual;
both kinds of requests may alternate, and be pipelined, on one connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any, ClassVar, Final, cast
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import RequestError, status_line
from router.exchange import Exchange
from router.framing import MAX_HEAD_BYTES
from router.heads import Headers
from router.inference import PATHS, Body, Endpoint
from router.known_heads import CutHead, KnownHead
from router.pick_exchange import PREFIX, PickExchange
from router.request_head import RequestHead
from router.services import RouterServices

_ROUTES: Final[dict[bytes, tuple[Endpoint, type[Exchange]]]] = {
    prefix + path.encode("ascii"): (endpoint, kind)
    for prefix, kind in ((b"", Exchange), (PREFIX, PickExchange))
    for path, endpoint in PATHS.items()
}

_SMALL_PIECE_BYTES: Final = 4_096
_PIECE_BYTES: Final = 65_536
_VIEWED_BYTES: Final = 32_768  # of a body: copying less is quicker than what a view costs


class FrontDoorProtocol(HttpToolsProtocol):
    """Bound to its services by :func:`front_door_protocol`; uvicorn makes one instance per connection."""

    services: ClassVar[RouterServices]

    active: Any  # the exchange or ASGI cycle that is being answered
    cycle: Any
    pipeline: deque[Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.active = None
        self._lingering: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = None
        self._undelivered_bytes = 0  # read since the parser last delivered a head or a part of a body
        self._without_upgrade: bytes | None = None  # the head of a request that also offers another protocol
        self._between_requests = True  # all that was read so far were whole requests
        self._known: KnownHead | None = None  # the head that came last
        self._cut: CutHead | None = None  # the head that the parser reads next
        self._pieces: list[bytes | bytearray | memoryview] = []  # of the body that follows a known head
        self._missing_bytes = 0  # of that body
        transport.set_write_buffer_limits(self.services.settings.client_buffer_bytes)
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        active = self.active
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self.pipeline.clear()
        self._pieces.clear()
        if self._lingering is not None:
            self._lingering.cancel()
        if isinstance(active, Exchange):
            active.client_lost()
        elif active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()
        self.active = self.cycle = None  # which name this connection: without a cycle both are freed now

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        self._idle_since_s = None
        if self._missing_bytes:
            data = self._receive_rest(data)
        elif self._between_requests and (self.cycle is None or self.cycle.response_complete):
            data = self._receive_known(data)
        if not data or self._lingering is not None:
            return
        self._undelivered_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised
            self._refuse(cause if isinstance(cause, RequestError) else _malformed())
        else:
            if self._undelivered_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_long())

    def _receive_known(self, data: bytes) -> bytes:
        """Take a request whose head is known. Returns what is left for the parser: all, or what comes behind."""
        known, services = self._known, self.services
        if known is None or (begun := known.begins(data)) is None:
            found = services.known_heads.look_up(data)
            if not isinstance(found, KnownHead):
                self._cut = found
                return data
            known = self._known = found
            if (begun := known.begins(data)) is None:
                return data
        start, end = begun
        if end - start > services.settings.max_body_bytes:
            return data
        whole = end <= len(data)
        body: Body | None = None
        if whole:
            body = data[start:end] if end - start < _VIEWED_BYTES else memoryview(data)[start:end]
        self.cycle = exchange = known.kind(self, known.head, body)
        if services.keys is not None:
            exchange.authenticate(services.keys)
        exchange.activate()
        if whole:
            return data[end:]
        self._pieces.append(memoryview(data)[start:])
        self._missing_bytes = end - len(data)
        return b""

    def _receive_rest(self, data: bytes) -> bytes:
        """Of the body that follows a known head. Returns what comes behind it."""
        missing = self._missing_bytes
        if len(data) < missing:
            self._missing_bytes -= len(data)
            self._keep_piece(data)
            return b""
        self._missing_bytes = 0
        self._pieces.append(data[:missing])
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.cycle.receive_body(body)
        self.cycle.end_of_request()
        return data[missing:]

    def _keep_piece(self, data: bytes) -> None:
        """Small ones are put together: each would take several times its size."""
        last = self._pieces[-1]
        if len(data) >= _SMALL_PIECE_BYTES:
            self._pieces.append(data)
        elif isinstance(last, bytearray) and len(last) < _PIECE_BYTES:
            last += data
        else:
            self._pieces.append(bytearray(data))

    def _parse(self, data: bytes) -> None:
        """A request that offers another protocol (Java's client: HTTP/2) is answered as any other, with its body.

        The parser stops behind such a head, for what follows could be of that protocol; none is spoken here.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                if self._without_upgrade is None:
                    self._between_requests = False
                    return  # a tunnel, which was refused
                data = self._without_upgrade + data[stopped.args[0] :]
                self._without_upgrade = None
                self.parser = httptools.HttpRequestParser(self)

    def shutdown(self) -> None:
        self.services.outbox.flush()
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self.active, Exchange):
            self.active.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self.active, Exchange):
            self.active.resume()

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._between_requests = False
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        url = self.url
        headers, self.headers = self.headers, []  # what comes now are trailers, which nobody reads
        cut, self._cut = self._cut, None
        if self._undelivered_bytes > MAX_HEAD_BYTES and _head_bytes(url, headers) > MAX_HEAD_BYTES:
            raise _head_too_long()
        self._undelivered_bytes = 0
        if self._lingering is not None:
            return  # nothing is answered any more
        for name, value in headers:
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise _encoded(value)
        parser = self.parser
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            version = parser.get_http_version().encode("ascii")
            self._without_upgrade = _head(parser.get_method(), url, version, headers, without=b"upgrade")
            return
        route = _ROUTES.get(url)
        if route is None:
            url = _origin_form(url)
            route = _ROUTES.get(url.partition(b"?")[0])
        if route is None or parser.get_method() != b"POST":
            self._hand_to_application(headers)
            return
        endpoint, kind = route
        http_1_1 = parser.get_http_version() == "1.1"
        head = RequestHead(
            endpoint,
            url,
            headers,
            keep_alive=http_1_1 and parser.should_keep_alive(),
            client_takes_chunks=http_1_1,
            expects_continue=self.expect_100_continue,
        )
        if cut is not None and not head.expects_continue and cut.agrees(headers):
            self.services.known_heads.keep(cut, head, kind)
        exchange = kind(self, head)
        if self.services.keys is not None:
            exchange.authenticate(self.services.keys)
        for name, value in headers:
            if name == b"content-length":
                exchange.announce_length(int(value))
        earlier, self.cycle = self.cycle, exchange
        if earlier is None or earlier.response_complete:
            exchange.activate()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def on_body(self, body: bytes) -> None:
        self._undelivered_bytes = 0
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.receive_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._undelivered_bytes = 0
        if self._without_upgrade is not None:
            return
        self._between_requests = True
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.end_of_request()
        else:
            super().on_message_complete()

    def _hand_to_application(self, headers: Headers) -> None:
        url, expects_continue = self.url, self.expect_100_continue
        super().on_message_begin()  # builds the ASGI scope, which inference requests do without
        self.url, self.headers, self.expect_100_continue = url, [], expects_continue
        self.scope["headers"] = headers
        super().on_headers_complete()

    # Responses

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Also called with the next pipelined request, whichever kind it is."""
        if isinstance(cycle, Exchange):
            self.loop.call_soon(cycle.activate)  # not at once: a long pipeline must not recurse
        else:
            self.active = cycle
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """As uvicorn's, but for its timer: that is wound when it has run down, not by every request."""
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch_idle(self.timeout_keep_alive)

    def _watch_idle(self, delay_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(delay_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since_s is None:
            return  # busy: the end of its response winds the timer
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._watch_idle(left_s)
        else:
            self.timeout_keep_alive_handler()

    def exchange_finished(self, exchange: Exchange) -> None:
        """The response is written. What follows on this connection can begin."""
        self.active = None
        if exchange.keep_alive:
            self.on_response_complete()
        elif exchange.more_body and not self.transport.is_closing():
            self._linger()
        else:
            self.services.outbox.flush()
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """The bytes that came last are no request, or not the rest of one: what follows cannot be read."""
        self._between_requests = False
        cycle, active = self.cycle, self.active
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            if isinstance(cycle, Exchange):
                cycle.refuse(error)
                return
            if cycle is active:
                cycle.disconnected = True  # the application may be waiting for the rest
                cycle.message_event.set()
                if cycle.response_started:
                    self.transport.close()
                    return
                active = None
        if active is not None and not active.response_complete:
            active.keep_alive = False  # the connection is closed behind its response
            self.flow.pause_reading()
            return
        body = error.body()
        self.services.outbox.write(
            self.transport,
            b"%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status_line(error.status), len(body), body),
        )
        self._linger()

    def _linger(self) -> None:
        """Close without losing the response: unread input would make the kernel reset the connection."""
        self.services.outbox.flush()
        transport = self.transport
        if transport.can_write_eof():
            transport.write_eof()
        self._lingering = self.loop.call_later(self.services.settings.linger_s, transport.close)
        self.flow.resume_reading()


def front_door_protocol(services: RouterServices) -> type[FrontDoorProtocol]:
    """The protocol class to give to ``uvicorn.Config(http=...)``."""
    return cast(
        "type[FrontDoorProtocol]", type("FrontDoorProtocol", (FrontDoorProtocol,), {"services": services})
    )


def _origin_form(url: bytes) -> bytes:
    """Path and query of a request's target, which may name the host too, or write its path with percent signs."""
    if url[:1] != b"/" or b"#" in url:
        parsed = httptools.parse_url(url)
        url = (parsed.path or b"/") + (b"" if parsed.query is None else b"?" + parsed.query)
    path, mark, query = url.partition(b"?")
    decoded = unquote_to_bytes(path)
    return (decoded if decoded in _ROUTES else path) + mark + query


def _head(method: bytes, url: bytes, version: bytes, headers: Headers, *, without: bytes) -> bytes:
    lines = [b"%b: %b\r\n" % field for field in headers if field[0] != without]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version, b"".join(lines))


def _head_bytes(url: bytes, headers: Headers) -> int:
    return len(url) + sum(len(name) + len(value) for name, value in headers)


def _head_too_long() -> RequestError:
    message = f"The request's head exceeds {MAX_HEAD_BYTES} bytes. Send fewer or shorter header fields."
    return RequestError(431, message, code="headers_too_large")


def _encoded(coding: bytes) -> RequestError:
    message = (
        f"The transfer encoding {coding.decode('latin-1')!r} is not understood here. Send the body as it is, with "
        "its length or chunked."
    )
    return RequestError(400, message, code="unsupported_transfer_encoding")


def _malformed() -> RequestError:
    message = "Invalid HTTP request received. The connection is closed."
    return RequestError(400, message, code="invalid_http")
