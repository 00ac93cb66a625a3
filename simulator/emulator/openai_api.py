"""The OpenAI API as vLLM speaks it: request validation, and the shapes of answers, chunks and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simulator.emulator.generation import Answer, SamplingLimits, ToolCall
from simulator.emulator.hand_off import KvTransferParams
from simulator.emulator.rooms import RoomPlace

DEFAULT_COMPLETION_TOKENS = 16

Tokens = list[Annotated[int, Field(ge=0)]]


class ApiError(Exception):
    """An error response; ``kind`` is vLLM's error type."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status},
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "BadRequestError", param)


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields that all generating endpoints share; sampling fields are accepted and change nothing."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=0, ge=0)
    ignore_eos: bool | None = False
    stop: str | list[str] | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = Field(default=None, ge=1, le=65_535)
    bootstrap_room: int | None = Field(default=None, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        return self

    def room(self) -> RoomPlace:
        """Where prefill and decode meet; `ApiError` if the request names none."""
        host, port, room = self.bootstrap_host, self.bootstrap_port, self.bootstrap_room
        if host is None or port is None or room is None:
            raise bad_request(
                "This engine only takes requests with bootstrap_host, bootstrap_port and bootstrap_room.",
                "bootstrap_room",
            )
        return RoomPlace(host, port, room)

    @property
    def include_usage(self) -> bool:
        return self.stream and self.stream_options is not None and self.stream_options.include_usage

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    def limits(self, prompt_tokens: int, max_model_len: int) -> SamplingLimits:
        """What ends the answer to a prompt of this length; `ApiError` if it exceeds the context."""
        asked, room = self.output_limit, max_model_len - prompt_tokens
        if room < 1 or (asked is not None and asked > room):
            wanted = "" if asked is None else f" and {asked} output tokens"
            raise bad_request(
                f"This model's maximum context length is {max_model_len} tokens. However, your request has "
                f"{prompt_tokens} input tokens{wanted}. Please reduce the length of the input or the output.",
                "input_tokens" if room < 1 else "max_tokens",
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = room if asked is None else asked
        if self.min_tokens and self.min_tokens > limit:
            raise bad_request(f"min_tokens must be at most max_tokens={limit}.", "min_tokens")
        return SamplingLimits(
            limit, self.min_tokens or 0, bool(self.ignore_eos), tuple(text for text in stop if text)
        )


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    logprobs: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def called_function(self) -> dict[str, Any] | None:
        """The function that ``tool_choice`` demands, None if the answer may be text."""
        functions = {}
        for tool in self.tools or []:
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise bad_request("Each tool needs a function with a name.", "tools")
            functions[function["name"]] = function
        if self.tool_choice in (None, "none", "auto"):
            return None
        if not functions:
            raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if self.tool_choice == "required":
            return next(iter(functions.values()))
        named = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        if name not in functions:
            raise bad_request(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
        return functions[name]


class CompletionRequest(GenerationRequest):
    prompt: str | Tokens | list[str] | list[Tokens]
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    def prompts(self) -> list[str] | list[Tokens]:
        """The prompts of the batch, one or more."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]  # a list of ids is one prompt
        return prompt  # type: ignore[return-value]


class TokenizeRequest(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: Tokens


Request = TypeVar("Request", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """The validated request, or an `ApiError` that names the field at fault."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise bad_request("The body must be a JSON object.")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        param = str(first["loc"][0]) if first["loc"] else None
        raise bad_request(f"{place}: {first['msg']}" if place else first["msg"], param) from None


@dataclass(frozen=True, slots=True)
class UsageCount:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@lru_cache(maxsize=1 << 14)
def _json(text: str) -> bytes:
    return orjson.dumps(text)


class AnswerShape(Protocol):
    """Builds the answer and the stream of one request."""

    response_id: str

    def body(self, answers: Sequence[Answer], usage: UsageCount, kv_transfer_params: Any) -> dict[str, Any]:
        """The whole answer, not streamed."""

    def chunks(self, index: int, answer: Answer, start: int, end: int) -> bytes:
        """Server-sent events for tokens ``start`` to ``end`` (exclusive) of choice ``index``."""

    def ending(self, answers: Sequence[Answer], usage: UsageCount, *, include_usage: bool) -> bytes:
        """The last events of a stream."""


class ResponseShape:
    """Of chat and text completions; subclasses say how a choice looks."""

    object_name: str
    chunk_name: str

    def __init__(self, response_id: str, model: str, created: int) -> None:
        self.response_id = response_id
        self.model = model
        self.created = created
        head = {"id": response_id, "object": self.chunk_name, "created": created, "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['

    def body(self, answers: Sequence[Answer], usage: UsageCount, kv_transfer_params: Any) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage.body,
            "kv_transfer_params": kv_transfer_params,
        }

    def chunks(self, index: int, answer: Answer, start: int, end: int) -> bytes:
        last = len(answer.tokens) - 1
        events = [self._opening(index, answer)] if start == 0 else []
        for position in range(start, end):
            events.append(self._token(index, answer, answer.pieces[position], position == last))
        return b"".join(events)

    def ending(self, answers: Sequence[Answer], usage: UsageCount, *, include_usage: bool) -> bytes:
        done = b"data: [DONE]\n\n"
        if not include_usage:
            return done
        return self._head + b'],"usage":' + orjson.dumps(usage.body) + b"}\n\n" + done

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self, index: int, answer: Answer) -> bytes:
        return b""

    def _token(self, index: int, answer: Answer, piece: str, last: bool) -> bytes:
        raise NotImplementedError

    def _chunk(self, index: int, delta: bytes, finished: Answer | None) -> bytes:
        if finished is None:
            return b'%s{"index":%d,%s,"logprobs":null,"finish_reason":null}]}\n\n' % (
                self._head,
                index,
                delta,
            )
        reason, stop = finished.finish_reason.encode(), orjson.dumps(finished.stop_reason)
        tail = b'"logprobs":null,"finish_reason":"%s","stop_reason":%s}]}\n\n' % (reason, stop)
        return b'%s{"index":%d,%s,%s' % (self._head, index, delta, tail)


class ChatShape(ResponseShape):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        call = answer.tool_call
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": None if call else answer.text,
                "tool_calls": [_tool_call(call)] if call else [],
            },
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _opening(self, index: int, answer: Answer) -> bytes:
        opening = self._chunk(index, b'"delta":{"role":"assistant","content":""}', None)
        if answer.tool_call is None:
            return opening
        call = _tool_call(answer.tool_call)
        call["index"] = 0
        call["function"]["arguments"] = ""
        return opening + self._chunk(index, b'"delta":' + orjson.dumps({"tool_calls": [call]}), None)

    def _token(self, index: int, answer: Answer, piece: str, last: bool) -> bytes:
        finished = answer if last else None
        if answer.tool_call is None:
            return self._chunk(index, b'"delta":{"content":%s}' % _json(piece), finished)
        if piece:
            delta = b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":%s}}]}' % _json(piece)
            return self._chunk(index, delta, finished)
        return self._chunk(index, b'"delta":{}', finished) if last else b""


class CompletionShape(ResponseShape):
    object_name = chunk_name = "text_completion"

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _token(self, index: int, answer: Answer, piece: str, last: bool) -> bytes:
        return self._chunk(index, b'"text":%s' % _json(piece), answer if last else None)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
