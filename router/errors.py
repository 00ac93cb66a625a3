"""Errors as OpenAI clients understand them: one shape for every failure of the front door."""

from __future__ import annotations

from http import HTTPStatus

import orjson


class RequestError(Exception):
    """An answer other than the engine's: HTTP status and the fields of an OpenAI error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body ``{"error": {message, type, param, code}}``."""
        return orjson.dumps(error_document(self.message, self.kind, param=self.param, code=self.code))


def error_document(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, str | None]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_line(status: int) -> bytes:
    """``HTTP/1.1 404 Not Found`` without the line end; an unknown status gets no phrase."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}".encode("ascii")


def internal_error() -> RequestError:
    message = "The router met an internal error; its log has the details."
    return RequestError(500, message, kind="server_error", code="internal_error")


def too_long(limit_bytes: int) -> RequestError:
    message = (
        f"The request body exceeds {limit_bytes} bytes. Send a shorter one, or raise 'server.max_body_bytes' "
        "in the configuration."
    )
    return RequestError(413, message, code="request_too_large")


class TokenizationError(Exception):
    """The prompt cannot be tokenized here; the message says why."""
