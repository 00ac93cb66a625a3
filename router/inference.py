"""An inference request as the router understands it: parsed once, checked, its bytes kept as they came."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import msgspec
import orjson

from conductor.placement import Tokens
from router import request_fields
from router.errors import RequestError
from router.request_fields import integer, json_type, reject


class Endpoint(StrEnum):
    """What is asked of an engine; the value is its path, and the metrics' label.

    It ``generates`` where the answer is generated token by token, and may be streamed. It ``computes`` where the
    model runs; where it does not, any instance will do and no load is reserved.
    """

    path: str
    generates: bool
    computes: bool
    __hash__ = str.__hash__  # an enumeration's own is written in Python

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"  # Anthropic's
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    TOKENS = "/inference/v1/generate"  # vLLM's: token ids in, token ids out
    GENERATE = "/generate"  # SGLang's
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


_GENERATING: Final = frozenset(
    (
        Endpoint.CHAT,
        Endpoint.COMPLETIONS,
        Endpoint.RESPONSES,
        Endpoint.MESSAGES,
        Endpoint.TOKENS,
        Endpoint.GENERATE,
    )
)
for _endpoint in Endpoint:
    _endpoint.path = str(_endpoint.value)
    _endpoint.generates = _endpoint in _GENERATING
    _endpoint.computes = _endpoint not in (Endpoint.TOKENIZE, Endpoint.DETOKENIZE)

# Engines' own APIs: their clients need not name the model, for an engine has one.
_MODEL_OPTIONAL: Final = frozenset((Endpoint.TOKENS, Endpoint.GENERATE))
_SGLANG_OUTPUT_TOKENS: Final = 128  # where a request does not say

PATHS: Final = {endpoint.value: endpoint for endpoint in Endpoint} | {
    "/rerank": Endpoint.RERANK,
    "/score": Endpoint.SCORE,
}

_CHECKS: Final[dict[Endpoint, Callable[[dict[str, Any]], None]]] = {
    Endpoint.CHAT: request_fields.check_chat,
    Endpoint.COMPLETIONS: request_fields.check_completion,
    Endpoint.RESPONSES: request_fields.check_responses,
    Endpoint.MESSAGES: request_fields.check_messages,
    Endpoint.EMBEDDINGS: request_fields.check_embeddings,
    Endpoint.RERANK: request_fields.check_rerank,
    Endpoint.SCORE: request_fields.check_score,
    Endpoint.TOKENS: request_fields.check_tokens,
    Endpoint.GENERATE: request_fields.check_generate,
    Endpoint.TOKENIZE: request_fields.check_tokenize,
    Endpoint.DETOKENIZE: request_fields.check_detokenize,
}

# Of a request. A long one may be a view of all that was read with it, which is quicker than a copy.
Body = bytes | bytearray | memoryview


class InferenceRequest(msgspec.Struct, gc=False):
    """``body`` are the bytes the client sent, ``parsed`` what they say, unless that has been forgotten."""

    endpoint: Endpoint
    body: Body
    parsed: dict[str, Any] | None
    model: str
    stream: bool
    max_output_tokens: int | None
    cache_salt: str | None

    @property
    def document(self) -> dict[str, Any]:
        """To be read only."""
        if self.parsed is not None:
            return self.parsed
        document: dict[str, Any] = orjson.loads(self.body)
        self.parsed = document
        return document

    def release(self) -> None:
        """The request will not be sent again: let go of what may be megabytes."""
        self.body = b""
        self.parsed = {}


def parse_inference(
    endpoint: Endpoint,
    body: bytes | bytearray,
    only_model: Callable[[], str] | None = None,
    *,
    read: Callable[[bytes | bytearray], Any] = orjson.loads,
) -> InferenceRequest:
    """Check what the router relies on; the rest is the engine's to judge. Raises RequestError (400).

    ``only_model`` names the one model that is served here, for APIs whose requests need not; it may raise the same.
    ``read`` parses as ``orjson.loads`` does.
    """
    try:
        document = read(body)
    except orjson.JSONDecodeError as error:
        message = (
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos}). Send a JSON object, UTF-8 encoded."
        )
        raise RequestError(400, message, code="invalid_json") from None
    if not isinstance(document, dict):
        reject(None, f"The request body must be a JSON object, not {json_type(document)}.")
    model = document.get("model")
    if model is None and only_model is not None and endpoint in _MODEL_OPTIONAL:
        model = only_model()
    if not isinstance(model, str) or not model:
        if model == "":
            reject("model", "'model' is empty. GET /v1/models lists the models that are served.")
        if "model" in document:
            reject("model", f"'model' must be a non-empty string, not {json_type(model)}.")
        reject("model", "'model' is missing. GET /v1/models lists the models that are served.")
    _CHECKS[endpoint](document)
    stream = document.get("stream") if endpoint.generates else None
    if stream is not None and not isinstance(stream, bool):
        reject("stream", f"'stream' must be true or false, not {json_type(stream)}.")
    salt = document.get("cache_salt")
    return InferenceRequest(
        endpoint=endpoint,
        body=body,
        parsed=document,
        model=model,
        stream=bool(stream),
        max_output_tokens=_max_output_tokens(endpoint, document),
        cache_salt=salt if isinstance(salt, str) and salt else None,
    )


def _max_output_tokens(endpoint: Endpoint, document: dict[str, Any]) -> int | None:
    if not endpoint.generates:
        return 1  # it ends where a prefill ends
    if endpoint is Endpoint.RESPONSES:
        return integer(document, "max_output_tokens", minimum=1)
    if endpoint is Endpoint.TOKENS:
        return integer(document["sampling_params"], "max_tokens", minimum=0)
    if endpoint is Endpoint.GENERATE:
        limit = integer(sampling_params(document), "max_new_tokens", minimum=0)
        return _SGLANG_OUTPUT_TOKENS if limit is None else limit
    limit = integer(document, "max_tokens", minimum=0)
    if endpoint is Endpoint.MESSAGES:
        return limit
    integer(document, "n", minimum=1)
    completion_limit = integer(document, "max_completion_tokens", minimum=0)
    return limit if completion_limit is None else completion_limit


def first_prompt(prompt: Any) -> Any:
    """The first prompt of a batch: a string or a list of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


def sampling_params(document: dict[str, Any]) -> dict[str, Any]:
    """Of a request that has them apart; of a batch, the first prompt's."""
    given = document.get("sampling_params")
    if isinstance(given, list):
        given = given[0] if given else None
    return given if isinstance(given, dict) else {}


def truncated(tokens: Tokens, document: dict[str, Any]) -> Tokens:
    """The last tokens of a prompt, as many as ``truncate_prompt_tokens`` lets an engine keep."""
    kept = document.get("truncate_prompt_tokens")
    return tokens[-kept:] if isinstance(kept, int) and 0 < kept < len(tokens) else tokens
