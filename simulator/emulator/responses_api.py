"""OpenAI's Responses API as vLLM speaks it, for text: nothing is stored, and there is no tool that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import orjson
from pydantic import Field
from starlette.datastructures import Headers

from simulator.emulator.generation import Answer
from simulator.emulator.inference import InferenceService, Job
from simulator.emulator.openai_api import ApiError, GenerationRequest, UsageCount, bad_request, parse


class ResponsesRequest(GenerationRequest):
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    n: Literal[1] = 1

    @property
    def output_limit(self) -> int | None:
        return self.max_output_tokens

    def messages(self) -> list[dict[str, Any]]:
        """The chat that it is; `ApiError` for items that are no messages."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if item.get("type", "message") != "message" or not isinstance(item.get("role"), str):
                raise bad_request(f"This engine reads no input of type {item.get('type')!r}.", "input")
            messages.append({"role": item["role"], "content": item.get("content")})
        return messages


class ResponsesShape:
    """One output message; events are numbered from 0."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        self.response_id = response_id
        self._model = model
        self._created = created
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._number = -1

    def body(self, answers: Sequence[Answer], usage: UsageCount, kv_transfer_params: Any) -> dict[str, Any]:
        answer = answers[0]
        whole = answer.finish_reason != "length"
        response = self._response("completed" if whole else "incomplete", [self._item(answer.text)], usage)
        if not whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if kv_transfer_params is not None:
            response["kv_transfer_params"] = kv_transfer_params
        return response

    def chunks(self, index: int, answer: Answer, start: int, end: int) -> bytes:
        events = self._opening() if start == 0 else []
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        for piece in answer.pieces[start:end]:
            if piece:
                events.append(self._event("response.output_text.delta", **place, delta=piece, logprobs=[]))
        return b"".join(events)

    def ending(self, answers: Sequence[Answer], usage: UsageCount, *, include_usage: bool) -> bytes:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text = answers[0].text
        body = self.body(answers, usage, None)
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=[]),
                self._event("response.content_part.done", **place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=self._item(text)),
                self._event(f"response.{body['status']}", response=body),
            )
        )

    def _opening(self) -> list[bytes]:
        response = self._response("in_progress", [], None)
        item = self._item("") | {"status": "in_progress", "content": []}
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=_part("")),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        document = {"type": kind, "sequence_number": self._number, **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))

    def _response(self, status: str, output: list[Any], usage: UsageCount | None) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None if usage is None else _usage(usage),
        }

    def _item(self, text: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [_part(text)],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: UsageCount) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


class ResponsesApi:
    """Prepares the jobs of POST /v1/responses."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def prepare(self, body: bytes, headers: Headers) -> Job:
        request = parse(ResponsesRequest, body)
        self._service.check_model(request.model)
        if request.previous_response_id is not None:
            message = f"Response with id '{request.previous_response_id}' not found."
            raise ApiError(404, message, "invalid_request_error", "response_id")
        choice = await self._service.chat_choice(request, request.messages(), None, "input")
        return self._service.job(request, ResponsesShape, "resp_", [choice], headers)
