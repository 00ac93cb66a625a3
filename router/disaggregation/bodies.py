"""Request bodies that are the client's but for a field or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from router.errors import RequestError
from router.inference import Body, Endpoint, InferenceRequest, first_prompt, sampling_params

_SAMPLING_APART = frozenset((Endpoint.TOKENS, Endpoint.GENERATE))
_CONTRADICT_ONE_TOKEN = frozenset(("stream_options", "min_tokens", "min_completion_tokens"))


def encoded(document: dict[str, Any]) -> bytes:
    """Raises RequestError (400) for what is nested so deeply that it can be read here, but not written."""
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:
        message = (
            "The request is nested too deeply for the instances that would serve it: at most 250 lists and "
            "objects may lie inside each other."
        )
        raise RequestError(400, message, code="nested_too_deeply") from None


def forwarded_body(request: InferenceRequest, model: str) -> Body:
    """The client's bytes; serialised anew only where ``model`` is not the name the client used."""
    if model == request.model:
        return request.body
    return encoded({**request.document, "model": model})


def prompts_of(request: InferenceRequest) -> int | None:
    """How many prompts a list of them brings; None where the request brings one, and not in a list."""
    document = request.document
    prompt: Any = document.get("prompt")
    if request.endpoint is Endpoint.GENERATE:
        prompt = document.get("text") or document.get("input_ids")
    return None if prompt is first_prompt(prompt) else len(prompt)


def has_one_answer(request: InferenceRequest) -> bool:
    """Whether it is one prompt's one answer, so that one transfer of KV is all of it."""
    document = request.document
    asked = sampling_params(document) if request.endpoint in _SAMPLING_APART else document
    return (
        asked.get("n") in (None, 1) and asked.get("best_of") in (None, 1) and prompts_of(request) in (None, 1)
    )


def one_token_document(request: InferenceRequest, model: str) -> dict[str, Any]:
    """A request that ``has_one_answer``, for one token and not streamed: what a prefill instance computes."""
    document: dict[str, Any] = {
        name: value for name, value in request.document.items() if name not in _CONTRADICT_ONE_TOKEN
    }
    document["model"] = model
    document["stream"] = False
    if request.endpoint is Endpoint.TOKENS:
        asked = {**sampling_params(document), "max_tokens": 1}
        asked.pop("min_tokens", None)
        document["sampling_params"] = asked
        return document
    if request.endpoint is Endpoint.RESPONSES:
        document["max_output_tokens"] = 1
        document["store"] = False  # the answer that counts is the decode instance's
        document.pop("background", None)
    else:
        document["max_tokens"] = 1
    if request.endpoint is Endpoint.CHAT:
        document["max_completion_tokens"] = 1
    else:
        document.pop("max_completion_tokens", None)
    return document


def with_transfer(document: dict[str, Any], endpoint: Endpoint, params: object) -> dict[str, Any]:
    """The document with vLLM's ``kv_transfer_params``, where engines read them."""
    if endpoint is not Endpoint.TOKENS:
        return {**document, "kv_transfer_params": params}
    asked = sampling_params(document)
    extra = {**(asked.get("extra_args") or {}), "kv_transfer_params": params}
    return {**document, "sampling_params": {**asked, "extra_args": extra}}


def body_with_transfer(request: InferenceRequest, model: str, transfer: bytes) -> bytes:
    """The request with vLLM's ``kv_transfer_params``, given as JSON."""
    if request.endpoint is not Endpoint.TOKENS:
        return body_with(request, model, {"kv_transfer_params": transfer})
    document = {**request.document, "model": model}
    return encoded(with_transfer(document, request.endpoint, orjson.Fragment(transfer)))


def body_with(request: InferenceRequest, model: str, fields: Mapping[str, bytes]) -> bytes:
    """The request with fields of JSON spliced in behind its first brace, the rest byte for byte.

    Fields of these names that the client sent are replaced.
    """
    body = bytes(forwarded_body(request, model))
    if not fields.keys().isdisjoint(request.document):
        document = {name: theirs for name, theirs in request.document.items() if name not in fields}
        body = encoded({**document, "model": model})
    brace = body.index(b"{") + 1
    added = b"".join(b'"%b":%b,' % (name.encode(), value) for name, value in fields.items())
    return b"%b%b%b" % (body[:brace], added, body[brace:])
