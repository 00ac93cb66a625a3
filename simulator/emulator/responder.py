"""A validated request on its rank: its sequences, and the answer or the stream that is made of their tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from simulator.emulator.driver import Progress, RequestFailed
from simulator.emulator.hand_off import offered_params
from simulator.emulator.inference import InferenceService, Job
from simulator.emulator.openai_api import ApiError, UsageCount, bad_request
from simulator.sequence import RemoteKv, Submission
from simulator.sequence import Sequence as EngineSequence


class Disconnected(Exception):
    """The client is gone; nothing more can be sent."""


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
