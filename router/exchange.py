"""One inference request on a client's connection, from its first byte to the end of its response.

An exchange is driven by callbacks, not by a task: a request that finds its tokens at once and a pooled
connection to its engine costs no suspension at all.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from conductor.placement import Placement, PlacementError, TokenSource, Usage
from router.accounts import Account, Grant
from router.api_keys import ApiKey, KeyRing
from router.delivery import Delivery
from router.error_shapes import error_shape
from router.errors import RequestError, internal_error, status_line, too_long
from router.framing import ResponseHead
from router.heads import changed_response_head, placement_fields
from router.inference import Body, InferenceRequest
from router.passed_tokens import with_token_ids
from router.placement_view import placement_view
from router.request_head import RequestHead
from router.request_trace import RequestTrace
from router.services import RouterServices, logger
from router.terms import RequestTerms
from router.tokens import Prompt, failure_of, tokenized, untokenized
from router.usage import NO_USAGE

if TYPE_CHECKING:
    from router.front_door import FrontDoorProtocol

CLIENT_CLOSED_REQUEST = 499


class _Unheard:
    """Stands in for the event by which uvicorn wakes an ASGI application."""

    def set(self) -> None:
        pass


class Exchange:
    """The request and response that a connection is busy with; takes the place of uvicorn's cycle."""

    __slots__ = (
        "_account",
        "_delivery",
        "_key",
        "_refusal",
        "_tokenizing",
        "body",
        "disconnected",  # told by uvicorn, to those who wait for its event
        "door",
        "first_byte_s",
        "grant",
        "head",
        "keep_alive",
        "more_body",
        "request_id",
        "response_complete",
        "services",
        "started_s",
        "status",
        "trace",
    )

    message_event = _Unheard()
    delivery_kind: ClassVar[type[Delivery]] = Delivery

    def __init__(self, door: FrontDoorProtocol, head: RequestHead, body: Body | None = None) -> None:
        """``body``, where all of it is here and it is no longer than it may be."""
        services = door.services
        self.door = door
        self.services: RouterServices = services
        self.head = head
        self.keep_alive = head.keep_alive
        self.body: Body = body or b""
        self.more_body = body is None
        self.response_complete = False
        self.status = 0
        self.started_s = 0.0
        self.first_byte_s: float | None = None
        self.trace: RequestTrace | None = None
        self.request_id = head.request_id or services.new_request_id()
        self.grant: Grant | None = None
        self._refusal: RequestError | None = None
        self._tokenizing: asyncio.Task[None] | None = None
        self._delivery: Delivery | None = None
        self._key: ApiKey | None = None
        self._account: Account | None = None

    # Request, as the connection's parser delivers it

    def authenticate(self, keys: KeyRing) -> None:
        """Refuse a request without a known key before its body is read."""
        try:
            self._key, self._account = keys.identify(self.head.headers)
        except RequestError as error:
            self.refuse(error)

    def announce_length(self, body_bytes: int) -> None:
        """Refuse a request whose declared body is too long before it is sent."""
        if self._refusal is None and body_bytes > self.services.settings.max_body_bytes:
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
        if self.door.active is self:
            self._begin()

    def activate(self) -> None:
        """It is this request's turn to be answered: earlier responses on this connection are complete."""
        door = self.door
        if door.transport.is_closing():
            return
        door.active = self
        if not self.more_body or self._refusal is not None:
            self._begin()
        elif self.head.expects_continue:
            self.services.outbox.write(door.transport, b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse_length(self) -> None:
        self.refuse(too_long(self.services.settings.max_body_bytes))

    def refuse(self, error: RequestError) -> None:
        """Without reading the body to its end, or to another request behind it. Only the first call counts."""
        if self._refusal is not None:
            return
        self._refusal = error
        self.keep_alive = False
        self.body = b""
        self.more_body = True  # which nobody wants: the connection is closed behind the answer
        if self.door.active is self:
            self._begin()

    def _begin(self) -> None:
        services = self.services
        self.started_s = services.clock()
        services.active.add(self)
        if services.tracing is not None:
            self.trace = services.tracing.begin(self.head.endpoint, self.head.headers, self.request_id)
        if self._refusal is not None:
            self.reply_error(self._refusal)
            return
        try:
            self._parse_and_deliver()
        except RequestError as error:
            self.reply_error(error)
        except Exception:  # the parser that called would take it for malformed input
            self.fail_unexpectedly()

    def fail_unexpectedly(self) -> None:
        """Where an exception is handled that nobody foresaw: log it, and give the request up."""
        logger.exception("request failed unexpectedly", request_id=self.request_id)
        if self.response_complete:
            return
        error = internal_error()
        if self._stop(error.message) or self.first_byte_s is not None:
            self.keep_alive = False
            self.complete(self.services.clock())
        else:
            self.reply_error(error)

    def _parse_and_deliver(self) -> None:
        head, services, key = self.head, self.services, self._key
        if self._account is not None:
            self.grant = self._account.enter(self.started_s)
        terms = head.terms(key)
        request, chat = services.read(head.endpoint, self.body)
        if key is not None:
            key.check_model(request.model)
        if self.trace is not None:
            self.trace.tokenizing(request)
        view, prompt = request, None
        if chat is None:
            self.body = request.body  # not twice, where it had to be copied
            seen, fallback = self._view(request)
            if seen is None:
                self._deliver(request, untokenized(request, fallback), terms)
                return
            view, prompt = seen, services.tokens.prompt_at_once(seen)
        elif chat.tokens is not None:
            prompt = tokenized(chat.tokens, TokenSource.LOCAL, None, chat.known_hashes)
        if prompt is None:
            tokenizing = self._tokenize_and_deliver(request, view, terms, plain=chat is not None)
            self._tokenizing = asyncio.get_running_loop().create_task(tokenizing)
        else:
            self._deliver(request, prompt, terms)

    def _view(self, request: InferenceRequest) -> tuple[InferenceRequest | None, str | None]:
        """What is tokenized for the placement; None: load alone places it, and why where that is a failure."""
        try:
            return placement_view(request), None
        except Exception as error:  # only the engine judges what is in messages and tools
            self.services.metrics.tokenization_failures[TokenSource.LOCAL] += 1
            return None, failure_of(TokenSource.LOCAL, error)

    async def _tokenize_and_deliver(
        self, request: InferenceRequest, view: InferenceRequest, terms: RequestTerms, *, plain: bool
    ) -> None:
        try:
            prompt = await self.services.tokens.prompt(view, plain=plain)
            self._tokenizing = None
            self._deliver(request, prompt, terms)
        except RequestError as error:
            self.reply_error(error)
        except Exception:
            self.fail_unexpectedly()

    def _deliver(self, request: InferenceRequest, prompt: Prompt, terms: RequestTerms) -> None:
        services = self.services
        if self.grant is not None and request.endpoint.computes:
            try:
                self.grant.take_tokens(prompt.prompt_tokens, services.clock())
            except RequestError as error:
                self.reply_error(error)
                return
        if request.model in services.settings.pass_tokens:
            passed = with_token_ids(request, prompt)
            services.metrics.prompts_passed_as_tokens += passed is not request
            request = passed
        self._delivery = delivery = self.delivery_kind(self, services, request, prompt, terms, self.trace)
        delivery.place()

    # The connection, and time

    def pause(self) -> None:
        """The client reads too slowly."""
        if self._delivery is not None:
            self._delivery.pause()

    def resume(self) -> None:
        if self._delivery is not None:
            self._delivery.resume()

    def check_deadline(self, now_s: float) -> None:
        """Called periodically."""
        if self._delivery is not None:
            try:
                self._delivery.check_deadline(now_s)
            except Exception:
                self.fail_unexpectedly()

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """An instance stopped answering its health check."""
        if self._delivery is not None:
            try:
                self._delivery.instance_lost(instance_id, reason)
            except Exception:
                self.fail_unexpectedly()

    def placement_revoked(self, placement_id: str, error: PlacementError) -> None:
        if self._delivery is not None:
            try:
                self._delivery.placement_revoked(placement_id, error)
            except Exception:
                self.fail_unexpectedly()

    def client_lost(self) -> None:
        """The client is gone: nothing is computed for it any longer."""
        if self.response_complete or self not in self.services.active:
            return
        self._stop("The client is gone.")
        self.status = CLIENT_CLOSED_REQUEST
        self._leave(self.services.clock())

    def shut_down(self) -> None:
        """The router stops before this request is finished."""
        self.keep_alive = False
        message = "The router is shutting down."
        if self._stop(message):
            self.complete(self.services.clock())
        else:
            self.reply_error(
                RequestError(503, message, kind="service_unavailable", code="shutting_down", retry_after_s=1)
            )

    def _stop(self, reason: str) -> bool:
        """Whether a part of the response has been sent."""
        if self._tokenizing is not None:
            self._tokenizing.cancel()
        return self._delivery is not None and self._delivery.stop(reason)

    # Response

    def response_started(self, head: ResponseHead, now_s: float) -> bytes:
        """What to write for an engine's head: from here on the response is this engine's."""
        self.status = head.status
        self.first_byte_s = now_s
        self.body = b""  # the connection remembers this exchange until the next one
        takes_chunks = self.head.client_takes_chunks
        if head.close_delimited or (head.chunked and not takes_chunks):
            self.keep_alive = False
        own = self._own_fields()
        own_cors = self.services.cors is not None
        if own_cors or not takes_chunks:
            return changed_response_head(head, own, own_cors=own_cors, client_takes_chunks=takes_chunks)
        return b"%b%b\r\n" % (head.block, own.encode("latin-1"))

    def reply_error(self, error: RequestError) -> None:
        body = error_shape(self.head.endpoint).body(error, self.request_id)
        self.reply(error.status, body, retry_after_s=error.retry_after_s)

    def reply(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        retry_after_s: int | None = None,
        fields: str = "",
    ) -> None:
        """Answer in the engine's place; ``fields`` are further lines of the head."""
        self.status = status
        added = self._own_fields() + fields
        if retry_after_s is not None:
            added += f"retry-after: {retry_after_s}\r\n"
        self.services.outbox.write(
            self.door.transport,
            b"%b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (status_line(status), content_type, len(body), added.encode("latin-1"), body),
        )
        self.complete(self.services.clock())

    def complete(self, now_s: float) -> None:
        """The response is written, as far as it can be."""
        self._leave(now_s)
        self.door.exchange_finished(self)

    def _own_fields(self) -> str:
        fields = f"x-request-id: {self.request_id}\r\n"
        delivery, services = self._delivery, self.services
        if self._account is not None:
            fields += self._account.fields(services.clock())
        if delivery is not None and delivery.placement is not None:
            fields += placement_fields(delivery.placement, delivery.attempts)
        if services.cors is not None:
            cors = services.cors.answer_fields(self.head.headers)
            fields += "".join(f"{name}: {value}\r\n" for name, value in cors.items())
        return fields if self.keep_alive else f"{fields}connection: close\r\n"

    def _leave(self, now_s: float) -> None:
        services, delivery = self.services, self._delivery
        self.response_complete = True
        services.active.discard(self)
        if self._account is not None:
            self._settle_account(self._account, NO_USAGE if delivery is None else delivery.usage, now_s)
        placement = None if delivery is None else delivery.placement
        model = "unknown" if placement is None else placement.model
        self._count_answer(model, now_s - self.started_s)
        if self.trace is not None:
            self._end_trace(self.trace, delivery)
        if services.settings.log_requests:
            self._log(model, placement, now_s)
        self._delivery = None  # no reference cycle: what the request held is freed now, not by the collector

    def _end_trace(self, trace: RequestTrace, delivery: Delivery | None) -> None:
        trace.end(
            self.status,
            NO_USAGE if delivery is None else delivery.usage,
            attempts=0 if delivery is None else delivery.attempts,
            first_byte_after_s=None if self.first_byte_s is None else self.first_byte_s - self.started_s,
        )

    def _log(self, model: str, placement: Placement | None, now_s: float) -> None:
        first_byte_s, trace, delivery = self.first_byte_s, self.trace, self._delivery
        logger.info(
            "request",
            request_id=self.request_id,
            model=model,
            status=self.status,
            placement_id=placement.placement_id if placement is not None else None,
            prefill=placement.prefill.instance_id if placement is not None else None,
            decode=placement.decode.instance_id if placement is not None else None,
            first_byte_ms=None if first_byte_s is None else round((first_byte_s - self.started_s) * 1e3, 2),
            duration_ms=round((now_s - self.started_s) * 1e3, 2),
            attempts=delivery.attempts if delivery is not None else 0,
            **({} if trace is None else {"trace_id": trace.trace_id}),
        )

    def _settle_account(self, account: Account, usage: Usage, now_s: float) -> None:
        account.tenant.requests[self.status] += 1
        if self.grant is not None:
            self.grant.end(
                now_s,
                failed=self.status >= 400 and self.status != CLIENT_CLOSED_REQUEST,
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
            )

    def _count_answer(self, model: str, duration_s: float) -> None:
        metrics = self.services.metrics
        metrics.requests[model, self.head.endpoint, self.status] += 1
        metrics.request_s.observe(duration_s)
