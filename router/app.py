"""The ASGI application beside the data path: models, health, metrics, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from conductor.placement import ModelCard
from router.api_keys import KeyRing
from router.body_limit import BodyLimit
from router.errors import error_document
from router.inference import PATHS, Endpoint
from router.key_check import KeyCheck
from router.services import RouterServices, logger

_SUMMARIES = {
    Endpoint.CHAT: "Chat completion, streamed or not",
    Endpoint.COMPLETIONS: "Text completion, streamed or not",
    Endpoint.RESPONSES: "OpenAI's Responses API, streamed or not",
    Endpoint.MESSAGES: "Anthropic's Messages API, streamed or not",
    Endpoint.EMBEDDINGS: "Embeddings",
    Endpoint.RERANK: "Documents ranked by a query",
    Endpoint.SCORE: "Scores of pairs of texts",
    Endpoint.TOKENS: "vLLM's tokens in, tokens out, streamed or not",
    Endpoint.GENERATE: "SGLang's generation from text or token ids, streamed or not",
    Endpoint.TOKENIZE: "Token ids of a prompt or chat",
    Endpoint.DETOKENIZE: "Text of token ids",
}


_NOT_SERVED = {
    "description": "It is not served here.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {"type": "object", "required": ["message", "type", "param", "code"]},
                },
            }
        }
    },
}


def create_app(
    services: RouterServices,
    *,
    not_ready_reason: Callable[[], str | None] = lambda: None,
    routers: Iterable[APIRouter] = (),
    keys: KeyRing | None = None,
    exposition: Callable[[], Awaitable[bytes]] | None = None,
    details: Callable[[], dict[str, Any]] = dict,
    title: str = "Conductor",
    version: str = "0.1.0",
) -> FastAPI:
    """``not_ready_reason`` says why requests cannot be served now, or returns None when they can.

    ``keys`` are asked for here even where inference is open to all; without them, those of the services are.
    ``details`` stand beside the status in what `/health` answers. ``exposition`` are the metrics in
    Prometheus' text format, by default those of the services' registry.
    """
    app = FastAPI(title=title, version=version)
    keys = services.keys if keys is None else keys
    app.add_middleware(BodyLimit, max_body_bytes=services.settings.max_body_bytes)
    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys, open_models=services.keys is None)
    if services.cors is not None:  # around the check of keys: browsers ask first without one
        app.add_middleware(CORSMiddleware, **services.cors.middleware_options())
    app.include_router(_openai_routes(services))
    app.include_router(_inference_routes())
    app.include_router(_operations_routes(services, not_ready_reason, exposition, details))
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)

    async def unexpected_error(request: Request, error: Exception) -> Response:
        answer = await _unexpected_error(request, error)
        if services.cors is not None:  # this answer is made outside of the middleware
            answer.headers.update(services.cors.answer_fields(request.headers.raw))
        return answer

    app.add_exception_handler(Exception, unexpected_error)
    return app


def _openai_routes(services: RouterServices) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["inference"])

    @router.get("/models", summary="List the models that are served")
    async def list_models() -> dict[str, Any]:
        cards = services.placements.models()
        return {"object": "list", "data": [entry for card in cards for entry in _model_entries(card)]}

    @router.get("/models/{model:path}", summary="One model", responses={404: _NOT_SERVED})
    async def get_model(model: str) -> Response:
        for card in services.placements.models():
            for entry in _model_entries(card):
                if entry["id"] == model:
                    return JSONResponse(entry)
        message = f"The model {model!r} is not served here. GET /v1/models lists those that are."
        return _error(404, message, param="model", code="model_not_found")

    return router


def _inference_routes() -> APIRouter:
    router = APIRouter(tags=["inference"])

    def inference(request: Request) -> Response:
        """Served by the connection protocol before ASGI; reached only behind another server."""
        message = (
            "Inference needs the router's own protocol: serve this application with router.FrontDoorServer."
        )
        return _error(501, message, kind="server_error", code="not_behind_front_door")

    for path, endpoint in PATHS.items():
        router.add_api_route(path, inference, methods=["POST"], summary=_SUMMARIES[endpoint])
    return router


def _operations_routes(
    services: RouterServices,
    not_ready_reason: Callable[[], str | None],
    exposition: Callable[[], Awaitable[bytes]] | None,
    details: Callable[[], dict[str, Any]],
) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health", summary="200 when inference requests can be served")
    async def health() -> Response:
        reason = not_ready_reason()
        if reason is None:
            return JSONResponse({"status": "ok", **details()})
        return JSONResponse({"status": "unavailable", "reason": reason, **details()}, status_code=503)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        text = generate_latest(services.metrics.registry) if exposition is None else await exposition()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _model_entries(card: ModelCard) -> list[dict[str, Any]]:
    entry = {
        "id": card.model,
        "object": "model",
        "created": 0,
        "owned_by": "conductor",
        "root": card.model,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "instances": card.instances,
    }
    return [entry, *({**entry, "id": alias} for alias in card.aliases)]


def _error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    document = error_document(message, kind, param=param, code=code)
    return JSONResponse(document, status_code=status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message, code = str(error.detail), None
    if status == 404 and error.detail == "Not Found":
        message, code = f"{request.method} {request.url.path} does not exist here.", "not_found"
    elif status == 405:
        allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow") or "another method"
        message = f"{request.method} is not allowed on {request.url.path}; use {allowed}."
        code = "method_not_allowed"
    elif status == 413:
        code = "request_too_large"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _error(status, message, kind=kind, code=code, headers=dict(error.headers or {}))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return _error(422, f"{param or 'request'}: {first['msg']}", param=param or None, code="validation_error")


async def _client_gone(request: Request, error: Exception) -> Response:
    """In the middle of its request; nobody reads this answer."""
    return Response(status_code=400)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("request failed unexpectedly", path=request.url.path, exc_info=error)
    message = "An internal error occurred; the server's log has the details."
    return _error(500, message, kind="server_error", code="internal_error")
