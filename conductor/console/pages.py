"""The console's files over HTTP. They are the same for everybody: what is secret comes over the REST API."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The page runs its own scripts and styles, asks its own server, and is shown in no frame. Nothing becomes a script
# by being put into the page.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept by browsers, and asked about each time: a new version shows at once
}


def make_console_routes() -> APIRouter:
    """`/ui` and below, not in the OpenAPI document. The files are read once, here."""
    router = APIRouter(include_in_schema=False)
    known = {
        path.name: _page(path.name, path.read_bytes())
        for path in files("conductor.console").joinpath("static").iterdir()
        if path.name.rpartition(".")[2] in _TYPES
    }

    @router.get("/ui")
    async def without_slash() -> Response:
        return RedirectResponse("ui/", status_code=307)  # relative: whatever path a proxy has put before it

    @router.get("/ui/")
    async def index(request: Request) -> Response:
        return _answer(known["index.html"], request)

    @router.get("/ui/{name}")
    async def file(name: str, request: Request) -> Response:
        if name not in known:
            raise HTTPException(404, f"the console has no file {name!r}")
        return _answer(known[name], request)

    return router


class _Page:
    """One file with what is told of it."""

    __slots__ = ("content", "headers")

    def __init__(self, content: bytes, headers: dict[str, str]) -> None:
        self.content = content
        self.headers = headers


def _page(name: str, content: bytes) -> _Page:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return _Page(content, {**_HEADERS, "content-type": _TYPES[name.rpartition(".")[2]], "etag": tag})


def _answer(page: _Page, request: Request) -> Response:
    if request.headers.get("if-none-match") == page.headers["etag"]:
        return Response(status_code=304, headers=page.headers)
    return Response(page.content, headers=page.headers)
