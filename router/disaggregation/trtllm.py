"""TensorRT-LLM's context and generation servers (``trtllm-serve``)."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from router.disaggregation.bodies import body_with, encoded, has_one_answer, one_token_document
from router.disaggregation.prefill_usage import PrefillUsage
from router.disaggregation.protocol import HandoffError, PrefillAnswer, Stateless
from router.inference import Endpoint, InferenceRequest

# Ids below it are the engines' own (2**42 in the first releases that ask for global ids, 2**40 later).
_FIRST_GLOBAL_ID: Final = 1 << 42
_LAST_GLOBAL_ID: Final = (1 << 63) - 1
_UNFINISHED: Final = ("length", "not_finished")
_GENERATION_ONLY: Final = msgspec.Raw(b'"generation_only"')
_ENDPOINTS: Final = (Endpoint.CHAT, Endpoint.COMPLETIONS)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: dict[str, msgspec.Raw] | None = None


class _PrefillResponse(msgspec.Struct):
    choices: list[_Choice]
    usage: PrefillUsage | None = None


_prefill_response = msgspec.json.Decoder(_PrefillResponse)


class TensorRtLlm(Stateless):
    """The context server computes the prompt and one token, and its answer says where its KV is.

    That is ``choices[0].disaggregated_params``: ``first_gen_tokens``, ``ctx_request_id``,
    ``encoded_opaque_state`` and more, which the generation server gets unchanged but for ``request_type``
    (TensorRT-LLM, ``tensorrt_llm/serve/openai_protocol.py`` and ``openai_disagg_service.py``).
    ``disagg_request_id`` tells the transfers of all servers apart and is made up here, one a prefill.

    An answer that ended with its first token keeps no KV: the generation server computes the prompt again.
    """

    name = "trtllm"

    def hands_over(self, request: InferenceRequest) -> bool:
        """The first token and its KV are those of one prompt's one answer."""
        return request.endpoint in _ENDPOINTS and has_one_answer(request)

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes:
        asked = {
            "request_type": "context_only",
            "disagg_request_id": random.randint(_FIRST_GLOBAL_ID, _LAST_GLOBAL_ID),
        }
        document = one_token_document(request, model)
        document.pop("max_completion_tokens", None)  # one name for it and ``max_tokens``: both may be refused
        return encoded({**document, "disaggregated_params": asked})

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        try:
            answer = _prefill_response.decode(body)
        except msgspec.DecodeError as error:
            raise HandoffError(f"the prefill leg's answer cannot be read: {error}") from None
        if len(answer.choices) != 1:
            raise HandoffError(f"the prefill leg's answer has {len(answer.choices)} choices instead of one")
        cached_tokens = answer.usage.cached_tokens if answer.usage is not None else None
        [choice] = answer.choices
        params = choice.disaggregated_params
        if params is None or choice.finish_reason not in _UNFINISHED:
            return PrefillAnswer(None, cached_tokens)
        transfer = msgspec.json.encode({**params, "request_type": _GENERATION_ONLY})
        return PrefillAnswer(transfer, cached_tokens)

    def decode_body(self, request: InferenceRequest, model: str, transfer: bytes) -> bytes:
        return body_with(request, model, {"disaggregated_params": transfer})
