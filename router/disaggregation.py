"""How a request is handed from a prefill instance to a decode instance, per engine protocol.

A protocol says what the two legs' bodies are; who runs them, in which order, and what happens when one
fails is the same for all and lives in :mod:`router.delivery`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import orjson

from router.inference import Endpoint, InferenceRequest


class HandoffError(Exception):
    """The prefill leg's answer cannot be used, or the protocol is unknown."""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """``transfer`` is what the decode leg needs, verbatim JSON; None when nothing can be transferred."""

    transfer: bytes | None
    cached_tokens: int | None = None


class HandoffProtocol(Protocol):
    """The bodies of both legs. Implementations are stateless."""

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes: ...

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        """Read the prefill leg's response body. Raises HandoffError."""

    def decode_body(self, request: InferenceRequest, model: str, transfer: bytes) -> bytes: ...


def forwarded_body(request: InferenceRequest, model: str) -> bytes | bytearray:
    """The client's bytes; serialised anew only where ``model`` is not the name the client used."""
    if model == request.model:
        return request.body
    return orjson.dumps({**request.document, "model": model})


class _TransferParams(msgspec.Struct):
    remote_prefill_cached_tokens: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _PrefillUsage(msgspec.Struct):
    """In the words of any of the APIs."""

    prompt_tokens_details: _PromptDetails | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details or self.input_tokens_details
        return details.cached_tokens if details is not None else self.cache_read_input_tokens


class _PrefillResponse(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _PrefillUsage | None = None


_prefill_response = msgspec.json.Decoder(_PrefillResponse)
_transfer_params = msgspec.json.Decoder(_TransferParams)


class VllmNixl:
    """vLLM's NixlConnector: prefill one token, then let the decode instance pull the blocks.

    The prefill instance answers with ``kv_transfer_params``, which the decode leg's body carries unchanged.
    """

    name = "vllm-nixl"

    _ASK = {  # noqa: RUF012 - read only
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    _DROPPED = frozenset(("stream_options", "min_tokens", "min_completion_tokens"))

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes:
        document: dict[str, Any] = {
            name: value for name, value in request.document.items() if name not in self._DROPPED
        }
        document["model"] = model
        document["stream"] = False
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
        if "n" in document:
            document["n"] = 1
        if "best_of" in document:
            document["best_of"] = 1
        document["kv_transfer_params"] = self._ASK
        return orjson.dumps(document)

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        try:
            answer = _prefill_response.decode(body)
            transfer = bytes(answer.kv_transfer_params)
            params = _transfer_params.decode(transfer) if transfer[:1] == b"{" else None
        except msgspec.DecodeError as error:
            raise HandoffError(f"the prefill leg's answer cannot be read: {error}") from None
        cached_tokens = answer.usage.cached_tokens if answer.usage is not None else None
        if cached_tokens is None and params is not None:
            cached_tokens = params.remote_prefill_cached_tokens
        return PrefillAnswer(transfer if params is not None else None, cached_tokens)

    def decode_body(self, request: InferenceRequest, model: str, transfer: bytes) -> bytes:
        """The request with the parameters spliced in behind its first brace, the rest byte for byte."""
        body = bytes(forwarded_body(request, model))
        if "kv_transfer_params" in request.document:
            document = {k: v for k, v in request.document.items() if k != "kv_transfer_params"}
            body = orjson.dumps({**document, "model": model})
        brace = body.index(b"{") + 1
        return b'%b"kv_transfer_params":%b,%b' % (body[:brace], transfer, body[brace:])


PROTOCOLS: dict[str, HandoffProtocol] = {VllmNixl.name: VllmNixl()}


def handoff_protocol(name: str) -> HandoffProtocol:
    """The protocol of that name. Raises HandoffError."""
    try:
        return PROTOCOLS[name]
    except KeyError:
        known = ", ".join(sorted(PROTOCOLS))
        raise HandoffError(f"unknown prefill/decode protocol {name!r}; known: {known}") from None
