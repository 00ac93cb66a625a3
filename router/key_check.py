"""Keys on the REST API: any key may list models, some may register engines, the rest is for administrators."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api_keys import KeyRing
from router.errors import RequestError

# The console's page and scripts are no secrets; what they show, they ask for with the key that they are given.
_CONSOLE = "/ui"
_OPEN = frozenset(
    (_CONSOLE, "/health", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
)


class KeyCheck:
    """ASGI middleware; inference requests never come here. ``open_models``: anybody may list models."""

    def __init__(self, app: ASGIApp, keys: KeyRing, *, open_models: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._open_models = open_models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                self._check(scope)
            except RequestError as error:
                answer = Response(error.body(), error.status, media_type="application/json")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        if path in _OPEN or path.startswith(f"{_CONSOLE}/"):
            return True
        return self._open_models and _lists_models(path)

    def _check(self, scope: Scope) -> None:
        key, _ = self._keys.identify(scope["headers"])
        path: str = scope["path"]
        if key.admin or _lists_models(path) or (key.registers and _registers(scope)):
            return
        message = f"The key {key.name!r} may not use {path}; that takes a key with 'admin: true'."
        raise RequestError(403, message, kind="permission_error", code="not_an_admin")


def _lists_models(path: str) -> bool:
    return path == "/v1/models" or path.startswith("/v1/models/")


def _registers(scope: Scope) -> bool:
    """Whether it is what `conductor register` asks: nobody else's instance can be meant."""
    path: str = scope["path"]
    method: str = scope["method"]
    if not path.startswith("/v1/instances/"):
        return False
    _, slash, below = path.removeprefix("/v1/instances/").partition("/")
    if slash:
        return below == "heartbeat" and method == "POST"
    asked = parse_qs(scope["query_string"].decode("latin-1"))
    return (
        method == "GET"
        or (method == "PUT" and "ttl_s" in asked)
        or (method == "DELETE" and asked.get("registered") == ["true"])
    )
