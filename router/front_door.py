"""The connection of a client: uvicorn's protocol, with inference requests taken over before ASGI.

Everything else a connection may carry (the REST API, metrics, docs) goes to the ASGI application as usual;
both kinds of requests may alternate, and be pipelined, on one connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import RequestError, status_line
from router.exchange import Exchange
from router.inference import PATHS
from router.services import RouterServices

INFERENCE_PATHS = {path.encode("ascii"): endpoint for path, endpoint in PATHS.items()}


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
        transport.set_write_buffer_limits(self.services.settings.client_buffer_bytes)
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        active = self.active
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._lingering is not None:
            self._lingering.cancel()
        if isinstance(active, Exchange):
            active.client_lost()
        elif active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._lingering is None:
            super().data_received(data)

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
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        url = self.url
        endpoint = INFERENCE_PATHS.get(url) or INFERENCE_PATHS.get(url.partition(b"?")[0])
        if endpoint is None or self.parser.get_method() != b"POST":
            self._hand_to_application()
            return
        parser = self.parser
        http_1_1 = parser.get_http_version() == "1.1"
        exchange = Exchange(
            self,
            endpoint,
            url,
            self.headers,
            keep_alive=http_1_1 and parser.should_keep_alive() and not parser.should_upgrade(),
            client_takes_chunks=http_1_1,
            expects_continue=self.expect_100_continue,
        )
        if self.services.keys is not None:
            exchange.authenticate(self.services.keys)
        for name, value in self.headers:
            if name == b"content-length":
                exchange.announce_length(int(value))
        earlier, self.cycle = self.cycle, exchange
        if earlier is None or earlier.response_complete:
            exchange.activate()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.receive_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.end_of_request()
        else:
            super().on_message_complete()

    def _hand_to_application(self) -> None:
        url, headers, expects_continue = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # builds the ASGI scope, which inference requests do without
        self.url, self.headers, self.expect_100_continue = url, headers, expects_continue
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

    def exchange_finished(self, exchange: Exchange) -> None:
        """The response is written. What follows on this connection can begin."""
        self.active = None
        if exchange.keep_alive:
            self.on_response_complete()
        elif exchange.more_body and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()
            self.server_state.total_requests += 1

    def send_400_response(self, msg: str) -> None:
        active = self.active
        if active is not None and not active.response_complete:
            # The bytes behind the request in progress are garbage: finish it, then close.
            active.keep_alive = False
            self.flow.pause_reading()
            return
        body = RequestError(400, f"{msg} The connection is closed.", code="invalid_http").body()
        self.transport.write(
            b"%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status_line(400), len(body), body)
        )
        self.transport.close()

    def _linger(self) -> None:
        """Close without losing the response: unread input would make the kernel reset the connection."""
        transport = self.transport
        if transport.can_write_eof():
            transport.write_eof()
        self._lingering = self.loop.call_later(self.services.settings.linger_s, transport.close)
        self.flow.resume_reading()
        self.server_state.total_requests += 1


def front_door_protocol(services: RouterServices) -> type[FrontDoorProtocol]:
    """The protocol class to give to ``uvicorn.Config(http=...)``."""
    return cast(
        "type[FrontDoorProtocol]", type("FrontDoorProtocol", (FrontDoorProtocol,), {"services": services})
    )
