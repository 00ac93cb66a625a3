"""Chat and text completions: from a request body to sequences on a rank, and back to an answer or a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from simulator.emulator.driver import EngineDriver, Progress, RequestFailed
from simulator.emulator.generation import Answer, Writer
from simulator.emulator.hand_off import KvPuller, KvTransferParams, offered_params
from simulator.emulator.openai_api import (
    AnswerShape,
    ApiError,
    ChatRequest,
    ChatShape,
    CompletionRequest,
    CompletionShape,
    GenerationRequest,
    UsageCount,
    bad_request,
    parse,
)
from simulator.emulator.rooms import RoomPlace, Rooms, RoomVisitor
from simulator.emulator.tokens import ChatTokenizer, TemplateError
from simulator.sequence import RemoteKv, Submission
from simulator.sequence import Sequence as EngineSequence

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


class Disconnected(Exception):
    """The client is gone; nothing more can be sent."""


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
        choices = []
        for given in request.prompts():
            prompt = await self.encode(given) if isinstance(given, str) else given
            if not prompt:
                raise bad_request("The prompt is empty.", "prompt")
            if max(prompt) >= self.tokenizer.vocabulary_size:
                raise bad_request(f"Token id {max(prompt)} is out of vocabulary.", "prompt")
            limits = request.limits(len(prompt), self.max_model_len)
            for index in range(request.n or 1):
                choices.append(Choice(prompt, self._writer.answer(prompt, index, limits)))
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
        prompt = await self.encode(text, add_special_tokens=False)
        limits = request.limits(len(prompt), self.max_model_len)
        return Choice(prompt, self._writer.answer(prompt, 0, limits))

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


class InferenceEndpoint:
    """An ASGI application for one completion route. Streams are sent as raw messages: they are the hot path."""

    def __init__(
        self,
        service: InferenceService,
        prepare: Callable[[bytes, Headers], Awaitable[Job]],
        error_body: Callable[[ApiError], dict[str, Any]] = lambda error: error.body,
    ) -> None:
        self._service = service
        self._prepare = prepare
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.requests += 1
        try:
            body = await _read_body(receive)
            job = await self._prepare(body, Headers(scope=scope))
            await Responder(self._service, job, receive, send).respond()
        except ApiError as error:
            await _send_json(send, error.status, self._error_body(error), [])
        except Disconnected:
            return
        finally:
            self._service.requests -= 1


class Responder:
    """One request on its rank, until it is answered or its client is gone."""

    def __init__(self, service: InferenceService, job: Job, receive: Receive, send: Send) -> None:
        self._service = service
        self._job = job
        self._receive = receive
        self._send = send
        self._progress = Progress()
        self._sequences: list[EngineSequence] = []

    async def respond(self) -> None:
        work = asyncio.ensure_future(self._work())
        gone = asyncio.ensure_future(_disconnected(self._receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Disconnected
            await work
        finally:
            work.cancel()
            gone.cancel()
            for sequence in self._sequences:
                self._job.rank.driver.abort(sequence.request_id)
            if self._service.rooms is not None and self._job.place is not None:
                self._service.rooms.withdraw(self._job.place.room)

    async def _work(self) -> None:
        try:
            self._submit(0)
            if not self._job.request.stream:
                await self._answer()
            elif self._service.rooms is None:
                await self._stream()
            else:
                await self._stream_first_tokens()
        except RequestFailed as failure:
            raise ApiError(500, str(failure), "InternalServerError") from None

    def _submit(self, first: int) -> None:
        """Start choices from ``first`` on. A pulled cache serves all choices, so the others follow the first."""
        pulls = self._pulls and first == 0
        last = 1 if pulls else len(self._job.choices)
        for index in range(first, last):
            self._sequences.append(self._submit_choice(index))

    @property
    def _pulls(self) -> bool:
        """Whether the first choice's KV cache comes from another engine."""
        transfer = self._job.transfer
        return self._service.visitor is not None or (transfer is not None and transfer.do_remote_prefill)

    def _submit_choice(self, index: int) -> EngineSequence:
        job, choice, transfer = self._job, self._job.choices[index], self._job.transfer
        pulls = self._pulls and index == 0
        leases = self._service.rooms is not None or (transfer is not None and transfer.do_remote_decode)
        remote, pull = None, None
        if pulls:
            tokens = None if transfer is None else transfer.remote_num_tokens
            hit = 0 if transfer is None else transfer.remote_prefill_cached_tokens or 0
            remote = RemoteKv(len(choice.prompt) if tokens is None else tokens, hit)
            pull = self._pull
        arguments = job.request.vllm_xargs or {}
        submission = Submission(
            request_id=f"{job.shape.response_id}-{index}-{uuid.uuid4().hex[:8]}",
            prompt=choice.prompt,
            output=choice.answer.tokens,
            salt=job.request.cache_salt,
            session_id=job.session_id,
            report_hits=arguments.get("kv_cache_report_mode") == "full",
            lease_kv=leases and index == 0,
            remote=remote,
        )
        every_token = job.request.stream or (pulls and len(job.choices) > 1)
        try:
            return job.rank.driver.submit(
                submission, self._progress, index, every_token=every_token, pull=pull
            )
        except ValueError as error:
            raise bad_request(str(error)) from None

    async def _pull(self, sequence: EngineSequence) -> None:
        job, service = self._job, self._service
        if service.visitor is not None:
            assert job.place is not None
            await service.visitor.pull(sequence, job.place)
        else:
            assert job.transfer is not None
            await service.puller.pull(sequence, job.transfer)

    async def _answer(self) -> None:
        while not self._finished():
            await self._progress.take()
            self._submit_rest()
        await self._hand_over()
        answers = [choice.answer for choice in self._job.choices]
        body = self._job.shape.body(answers, self._usage(), self._offer())
        await _send_json(self._send, 200, body, self._job.headers)

    async def _hand_over(self) -> None:
        """Where prompts are computed for other engines: answer when this one's KV has been read."""
        rooms, place, driver = self._service.rooms, self._job.place, self._job.rank.driver
        if rooms is None or place is None:
            return
        request_id = self._sequences[0].request_id
        offer = self._offer()
        try:
            if offer is None:
                raise TimeoutError
            rooms.offer(place.room, offer)
            await driver.lease_read(request_id)
        except TimeoutError:
            raise RequestFailed(f"nobody came for the KV in room {place.room}") from None
        finally:
            driver.release_lease(request_id)

    async def _stream(self) -> None:
        shape, choices = self._job.shape, self._job.choices
        sent = [0] * len(choices)
        started = False
        while any(count < len(choice.answer.tokens) for count, choice in zip(sent, choices, strict=True)):
            counts: dict[int, int] = {}
            for index in await self._progress.take():
                counts[index] = counts.get(index, 0) + 1
            self._submit_rest()
            body = b""
            for index, count in counts.items():
                body += shape.chunks(index, choices[index].answer, sent[index], sent[index] + count)
                sent[index] += count
            if not started:
                # Not before the first token: until then a failure can still be an HTTP error.
                await self._send(_start(200, b"text/event-stream; charset=utf-8", self._job.headers))
                started = True
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        answers = [choice.answer for choice in choices]
        end = shape.ending(answers, self._usage(), include_usage=self._job.request.include_usage)
        await self._send({"type": "http.response.body", "body": end})

    async def _stream_first_tokens(self) -> None:
        """Of an engine that computes prompts for others."""
        while not self._finished():
            await self._progress.take()
        await self._hand_over()
        shape, answers = self._job.shape, [choice.answer for choice in self._job.choices]
        body = b"".join(shape.chunks(index, answer, 0, 1) for index, answer in enumerate(answers))
        body += shape.ending(answers, self._usage(), include_usage=self._job.request.include_usage)
        await self._send(_start(200, b"text/event-stream; charset=utf-8", self._job.headers))
        await self._send({"type": "http.response.body", "body": body})

    def _finished(self) -> bool:
        started = len(self._sequences) == len(self._job.choices)
        return started and all(sequence.finished for sequence in self._sequences)

    def _submit_rest(self) -> None:
        if len(self._sequences) < len(self._job.choices):
            self._submit(len(self._sequences))

    def _usage(self) -> UsageCount:
        """Token counts over all choices; a prompt with several choices counts once."""
        choices, per_prompt = self._job.choices, self._job.request.n or 1
        prompts = range(0, len(choices), per_prompt)
        return UsageCount(
            prompt_tokens=sum(len(choices[index].prompt) for index in prompts),
            output_tokens=sum(len(choice.answer.tokens) for choice in choices),
            cached_tokens=sum(self._sequences[index].cached_tokens or 0 for index in prompts),
        )

    def _offer(self) -> Any:
        """``kv_transfer_params`` of the answer: where the leased blocks can be pulled from, or None."""
        first = self._sequences[0]
        lease = self._job.rank.driver.engine.lease(first.request_id)
        if lease is None:
            return None
        host, port = self._service.advertised
        return offered_params(
            lease,
            request_id=first.request_id,
            engine_id=self._job.rank.engine_id,
            host=host,
            port=port,
            hit=first.cached_tokens or 0,
        )


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: bytes, headers: list[tuple[bytes, bytes]]) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), *headers],
    }


async def _send_json(send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]]) -> None:
    content = orjson.dumps(body)
    length = (b"content-length", str(len(content)).encode())
    await send(_start(status, b"application/json", [length, *headers]))
    await send({"type": "http.response.body", "body": content})
