"""Tokens in, tokens out: vLLM's POST /inference/v1/generate and SGLang's POST /generate, for one prompt.

Formats after vLLM's ``entrypoints/serve/disagg/protocol.py`` and SGLang's ``managers/io_struct.py``. vLLM's engines
read ``kv_transfer_params`` in ``sampling_params.extra_args``, which its other APIs fill in themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import orjson
from pydantic import Field, model_validator
from starlette.datastructures import Headers

from simulator.emulator.generation import Answer
from simulator.emulator.inference import Choice, InferenceService, Job
from simulator.emulator.openai_api import GenerationRequest, Tokens, UsageCount, bad_request, parse

SGLANG_DEFAULT_TOKENS: Final = 128

_DONE: Final = b"data: [DONE]\n\n"
# By their names there, what the requests of all APIs have.
_VLLM_LIMITS: Final = {name: name for name in ("n", "max_tokens", "min_tokens", "ignore_eos", "stop")}
_SGLANG_LIMITS: Final = {
    **{name: name for name in ("n", "ignore_eos", "stop")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


def _with_limits(fields: Any, names: Mapping[str, str]) -> Any:
    given = fields.get("sampling_params") if isinstance(fields, dict) else None
    if not isinstance(given, dict):
        return fields
    return {**fields, **{ours: given[theirs] for theirs, ours in names.items() if theirs in given}}


class TokensRequest(GenerationRequest):
    """vLLM's."""

    token_ids: Tokens = Field(min_length=1)
    sampling_params: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _sampling(cls, fields: Any) -> Any:
        fields = _with_limits(fields, _VLLM_LIMITS)
        given = fields.get("sampling_params") if isinstance(fields, dict) else None
        extra = given.get("extra_args") if isinstance(given, dict) else None
        if isinstance(extra, dict) and "kv_transfer_params" in extra:
            fields["kv_transfer_params"] = extra["kv_transfer_params"]
        return fields


class GenerateRequest(GenerationRequest):
    """SGLang's."""

    text: str | None = None
    input_ids: Tokens | None = Field(default=None, min_length=1)
    max_tokens: int | None = Field(default=SGLANG_DEFAULT_TOKENS, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _sampling(cls, fields: Any) -> Any:
        return _with_limits(fields, _SGLANG_LIMITS)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("Either text or input_ids should be provided.")
        return self


class TokensShape:
    """vLLM's: ids only."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        self.response_id = response_id

    def body(self, answers: Sequence[Answer], usage: UsageCount, kv_transfer_params: Any) -> dict[str, Any]:
        return {
            "request_id": self.response_id,
            "choices": [
                _tokens_choice(index, answer.tokens, answer.finish_reason)
                for index, answer in enumerate(answers)
            ],
            "usage": usage.body,
            "prompt_logprobs": None,
            "kv_transfer_params": kv_transfer_params,
        }

    def chunks(self, index: int, answer: Answer, start: int, end: int) -> bytes:
        reason = answer.finish_reason if end == len(answer.tokens) else None
        return self._event([_tokens_choice(index, answer.tokens[start:end], reason)])

    def ending(self, answers: Sequence[Answer], usage: UsageCount, *, include_usage: bool) -> bytes:
        return self._event([], usage=usage.body) + _DONE if include_usage else _DONE

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return _event({"request_id": self.response_id, "choices": choices, **fields})


def _tokens_choice(index: int, tokens: Sequence[int], reason: str | None) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": reason, "token_ids": list(tokens)}


class GenerateShape:
    """SGLang's: each event of a stream has the whole text so far; the last one says how it ended."""

    def __init__(self, response_id: str, model: str, created: int, *, prompt_tokens: int) -> None:
        self.response_id = response_id
        self._prompt_tokens = prompt_tokens

    def body(self, answers: Sequence[Answer], usage: UsageCount, kv_transfer_params: Any) -> dict[str, Any]:
        return self._so_far(answers[0], len(answers[0].tokens), usage)

    def chunks(self, index: int, answer: Answer, start: int, end: int) -> bytes:
        return b"" if end == len(answer.tokens) else _event(self._so_far(answer, end, None))

    def ending(self, answers: Sequence[Answer], usage: UsageCount, *, include_usage: bool) -> bytes:
        return _event(self._so_far(answers[0], len(answers[0].tokens), usage)) + _DONE

    def _so_far(self, answer: Answer, tokens: int, usage: UsageCount | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.response_id,
            "finish_reason": None if usage is None else _reason(answer),
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": 0 if usage is None else usage.cached_tokens,
        }
        return {
            "text": "".join(answer.pieces[:tokens]),
            "output_ids": list(answer.tokens[:tokens]),
            "meta_info": meta,
        }


def _reason(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == "length":
        return {"type": "length", "length": len(answer.tokens)}
    return {"type": "stop", "matched": answer.stop_reason or answer.tokens[-1]}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(document)


class TokenApis:
    """Prepares the jobs of both."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def tokens(self, body: bytes, headers: Headers) -> Job:
        request = parse(TokensRequest, body)
        self._service.check_model(request.model)
        self._service.check_ids(request.token_ids, "token_ids")
        choices = [self._service.choice(request, request.token_ids, index) for index in range(request.n or 1)]
        return self._service.job(request, TokensShape, "generate-tokens-", choices, headers)

    async def generate(self, body: bytes, headers: Headers) -> Job:
        request = parse(GenerateRequest, body)
        if request.n not in (None, 1):
            raise bad_request("This engine gives one answer to a prompt.", "sampling_params")
        if request.text is not None:
            prompt = await self._service.encode(request.text)
        else:
            assert request.input_ids is not None
            prompt = request.input_ids
            self._service.check_ids(prompt, "input_ids")
        choice: Choice = self._service.choice(request, prompt, 0)
        shape = partial(GenerateShape, prompt_tokens=len(prompt))
        return self._service.job(request, shape, "", [choice], headers)
