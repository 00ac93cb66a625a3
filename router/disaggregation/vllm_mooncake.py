"""vLLM's MooncakeConnector."""

from __future__ import annotations

import uuid

import msgspec

from conductor.placement import Target
from router.disaggregation.bodies import (
    body_with_transfer,
    encoded,
    has_one_answer,
    one_token_document,
    with_transfer,
)
from router.disaggregation.bootstrap import bootstrap_target
from router.disaggregation.prefill_usage import PrefillUsage
from router.disaggregation.protocol import HandoffError, PrefillAnswer
from router.inference import Endpoint, InferenceRequest


class _Rank(msgspec.Struct):
    engine_id: str


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _PrefillResponse(msgspec.Struct):
    choices: list[_Choice] = []
    status: str | None = None  # of /v1/responses
    stop_reason: str | None = None  # of /v1/messages
    usage: PrefillUsage | None = None

    @property
    def length_capped(self) -> bool:
        if self.choices:
            return self.choices[0].finish_reason == "length"
        return self.status == "incomplete" or self.stop_reason == "max_tokens"


_bootstrap_response = msgspec.json.Decoder(dict[str, _Rank])
_prefill_response = msgspec.json.Decoder(_PrefillResponse)


class VllmMooncake:
    """Both legs carry a ``transfer_id``; the decode instance asks for its blocks where the prefill instance is.

    The prefill instance's bootstrap server names the engine id of each data-parallel rank (as recorded with vLLM
    0.32), which may be another one after a restart. The prefill leg's answer holds nothing for the decode leg; its
    blocks are kept only where the one token that was asked for ended it, not where the answer was over.
    """

    name = "vllm-mooncake"

    def begin(self, prefill: Target) -> MooncakeHandoff:
        return MooncakeHandoff(prefill)


class MooncakeHandoff:
    """Of one request."""

    bootstrap_path = "/query"

    def __init__(self, prefill: Target) -> None:
        self._rank = str(prefill.rank)
        self._bootstrap_url = bootstrap_target(prefill).url
        self._transfer_id = f"conductor-{uuid.uuid4().hex}"
        self._engine_id = ""

    def hands_over(self, request: InferenceRequest) -> bool:
        """Several prompts or answers would share the transfer id."""
        return request.endpoint is not Endpoint.GENERATE and has_one_answer(request)

    def bootstrap_answered(self, body: bytes) -> None:
        try:
            self._engine_id = _bootstrap_response.decode(body)[self._rank].engine_id
        except msgspec.DecodeError as error:
            raise HandoffError(f"the bootstrap server's answer cannot be read: {error}") from None
        except KeyError:
            raise HandoffError(f"the bootstrap server does not know rank {self._rank}") from None

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes:
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self._transfer_id}
        document = one_token_document(request, model)
        return encoded(with_transfer(document, request.endpoint, asked))

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        try:
            answer = _prefill_response.decode(body)
        except msgspec.DecodeError as error:
            raise HandoffError(f"the prefill leg's answer cannot be read: {error}") from None
        cached_tokens = answer.usage.cached_tokens if answer.usage is not None else None
        if not answer.length_capped:
            return PrefillAnswer(None, cached_tokens)
        transfer = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._bootstrap_url,
            "remote_engine_id": self._engine_id,
            "transfer_id": self._transfer_id,
        }
        return PrefillAnswer(msgspec.json.encode(transfer), cached_tokens)

    def decode_body(self, request: InferenceRequest, model: str, transfer: bytes) -> bytes:
        return body_with_transfer(request, model, transfer)
