"""An inference request as the router understands it: parsed once, checked, its bytes kept as they came."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import orjson

from conductor.placement import Tokens
from router.errors import RequestError


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class InferenceRequest:
    """``body`` are the bytes the client sent, ``document`` their parsed form, to be read only."""

    endpoint: Endpoint
    body: bytes | bytearray
    document: dict[str, Any]
    model: str
    stream: bool
    max_output_tokens: int | None
    cache_salt: str | None

    def release(self) -> None:
        """The request will not be sent again: let go of what may be megabytes."""
        self.body = b""
        self.document = {}


def parse_inference(endpoint: Endpoint, body: bytes | bytearray) -> InferenceRequest:
    """Check what the router relies on; the rest is the engine's to judge. Raises RequestError (400)."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = (
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos}). Send a JSON object, UTF-8 encoded."
        )
        raise RequestError(400, message, code="invalid_json") from None
    if not isinstance(document, dict):
        _reject(None, f"The request body must be a JSON object, not {_json_type(document)}.")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        if "model" in document:
            _reject("model", f"'model' must be a non-empty string, not {_json_type(model)}.")
        _reject("model", "'model' is missing. GET /v1/models lists the models that are served.")
    if endpoint is Endpoint.CHAT:
        _check_messages(document)
    else:
        _check_prompt(document)
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        _reject("stream", f"'stream' must be true or false, not {_json_type(stream)}.")
    _integer(document, "n", minimum=1)
    limit = _integer(document, "max_tokens", minimum=0)
    completion_limit = _integer(document, "max_completion_tokens", minimum=0)
    salt = document.get("cache_salt")
    return InferenceRequest(
        endpoint=endpoint,
        body=body,
        document=document,
        model=model,
        stream=bool(stream),
        max_output_tokens=limit if completion_limit is None else completion_limit,
        cache_salt=salt if isinstance(salt, str) and salt else None,
    )


def _check_messages(document: dict[str, Any]) -> None:
    messages = document.get("messages")
    if messages is None:
        _reject("messages", "'messages' is missing. Send a list of objects with 'role' and 'content'.")
    if not isinstance(messages, list):
        _reject("messages", f"'messages' must be a list of objects, not {_json_type(messages)}.")
    if not messages:
        _reject("messages", "'messages' is empty. Send at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            _reject(f"messages[{index}]", f"messages[{index}] must be an object with a string 'role'.")


def _check_prompt(document: dict[str, Any]) -> None:
    prompt = document.get("prompt")
    if prompt is None:
        if document.get("prompt_embeds") is not None:
            return
        _reject("prompt", "'prompt' is missing. Send a string, a list of token ids, or a list of either.")
    if not isinstance(prompt, str | list):
        _reject("prompt", f"'prompt' must be a string or a list, not {_json_type(prompt)}.")
    if not prompt:
        _reject("prompt", "'prompt' is empty. Send at least one character or token id.")


def _integer(document: dict[str, Any], name: str, *, minimum: int) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        _reject(name, f"'{name}' must be an integer, not {_json_type(value)}.")
    if value < minimum:
        _reject(name, f"'{name}' must be at least {minimum}, not {value}.")
    return value


def _reject(param: str | None, message: str) -> NoReturn:
    raise RequestError(400, message, param=param)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return "a list" if isinstance(value, list) else "an object"


def first_prompt(prompt: Any) -> Any:
    """The first prompt of a batch: a string or a list of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


def truncated(tokens: Tokens, document: dict[str, Any]) -> Tokens:
    """The last tokens of a prompt, as many as ``truncate_prompt_tokens`` lets an engine keep."""
    kept = document.get("truncate_prompt_tokens")
    return tokens[-kept:] if isinstance(kept, int) and 0 < kept < len(tokens) else tokens
