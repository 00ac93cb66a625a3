"""Chat and text completions: from a request body to what is to be said, and the rank that computes it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import Headers

from simulator.emulator.driver import EngineDriver
from simulator.emulator.generation import Answer, Writer
from simulator.emulator.hand_off import KvPuller, KvTransferParams
from simulator.emulator.openai_api import (
    AnswerShape,
    ApiError,
    ChatRequest,
    ChatShape,
    CompletionRequest,
    CompletionShape,
    GenerationRequest,
    bad_request,
    parse,
)
from simulator.emulator.rooms import RoomPlace, Rooms, RoomVisitor
from simulator.emulator.tokens import ChatTokenizer, TemplateError

# Beyond this many characters tokenization leaves the event loop (the tokenizer releases the GIL).
LONG_TEXT = 50_000


@dataclass(frozen=True, slots=True)
class Rank:
    """One data-parallel engine of the process, as other instances name it."""

    driver: EngineDriver
    engine_id: str


@dataclass(frozen=True, slots=True)
class Choice:
    prompt: Sequence[int]
    answer: Answer


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request: what it will say, how that is shaped, and where it runs."""

    request: GenerationRequest
    shape: AnswerShape
    choices: list[Choice]
    rank: Rank
    session_id: str | None
    headers: list[tuple[bytes, bytes]]
    place: RoomPlace | None  # where prefill and decode meet, on engines that hand over in rooms

    @property
    def transfer(self) -> KvTransferParams | None:
        return self.request.kv_transfer_params


class InferenceService:
    """What the completion endpoints need: the model's name and limits, its tokenizer, and its ranks.

    An engine with ``rooms`` computes prompts only, one with a ``visitor`` computes none.
    """

    def __init__(
        self,
        *,
        model: str,
        max_model_len: int,
        tokenizer: ChatTokenizer,
        ranks: Sequence[Rank],
        puller: KvPuller,
        advertised: tuple[str, int],
        rooms: Rooms | None = None,
        visitor: RoomVisitor | None = None,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.puller = puller
        self.advertised = advertised
        self.rooms = rooms
        self.visitor = visitor
        self._writer = Writer(tokenizer)
        self.requests = 0  # in flight

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        if max(tokens) >= self.tokenizer.vocabulary_size:
            raise bad_request(f"Token id {max(tokens)} is out of vocabulary.", param)

    def choice(self, request: GenerationRequest, prompt: Sequence[int], index: int) -> Choice:
        """A text answer to a prompt."""
        limits = request.limits(len(prompt), self.max_model_len)
        return Choice(prompt, self._writer.answer(prompt, index, limits))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def chat(self, body: bytes, headers: Headers) -> Job:
        request = parse(ChatRequest, body)
        self.check_model(request.model)
        if request.logprobs:
            raise bad_request("This engine does not compute logprobs.", "logprobs")
        function = request.called_function()
        try:
            text = self.tokenizer.render(
                request.messages,
                request.tools,
                add_generation_prompt=request.add_generation_prompt,
                template_arguments=request.chat_template_kwargs,
            )
        except TemplateError as error:
            raise bad_request(str(error), "messages") from None
        prompt = await self.encode(text, add_special_tokens=False)
        limits = request.limits(len(prompt), self.max_model_len)
        choices = []
        for index in range(request.n or 1):
            if function is None:
                answer = self._writer.answer(prompt, index, limits)
            else:
                schema = function.get("parameters") or {}
                answer = self._writer.tool_answer(prompt, index, limits, function["name"], schema)
            choices.append(Choice(prompt, answer))
        return self.job(request, ChatShape, "chatcmpl-", choices, headers)

    async def completion(self, body: bytes, headers: Headers) -> Job:
        request = parse(CompletionRequest, body)
        self.check_model(request.model)
        if request.logprobs is not None or request.echo or request.suffix:
            raise bad_request("This engine supports neither logprobs nor echo nor suffix.")
        choices: list[Choice] = []
        for given in request.prompts():
            prompt = await self.encode(given) if isinstance(given, str) else given
            if not prompt:
                raise bad_request("The prompt is empty.", "prompt")
            self.check_ids(prompt, "prompt")
            choices += [self.choice(request, prompt, index) for index in range(request.n or 1)]
        if not choices:
            raise bad_request("The prompt is empty.", "prompt")
        if request.kv_transfer_params and len(request.prompts()) > 1:
            raise bad_request("kv_transfer_params is for a single prompt.", "kv_transfer_params")
        return self.job(request, CompletionShape, "cmpl-", choices, headers)

    async def chat_choice(
        self, request: GenerationRequest, messages: Sequence[Mapping[str, Any]], tools: Any, param: str
    ) -> Choice:
        """The one text answer to a chat that another API has brought, in its field ``param``."""
        try:
            text = self.tokenizer.render(messages, tools)
        except TemplateError as error:
            raise bad_request(str(error), param) from None
        return self.choice(request, await self.encode(text, add_special_tokens=False), 0)

    def job(
        self,
        request: GenerationRequest,
        shape: Callable[[str, str, int], AnswerShape],
        prefix: str,
        choices: list[Choice],
        headers: Headers,
    ) -> Job:
        """``shape`` is given the response's id, which begins with ``prefix``, its model and creation time."""
        given = headers.get("x-request-id")
        response_id = f"{prefix}{given or uuid.uuid4().hex}"
        echoed = [(b"x-request-id", given.encode("latin-1"))] if given else []
        meets = self.rooms is not None or self.visitor is not None
        if self.rooms is not None:
            choices = [replace(choice, answer=choice.answer.first_token()) for choice in choices]
        return Job(
            request,
            shape(response_id, self.model, int(time.time())),
            choices,
            self._pick_rank(headers.get("x-data-parallel-rank")),
            request.session_id or headers.get("x-session-id"),
            echoed,
            request.room() if meets else None,
        )

    def _pick_rank(self, pinned: str | None) -> Rank:
        if pinned is not None:
            if not pinned.isdecimal() or int(pinned) >= len(self.ranks):
                raise bad_request(f"There is no data-parallel rank {pinned!r}.", "data_parallel_rank")
            return self.ranks[int(pinned)]
        if len(self.ranks) == 1:
            return self.ranks[0]
        return min(self.ranks, key=lambda rank: rank.driver.engine.load_tokens)
