"""Requests that are not inference, passed on to the conductor's REST API: every worker answers them alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx
import structlog
from starlette.types import Receive, Scope, Send

from router.errors import RequestError
from router.framing import HOP_BY_HOP

logger = structlog.get_logger("router")

_NOT_PASSED_ON = HOP_BY_HOP | {b"transfer-encoding"}
_TIMEOUTS = httpx.Timeout(None, connect=5.0)
# As many as are asked for: a hundred slow clients, or a conductor that hangs, must not keep the others waiting.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class PassedOn:
    """ASGI application over HTTP on a Unix socket, or to a URL that may change; bodies are streamed both ways.

    Without a URL (None) nobody is there to be asked.
    """

    def __init__(
        self, rest_socket: str | None, url: Callable[[], str | None] = lambda: "http://conductor"
    ) -> None:
        self._transport = httpx.AsyncHTTPTransport(uds=rest_socket, limits=_LIMITS)
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        url = self._url()
        if url is None:
            await _refuse(send)
            return
        try:
            response = await self._transport.handle_async_request(await _request(url, scope, receive))
        except httpx.TransportError as error:
            logger.warning("the conductor did not answer", path=scope["path"], error=repr(error))
            await _refuse(send)
            return
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": _end_to_end(response.headers.raw),
                }
            )
            async for data in response.aiter_raw():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await response.aclose()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._transport.aclose()
        await send({"type": "lifespan.shutdown.complete"})


async def _request(base: str, scope: Scope, receive: Receive) -> httpx.Request:
    path = scope.get("raw_path") or scope["path"].encode("ascii")
    query = scope["query_string"]
    target = path + b"?" + query if query else path
    url = httpx.URL(base).copy_with(raw_path=target)
    first = await receive()
    body = first.get("body", b"")
    headers = _end_to_end(scope["headers"])
    extensions = {"timeout": _TIMEOUTS.as_dict()}
    if first.get("more_body"):
        content = _Body(body, receive)
        if not any(name == b"content-length" for name, _ in headers):
            headers.append((b"transfer-encoding", b"chunked"))
        return httpx.Request(scope["method"], url, headers=headers, stream=content, extensions=extensions)
    return httpx.Request(scope["method"], url, headers=headers, content=body, extensions=extensions)


class _Body(httpx.AsyncByteStream):
    """Raises httpx.ReadError when the client leaves in the middle of it."""

    def __init__(self, first: bytes, receive: Receive) -> None:
        self._first = first
        self._receive = receive

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise httpx.ReadError("the client left in the middle of its request")
            if event.get("body"):
                yield event["body"]
            if not event.get("more_body"):
                return


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED_ON]


async def _refuse(send: Send) -> None:
    error = RequestError(
        503, "The conductor does not answer.", kind="service_unavailable", code="conductor_unavailable"
    )
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})
