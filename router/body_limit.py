"""Bodies on the REST API are as bounded as those of inference requests."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import too_long


class BodyLimit:
    """ASGI middleware: who reads a body that is longer, declared or not, gets an HTTPException of status 413."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        left_bytes = self._max_body_bytes
        too_many = declared.isdigit() and int(declared) > left_bytes

        async def bounded() -> Message:
            nonlocal left_bytes
            if not too_many:
                message = await receive()
                left_bytes -= len(message.get("body", b""))
                if left_bytes >= 0:
                    return message
            # The connection stays: closed with bytes unread, it would take the answer along.
            raise HTTPException(413, too_long(self._max_body_bytes).message)

        await self._app(scope, bounded, send)
