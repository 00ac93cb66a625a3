"""vLLM's NixlConnector."""

from __future__ import annotations

import msgspec

from router.disaggregation.bodies import (
    body_with_transfer,
    encoded,
    has_one_answer,
    one_token_document,
    with_transfer,
)
from router.disaggregation.prefill_usage import PrefillUsage
from router.disaggregation.protocol import HandoffError, PrefillAnswer, Stateless
from router.inference import Endpoint, InferenceRequest


class _TransferParams(msgspec.Struct):
    remote_prefill_cached_tokens: int | None = None


class _PrefillResponse(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: PrefillUsage | None = None


_prefill_response = msgspec.json.Decoder(_PrefillResponse)
_transfer_params = msgspec.json.Decoder(_TransferParams)


class VllmNixl(Stateless):
    """Prefill one token, then let the decode instance pull the blocks.

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

    def hands_over(self, request: InferenceRequest) -> bool:
        """The blocks are one prompt's, and are given up when the first of several answers has pulled them."""
        return request.endpoint is not Endpoint.GENERATE and has_one_answer(request)

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes:
        document = one_token_document(request, model)
        return encoded(with_transfer(document, request.endpoint, self._ASK))

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
        return body_with_transfer(request, model, transfer)
