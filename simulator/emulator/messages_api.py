"""Anthropic's Messages API as vLLM speaks it, for text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import orjson
from pydantic import Field, model_validator
from starlette.datastructures import Headers

from simulator.emulator.generation import Answer
from simulator.emulator.inference import InferenceService, Job
from simulator.emulator.openai_api import ApiError, GenerationRequest, UsageCount, bad_request, parse


class MessagesRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    n: Literal[1] = 1

    @model_validator(mode="after")
    def _one_name_for_stops(self) -> Self:
        self.stop = list(self.stop_sequences or [])
        return self

    def chat(self) -> list[dict[str, Any]]:
        """The chat that it is; `ApiError` for blocks that are not text."""
        chat: list[dict[str, Any]] = []
        if self.system:
            text = self.system if isinstance(self.system, str) else "".join(_texts(self.system, "system"))
            chat.append({"role": "system", "content": text})
        for message in self.messages:
            content = message.get("content")
            if not isinstance(content, str):
                content = "\n".join(_texts(content or [], "messages"))
            chat.append({"role": message.get("role"), "content": content})
        return chat


def _texts(blocks: list[Any], param: str) -> list[str]:
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise bad_request("This engine reads text blocks only.", param)
    return [str(block.get("text", "")) for block in blocks]


class MessagesShape:
    """One block of text. ``prompt_tokens`` are told when a stream begins."""

    def __init__(self, response_id: str, model: str, created: int, *, prompt_tokens: int) -> None:
        self.response_id = response_id
        self._model = model
        self._prompt_tokens = prompt_tokens

    def body(self, answers: Sequence[Answer], usage: UsageCount, kv_transfer_params: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": answers[0].text}]
        message = self._message(content, _usage(usage), _stop(answers[0]))
        if kv_transfer_params is not None:
            message["kv_transfer_params"] = kv_transfer_params
        return message

    def chunks(self, index: int, answer: Answer, start: int, end: int) -> bytes:
        events = []
        if start == 0:
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            no_stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
            events.append(_event("message_start", message=self._message([], usage, no_stop)))
            events.append(_event("content_block_start", index=0, content_block={"type": "text", "text": ""}))
        for piece in answer.pieces[start:end]:
            if piece:
                delta = {"type": "text_delta", "text": piece}
                events.append(_event("content_block_delta", index=0, delta=delta))
        return b"".join(events)

    def ending(self, answers: Sequence[Answer], usage: UsageCount, *, include_usage: bool) -> bytes:
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=_stop(answers[0]), usage=_usage(usage)),
                _event("message_stop"),
                b"data: [DONE]\n\n",  # vLLM sends it here too
            )
        )

    def _message(
        self, content: list[Any], usage: dict[str, int], stop: dict[str, str | None]
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            **stop,
            "usage": usage,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _stop(answer: Answer) -> dict[str, str | None]:
    if answer.stop_reason is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = "max_tokens" if answer.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: UsageCount) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def messages_error(error: ApiError) -> dict[str, Any]:
    """The error in this API's envelope."""
    kind = {400: "invalid_request_error", 404: "not_found_error"}.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class MessagesApi:
    """Prepares the jobs of POST /v1/messages."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def prepare(self, body: bytes, headers: Headers) -> Job:
        request = parse(MessagesRequest, body)
        self._service.check_model(request.model)
        choice = await self._service.chat_choice(request, request.chat(), None, "messages")
        shape = partial(MessagesShape, prompt_tokens=len(choice.prompt))
        return self._service.job(request, shape, "msg_", [choice], headers)
