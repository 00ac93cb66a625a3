"""One inference request from its first byte to the end of its response: placed, sent, retried, accounted for.

An exchange is driven by callbacks, not by a task: a request that finds its tokens at once and a pooled
connection to its engine costs no suspension at all.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from conductor.placement import (
    FailureKind,
    InstanceFailure,
    Placement,
    PlacementError,
    PlacementRequest,
    Target,
    UnknownModelError,
    Usage,
)

from .disaggregation import HandoffError, HandoffProtocol, PrefillAnswer, forwarded_body, handoff_protocol
from .errors import RequestError, status_line
from .framing import ResponseHead
from .heads import (
    Headers,
    client_request_id,
    forwarded_fields,
    placement_fields,
    request_head,
    response_head,
)
from .inference import Endpoint, InferenceRequest, parse_inference
from .legs import DecodeLeg, Leg, PrefillLeg
from .services import RouterServices, logger
from .tokens import Prompt
from .upstream import UpstreamFailure, UpstreamUnreachable

if TYPE_CHECKING:
    from .front_door import FrontDoorProtocol

CLIENT_CLOSED_REQUEST = 499
_LISTED_MODELS = 20
_DETAIL_BYTES = 300
_NOTHING: frozenset[str] = frozenset()


class _Unheard:
    """Stands in for the event by which uvicorn wakes an ASGI application."""

    def set(self) -> None:
        pass


class Exchange:
    """The request and response that a connection is busy with; takes the place of uvicorn's cycle."""

    __slots__ = (
        "_authorization",
        "_fields",
        "_handoff",
        "_headers",
        "_leg",
        "_placed",
        "_prefill_answer",
        "_refusal",
        "_started_s",
        "_task",
        "_timer",
        "_tried",
        "attempts",
        "body",
        "client_takes_chunks",
        "disconnected",
        "door",
        "endpoint",
        "expects_continue",
        "first_byte_s",
        "in_turn",
        "keep_alive",
        "more_body",
        "placement",
        "prompt",
        "request",
        "request_id",
        "response_complete",
        "services",
        "status",
        "transport",
        "url",
    )

    message_event = _Unheard()

    def __init__(
        self,
        door: FrontDoorProtocol,
        endpoint: Endpoint,
        url: bytes,
        headers: Headers,
        *,
        keep_alive: bool,
        client_takes_chunks: bool,
        expects_continue: bool,
    ) -> None:
        self.door = door
        self.services: RouterServices = door.services
        self.transport: asyncio.Transport = door.transport
        self.endpoint = endpoint
        self.url = url
        self.keep_alive = keep_alive
        self.client_takes_chunks = client_takes_chunks
        self.expects_continue = expects_continue
        self.body: bytes | bytearray = b""
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        self.in_turn = False  # earlier responses on this connection are complete
        self.request: InferenceRequest | None = None
        self.prompt: Prompt | None = None
        self.placement: Placement | None = None
        self.attempts = 0
        self.status = 0
        self.first_byte_s: float | None = None
        self.request_id = client_request_id(headers) or self.services.new_request_id()
        self._headers = headers
        self._fields = self._authorization = b""
        self._handoff: HandoffProtocol | None = None
        self._placed = False  # the last placement has not ended yet
        self._prefill_answer: PrefillAnswer | None = None
        self._leg: Leg | None = None
        self._refusal: RequestError | None = None
        self._started_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tried: list[InstanceFailure] = []

    # Request, as the connection's parser delivers it

    def announce_length(self, body_bytes: int) -> None:
        """Refuse a request whose declared body is too long before it is sent."""
        if body_bytes > self.services.settings.max_body_bytes:
            self._refuse_length()

    def receive_body(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        body = self.body
        if len(body) + len(data) > self.services.settings.max_body_bytes:
            self._refuse_length()
        elif not body:
            self.body = data
        elif isinstance(body, bytearray):
            body += data
        else:
            self.body = bytearray(body)
            self.body += data

    def end_of_request(self) -> None:
        self.more_body = False
        if self.in_turn and not self.response_complete:
            self._begin()

    def activate(self) -> None:
        """It is this request's turn to be answered."""
        if self.transport.is_closing():
            return
        self.in_turn = True
        self.door.active = self
        if self._refusal is not None:
            self._reply_refusal()
        elif not self.more_body:
            self._begin()
        elif self.expects_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse_length(self) -> None:
        limit = self.services.settings.max_body_bytes
        message = (
            f"The request body exceeds {limit} bytes. Raise 'max_body_bytes' in the router's configuration."
        )
        self._refusal = RequestError(413, message, code="request_too_large")
        self.keep_alive = False
        self.body = b""
        if self.in_turn:
            self._reply_refusal()

    def _reply_refusal(self) -> None:
        assert self._refusal is not None
        self._enter()
        self._reply_error(self._refusal)

    # Placement

    def _enter(self) -> None:
        services = self.services
        self._started_s = services.clock()
        services.active.add(self)

    def _begin(self) -> None:
        self._enter()
        services = self.services
        try:
            request = self.request = parse_inference(self.endpoint, self.body)
        except RequestError as error:
            self._reply_error(error)
            return
        prompt = services.tokens.prompt_at_once(request)
        if prompt is None:
            self._task = asyncio.get_running_loop().create_task(self._tokenize_and_place(request))
        else:
            self.prompt = prompt
            self._place()

    async def _tokenize_and_place(self, request: InferenceRequest) -> None:
        self.prompt = await self.services.tokens.prompt(request)
        self._task = None
        self._place()

    def _place(self) -> None:
        """Ask for a placement and start its first leg."""
        self._timer = None
        request, prompt = self.request, self.prompt
        assert request is not None and prompt is not None
        services = self.services
        previous = self.placement
        asked = PlacementRequest(
            request_id=self.request_id,
            model=request.model,
            tokens=prompt.tokens,
            prompt_tokens=prompt.prompt_tokens,
            token_source=prompt.source,
            streamed=request.stream,
            max_output_tokens=request.max_output_tokens,
            cache_salt=request.cache_salt,
            excluded=_excluded(self._tried),
            retry_of=previous.placement_id if previous is not None else None,
        )
        now_s = services.clock()
        try:
            placement = services.placements.place(asked, now_s)
        except PlacementError as error:
            self._reply_error(self._placement_refused(error, request.model))
            return
        except Exception:
            logger.exception("placement failed unexpectedly", request_id=self.request_id)
            self._reply_error(_internal_error())
            return
        self.placement = placement
        self._placed = True
        self.attempts += 1
        if self.attempts == 1:
            metrics = services.metrics
            metrics.token_source[prompt.source] += 1
            metrics.prompt_tokens += prompt.prompt_tokens
            metrics.overlap_tokens += placement.overlap_tokens
            self._fields, self._authorization = forwarded_fields(self._headers, self.request_id)
        self._prefill_answer = None
        if placement.disaggregated:
            self._start_prefill(request, placement, now_s)
        else:
            body = forwarded_body(request, placement.model)
            self._start_decode(body, placement, now_s)

    def _placement_refused(self, error: PlacementError, model: str) -> RequestError:
        if isinstance(error, UnknownModelError):
            served = sorted(card.model for card in self.services.placements.models())
            names = ", ".join(served[:_LISTED_MODELS]) or "none"
            if len(served) > _LISTED_MODELS:
                names += f", and {len(served) - _LISTED_MODELS} more"
            message = f"The model {model!r} is not served here. Served models: {names}."
            return RequestError(404, message, param="model", code="model_not_found")
        message = f"No instance can take the request now: {error}"
        if self._tried:
            message = f"{message}. {self._what_was_tried()}"
        return RequestError(
            503, message, kind="service_unavailable", code="no_instance_available", retry_after_s=1
        )

    def _start_prefill(self, request: InferenceRequest, placement: Placement, now_s: float) -> None:
        try:
            self._handoff = handoff_protocol(placement.prefill.protocol)
        except HandoffError as error:
            self._release_placement()
            logger.error("hand-off impossible", instance=placement.prefill.instance_id, error=str(error))
            message = f"Instance {placement.prefill.instance_id!r} is misconfigured: {error}."
            self._reply_error(RequestError(500, message, kind="server_error", code="configuration_error"))
            return
        body = self._handoff.prefill_body(request, placement.model)
        deadline_s = now_s + self.services.settings.prefill_timeout_s
        self._leg = PrefillLeg(self, placement.prefill, self._head(placement.prefill, body), body, deadline_s)
        self._leg.start()

    def _start_decode(self, body: bytes | bytearray, placement: Placement, now_s: float) -> None:
        deadline_s = now_s + self.services.settings.first_byte_timeout_s
        self._leg = DecodeLeg(self, placement.decode, self._head(placement.decode, body), body, deadline_s)
        self._leg.start()

    def _head(self, target: Target, body: bytes | bytearray) -> bytes:
        return request_head(self.url, target, self._fields, self._authorization, len(body))

    # What the legs report

    def prefill_answered(self, leg: PrefillLeg, head: ResponseHead, body: bytes) -> None:
        """The prefill leg's complete answer, 5xx excepted."""
        request, placement, handoff = self.request, self.placement, self._handoff
        assert request is not None and placement is not None and handoff is not None
        self._leg = None
        if head.status >= 300:
            self._release_placement()
            self._reply(head.status, body, content_type=head.content_type or b"application/json")
            return
        try:
            answer = self._prefill_answer = handoff.prefill_answer(body)
        except HandoffError as error:
            self._retry(InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        now_s = self.services.clock()
        self.services.placements.prefill_finished(placement.placement_id, now_s)
        if answer.transfer is None:
            self.services.metrics.handoffs_without_transfer += 1
            decode_body: bytes | bytearray = forwarded_body(request, placement.model)
        else:
            decode_body = handoff.decode_body(request, placement.model, answer.transfer)
        self._start_decode(decode_body, placement, now_s)

    def response_started(self, leg: DecodeLeg, head: ResponseHead) -> bytes:
        """The first body byte is here: the client gets this head, and no other instance can take over."""
        services, placement, connection = self.services, self.placement, leg.connection
        assert placement is not None
        now_s = self.first_byte_s = services.clock()
        self.status = head.status
        leg.deadline_s = now_s + services.settings.stall_timeout_s
        leg.forget_request()
        self.body = b""
        if head.status < 300:
            services.placements.first_token(placement.placement_id, now_s)
            services.metrics.ttft_s.observe(now_s - self._started_s)
        if head.close_delimited or (head.chunked and not self.client_takes_chunks):
            self.keep_alive = False
        if self.door.flow.write_paused and connection is not None:
            connection.transport.pause_reading()
        return response_head(
            head,
            f"x-request-id: {self.request_id}\r\n{placement_fields(placement, self.attempts)}",
            client_takes_chunks=self.client_takes_chunks,
            keep_alive=self.keep_alive,
        )

    def response_finished(self, leg: DecodeLeg) -> None:
        services, placement = self.services, self.placement
        assert placement is not None
        self._leg = None
        if self.status >= 300:
            self._release_placement()
            self._complete()
            return
        now_s = services.clock()
        usage = leg.usage()
        answer = self._prefill_answer
        if answer is not None and answer.cached_tokens is not None:
            usage = Usage(usage.prompt_tokens, usage.output_tokens, answer.cached_tokens)
        self._placed = False
        services.placements.finished(placement.placement_id, now_s, usage)
        if leg.events and self.first_byte_s is not None:
            gaps = (usage.output_tokens or leg.events - 1) - 1
            if gaps > 0:
                services.metrics.itl_s.observe((now_s - self.first_byte_s) / gaps)
        self._complete()

    def engine_error(self, leg: Leg, status: int, body: bytes) -> None:
        """An instance answered 5xx; the client has not seen anything of it."""
        detail = f"HTTP {status}: {body[:_DETAIL_BYTES].decode('utf-8', 'replace').strip()}"
        placement = self.placement
        assert placement is not None
        self._leg = None
        failure = InstanceFailure(leg.target.instance_id, FailureKind.ERROR, detail)
        if isinstance(leg, DecodeLeg) and self._prefill_answer is not None:
            self._task = asyncio.get_running_loop().create_task(self._blame(placement, failure))
        else:
            self._retry(failure)

    async def _blame(self, placement: Placement, failure: InstanceFailure) -> None:
        """A decode instance fails too when the instance it should pull from is gone: find out which it is."""
        prefill = placement.prefill
        try:
            connection = await self.services.pool.connect(prefill.host, prefill.port)
        except UpstreamUnreachable as error:
            detail = f"{error.failure.detail}; the decode instance answered {failure.detail}"
            failure = InstanceFailure(prefill.instance_id, FailureKind.UNREACHABLE, detail)
        else:
            connection.pool.release(connection)
        self._task = None
        self._retry(failure)

    def leg_failed(self, leg: Leg, failure: UpstreamFailure) -> None:
        self._leg = None
        instance_failure = InstanceFailure(leg.target.instance_id, failure.kind, failure.detail)
        if isinstance(leg, DecodeLeg) and leg.started:
            self._break_off(leg, instance_failure)
        else:
            self._retry(instance_failure)

    # Failure

    def _retry(self, failure: InstanceFailure) -> None:
        """Give this placement up and ask for another one, as long as attempts are left."""
        services, placement = self.services, self.placement
        assert placement is not None
        self._placed = False
        services.placements.failed(placement.placement_id, services.clock(), failure)
        self._tried.append(failure)
        logger.warning(
            "attempt failed",
            request_id=self.request_id,
            placement_id=placement.placement_id,
            instance=failure.instance_id,
            kind=failure.kind.value,
            detail=failure.detail,
            attempt=self.attempts,
        )
        if self.attempts >= services.settings.max_attempts:
            self._give_up(failure)
            return
        services.metrics.retries[failure.kind] += 1
        longest_s = services.settings.retry_backoff_s * 2.0 ** (self.attempts - 1)
        delay_s = longest_s * random.uniform(0.5, 1.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._place)

    def _give_up(self, failure: InstanceFailure) -> None:
        if failure.kind is FailureKind.TIMEOUT:
            status, kind, code = 504, "timeout_error", "engine_timeout"
        else:
            status, kind, code = 502, "upstream_error", "engine_failed"
        message = f"The request failed on every instance it was sent to. {self._what_was_tried()}"
        self._reply_error(RequestError(status, message, kind=kind, code=code))

    def _what_was_tried(self) -> str:
        tried = "; ".join(f"{failure.instance_id}: {failure.detail}" for failure in self._tried)
        return f"Tried {len(self._tried)}: {tried}"

    def _break_off(self, leg: DecodeLeg, failure: InstanceFailure) -> None:
        """The instance failed after the client had received a part of its response."""
        services, placement = self.services, self.placement
        assert placement is not None
        self._placed = False
        services.placements.failed(placement.placement_id, services.clock(), failure)
        services.metrics.stream_failures += 1
        logger.warning(
            "response broke off",
            request_id=self.request_id,
            placement_id=placement.placement_id,
            instance=failure.instance_id,
            kind=failure.kind.value,
            detail=failure.detail,
        )
        message = f"Instance {failure.instance_id!r} failed in the middle of the response: {failure.detail}"
        if not leg.end_broken_stream(message):
            self.keep_alive = False
        self._complete()

    def check_deadline(self, now_s: float) -> None:
        """Give a silent engine up. Called periodically."""
        leg = self._leg
        if leg is None:
            return
        settings = self.services.settings
        if isinstance(leg, DecodeLeg) and leg.started:
            if leg.reads != leg.reads_seen or self.door.flow.write_paused:
                leg.reads_seen = leg.reads
                leg.deadline_s = now_s + settings.stall_timeout_s
            elif now_s >= leg.deadline_s:
                leg.timed_out(f"the engine was silent for {settings.stall_timeout_s:g} s")
        elif now_s >= leg.deadline_s:
            prefill = isinstance(leg, PrefillLeg)
            limit_s = settings.prefill_timeout_s if prefill else settings.first_byte_timeout_s
            leg.timed_out(f"no answer within {limit_s:g} s")

    # Client side

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the engine."""
        leg = self._leg
        if isinstance(leg, DecodeLeg) and leg.connection is not None:
            leg.connection.transport.pause_reading()

    def resume(self) -> None:
        leg = self._leg
        if isinstance(leg, DecodeLeg) and leg.connection is not None:
            leg.connection.transport.resume_reading()

    def client_lost(self) -> None:
        """The client is gone: nothing is computed for it any longer."""
        self.disconnected = True
        if self.response_complete or self not in self.services.active:
            return
        self._stop()
        self._release_placement()
        self.status = CLIENT_CLOSED_REQUEST
        self._leave()

    def shut_down(self) -> None:
        """The router stops before this request is finished."""
        leg = self._leg
        self._stop()
        self._release_placement()
        self.keep_alive = False
        message = "The router is shutting down."
        if isinstance(leg, DecodeLeg) and leg.started:
            leg.end_broken_stream(message)
            self._complete()
        else:
            error = RequestError(
                503, message, kind="service_unavailable", code="shutting_down", retry_after_s=1
            )
            self._reply_error(error)

    def _stop(self) -> None:
        for pending in (self._task, self._timer):
            if pending is not None:
                pending.cancel()
        if self._leg is not None:
            self._leg.abort()
            self._leg = None

    def _release_placement(self) -> None:
        placement = self.placement
        if placement is not None and self._placed:
            self._placed = False
            self.services.placements.cancelled(placement.placement_id, self.services.clock())

    def _reply_error(self, error: RequestError) -> None:
        self._reply(error.status, error.body(), retry_after_s=error.retry_after_s)

    def _reply(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        retry_after_s: int | None = None,
    ) -> None:
        """Answer in the engine's place."""
        self.status = status
        added = f"x-request-id: {self.request_id}\r\n"
        if self.placement is not None:
            added += placement_fields(self.placement, self.attempts)
        if retry_after_s is not None:
            added += f"retry-after: {retry_after_s}\r\n"
        if not self.keep_alive:
            added += "connection: close\r\n"
        self.transport.write(
            b"%b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (status_line(status), content_type, len(body), added.encode("latin-1"), body)
        )
        self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self._leave()
        self.door.exchange_finished(self)

    def _leave(self) -> None:
        services = self.services
        self.response_complete = True
        services.active.discard(self)
        metrics = services.metrics
        duration_s = services.clock() - self._started_s
        placement = self.placement
        model = placement.model if placement is not None else "unknown"
        metrics.requests[model, self.endpoint, self.status] += 1
        metrics.request_s.observe(duration_s)
        if services.log_requests:
            first_byte_s = self.first_byte_s
            logger.info(
                "request",
                request_id=self.request_id,
                model=model,
                status=self.status,
                placement_id=placement.placement_id if placement is not None else None,
                prefill=placement.prefill.instance_id if placement is not None else None,
                decode=placement.decode.instance_id if placement is not None else None,
                ttft_ms=None if first_byte_s is None else round((first_byte_s - self._started_s) * 1e3, 2),
                duration_ms=round(duration_s * 1e3, 2),
                attempts=self.attempts,
            )


def _excluded(tried: list[InstanceFailure]) -> frozenset[str]:
    return frozenset([failure.instance_id for failure in tried]) if tried else _NOTHING


def _internal_error() -> RequestError:
    message = "The router could not place the request because of an internal error; its log has the details."
    return RequestError(500, message, kind="server_error", code="internal_error")
