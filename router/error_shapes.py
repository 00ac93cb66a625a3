"""How each API says that something went wrong: the body of an error, and the last event of a broken stream."""

from __future__ import annotations

import re
from typing import Final, Protocol

import orjson

from router.errors import RequestError, error_document
from router.inference import Endpoint

_INTERRUPTED: Final = "stream_interrupted"


class ErrorShape(Protocol):
    """Implementations are stateless."""

    def body(self, error: RequestError, request_id: str) -> bytes:
        """The JSON body of an answer with the error's status."""

    def last_event(self, message: str, sent: bytes) -> bytes:
        """Server-sent events that end a stream for good; ``sent`` are the last bytes it has shown so far."""


class OpenAiErrors:
    """``{"error": {...}}``; clients read a stream until ``[DONE]``."""

    def body(self, error: RequestError, request_id: str) -> bytes:
        return error.body()

    def last_event(self, message: str, sent: bytes) -> bytes:
        document = error_document(message, "upstream_error", code=_INTERRUPTED)
        return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(document)


class ResponsesErrors(OpenAiErrors):
    """A stream of responses is numbered, and ends with an event of type ``error``."""

    _NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d+)')

    def last_event(self, message: str, sent: bytes) -> bytes:
        numbers = self._NUMBER.findall(sent)
        document = {
            "type": "error",
            "code": _INTERRUPTED,
            "message": message,
            "param": None,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: %b\n\n" % orjson.dumps(document)


class AnthropicErrors:
    """``{"type": "error", "error": {"type", "message"}}``, in answers and in streams alike."""

    _TYPES: Final = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }

    def body(self, error: RequestError, request_id: str) -> bytes:
        kind = self._TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return orjson.dumps({**_anthropic_error(kind, error.message), "request_id": request_id})

    def last_event(self, message: str, sent: bytes) -> bytes:
        return b"event: error\ndata: %b\n\n" % orjson.dumps(_anthropic_error("api_error", message))


def _anthropic_error(kind: str, message: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": kind, "message": message}}


_OPENAI: Final = OpenAiErrors()
_OTHERS: Final[dict[Endpoint, ErrorShape]] = {
    Endpoint.RESPONSES: ResponsesErrors(),
    Endpoint.MESSAGES: AnthropicErrors(),
}


def error_shape(endpoint: Endpoint) -> ErrorShape:
    return _OTHERS.get(endpoint, _OPENAI)
