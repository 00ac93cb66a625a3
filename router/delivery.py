"""A parsed request on its way to a complete response: placed, attempted, placed anew where an attempt fails.

Until the first response byte has gone to the client, a failure leads to another placement; from then on it
ends the response. Whatever goes wrong, the request gets one complete answer or one error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from conductor.placement import (
    FailureKind,
    InstanceFailure,
    Placement,
    PlacementError,
    PlacementRequest,
    RejectedError,
    Target,
    Usage,
)
from router.attempt import Attempt
from router.errors import RequestError
from router.framing import ResponseHead
from router.heads import forwarded_fields, request_head
from router.hedging import FirstBytes, Hedge
from router.inference import InferenceRequest
from router.legs import DecodeLeg
from router.placement_question import placement_question
from router.refusals import given_up, not_placed, not_retried
from router.request_trace import RequestTrace
from router.services import RouterServices, logger
from router.terms import RequestTerms
from router.tokens import Prompt
from router.usage import NO_USAGE

if TYPE_CHECKING:
    from router.exchange import Exchange


class Delivery(msgspec.Struct, eq=False):
    """Gets one request answered. ``placement`` is the last one that was made, ``attempts`` their number."""

    _exchange: Exchange
    services: RouterServices
    _request: InferenceRequest
    _prompt: Prompt
    _terms: RequestTerms
    _trace: RequestTrace | None
    placement: Placement | None = None
    attempts: int = 0
    usage: Usage = NO_USAGE
    _counted: bool = False
    _attempt: Attempt | None = None
    _tried: tuple[InstanceFailure, ...] = ()
    _timer: asyncio.TimerHandle | None = None  # of the next attempt
    _hedge: Hedge | None = None
    _sent_s: float = 0.0

    def place(self) -> None:
        """Ask for a placement and start its attempt."""
        services = self.services
        try:
            if self._trace is not None:
                self._trace.placing(self._prompt)
            asked = self._asked()
            now_s = services.clock()
            if self._request.endpoint.computes:
                placement = services.line.arrive(self, asked, now_s)
            else:
                placement = services.line.hold(self, services.placements.anywhere(asked, now_s))
            if placement is not None:
                placed_s = services.clock()
                self.placed(placement)
                services.metrics.placement_s.observe(placed_s - now_s)
        except PlacementError as error:
            self.refused(error)
        except Exception:
            self.fail_unexpectedly()

    def _asked(self) -> PlacementRequest:
        exchange, request, previous = self._exchange, self._request, self.placement
        asked = placement_question(
            request,
            self._prompt,
            self._terms,
            request_id=exchange.request_id,
            arrived_s=exchange.started_s,
            streamed=request.stream,
        )
        if previous is not None:
            excluded = frozenset([failure.instance_id for failure in self._tried])
            asked = replace(asked, excluded=excluded, retry_of=previous.placement_id or None)
        return asked if exchange.grant is None else replace(asked, grant=exchange.grant.number)

    def refused(self, error: PlacementError) -> None:
        """There is no placement, at once or after a wait, or it was taken back."""
        self._end_hedge()
        self._attempt = None
        try:
            if self._trace is not None:
                self._trace.failed("refused", str(error))
            served = self.services.placements.models
            self._exchange.reply_error(not_placed(error, self._request.model, served, self._tried))
        except Exception:
            self.fail_unexpectedly()

    def placed(self, placement: Placement) -> None:
        """Start the attempt of a placement, made at once or after a wait."""
        request, services = self._request, self.services
        apart = placement.prefill.instance_id != placement.decode.instance_id
        if apart and not request.endpoint.generates:
            placement = replace(placement, decode=placement.prefill)  # nothing to hand over
            apart = False
        self.placement = placement
        self.attempts += 1
        self._attempt = attempt = Attempt(self, self._exchange, services, request, placement)
        try:
            self._begin(placement)
            if apart:
                attempt.start_handoff()
            else:
                attempt.start()
                # A hand-off reads it again; else its memory is better used for the next request, while in reach.
                request.parsed = None
            if services.first_bytes is not None:
                self._watch(attempt, services.first_bytes)
        except RequestError as error:
            attempt.end()
            self.attempt_refused(error)
        except Exception:
            self.fail_unexpectedly()
        if not self._counted:  # not before the engine has the request
            self._count(placement)

    def _begin(self, placement: Placement) -> None:
        if self._trace is not None:
            self._trace.placed(placement)
        if self.attempts == 1:
            self.services.retry_budget.requests[placement.model] += 1

    def _count(self, placement: Placement) -> None:
        self._counted = True
        if self._request.endpoint.computes:
            metrics, prompt = self.services.metrics, self._prompt
            metrics.token_source[prompt.source] += 1
            metrics.prompt_tokens += prompt.prompt_tokens
            metrics.overlap_tokens += placement.overlap_tokens

    # What the attempt reports

    def engine_head(self, target: Target, body_bytes: int, *, beside: bool = False) -> bytes:
        """The head of a request to an engine, which may go on beside the one before it."""
        exchange = self._exchange
        head, trace = exchange.head, self._trace
        if trace is None:
            fields, credentials = head.forwarded
        else:
            fields, credentials = forwarded_fields(trace.engine_headers(head.headers))
            fields += trace.leg(target, beside=beside)
        if self.services.keys is not None:
            credentials = b""  # a key to this router is nothing that engines should see
        return request_head(head.url, target, fields, credentials, exchange.request_id, body_bytes)

    def engine_answered(self, status: int, *, beside: bool = False) -> None:
        if self._trace is not None:
            if beside:
                self._trace.answered_beside(status)
            else:
                self._trace.answered(status)

    def attempt_answered(self, status: int, body: bytes, content_type: bytes) -> None:
        """An engine refuses the request itself: another one would, too."""
        self._attempt = None
        self._exchange.reply(status, body, content_type=content_type)

    def attempt_refused(self, error: RequestError) -> None:
        """A retry would meet the same."""
        self._attempt = None
        self._exchange.reply_error(error)

    def attempt_failed(self, attempt: Attempt, failure: InstanceFailure) -> None:
        """Ask for another placement, as long as attempts are left; or wait for the one beside it."""
        self._tried += (failure,)
        logger.warning(
            "attempt failed",
            request_id=self._exchange.request_id,
            placement_id=attempt.placement.placement_id,
            instance=failure.instance_id,
            kind=failure.kind.value,
            detail=failure.detail,
            attempt=self.attempts,
        )
        hedge, self._hedge = self._hedge, None
        if hedge is not None and (other := hedge.failed(attempt)) is not None:
            self._go_on_with(other)
            return
        self._attempt = None
        if self._trace is not None:
            self._trace.failed(failure.kind.value, failure.detail)
        self._retry(attempt.placement.model, failure)

    def _retry(self, model: str, failure: InstanceFailure) -> None:
        metrics, settings = self.services.metrics, self.services.settings
        if self.attempts >= settings.max_attempts:
            self._exchange.reply_error(given_up(self._tried))
            return
        if not self.services.retry_budget.take(model):
            metrics.retries_denied[failure.kind] += 1
            self._exchange.reply_error(not_retried(self._tried))
            return
        metrics.retries[failure.kind] += 1
        delay_s = 0.0  # nobody is overloaded because one instance is gone
        if failure.kind is not FailureKind.UNREACHABLE or self.attempts > 1:
            delay_s = settings.retry_backoff_s * 2.0 ** (self.attempts - 1) * random.uniform(0.5, 1.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.place)

    def response_started(self, attempt: Attempt, leg: DecodeLeg, head: ResponseHead, now_s: float) -> bytes:
        """Returns the client's head."""
        exchange, services = self._exchange, self.services
        if services.first_bytes is not None:
            self._settle(attempt, services.first_bytes, now_s, succeeded=head.status < 300)
        if self._trace is not None:
            self.engine_answered(head.status)
        if self._request.stream and head.status < 300:
            services.metrics.ttft_s.observe(now_s - exchange.started_s)
        if leg.connection is not None:  # the rest follows
            self._request.release()
            if exchange.door.flow.write_paused:
                leg.connection.transport.pause_reading()
        return exchange.response_started(head, now_s)

    def response_finished(self, usage: Usage | None, events: int, now_s: float) -> None:
        """``usage`` is None of a response that nothing was computed for."""
        self._attempt = None
        exchange = self._exchange
        if usage is not None:
            self.usage = usage
            if events and exchange.first_byte_s is not None:
                gaps = (usage.output_tokens or 0) - 1
                if gaps > 0:
                    self.services.metrics.itl_s.observe((now_s - exchange.first_byte_s) / gaps)
        exchange.complete(now_s)

    def response_broke_off(self, leg: DecodeLeg, failure: InstanceFailure, usage: Usage) -> None:
        """The instance failed after the client had received a part of its response."""
        self._attempt = None
        if self._trace is not None:
            self._trace.failed(failure.kind.value, failure.detail)
        self.services.metrics.stream_failures += 1
        logger.warning(
            "response broke off",
            request_id=self._exchange.request_id,
            placement_id=self.placement and self.placement.placement_id,
            instance=failure.instance_id,
            kind=failure.kind.value,
            detail=failure.detail,
        )
        message = f"Instance {failure.instance_id!r} failed in the middle of the response: {failure.detail}"
        self.usage = usage
        if not leg.end_broken_stream(message):
            self._exchange.keep_alive = False
        self._exchange.complete(self.services.clock())

    # A second instance beside one that is late

    def _watch(self, attempt: Attempt, first_bytes: FirstBytes) -> None:
        placement = attempt.placement
        self._sent_s = self.services.clock()
        if self.attempts > 1 or placement.disaggregated or not self._request.endpoint.computes:
            return
        delay_s = first_bytes.late_after_s(placement.model, self._request.stream)
        if delay_s is not None:
            self._hedge = Hedge(self, attempt, delay_s)

    def _settle(self, winner: Attempt, first_bytes: FirstBytes, now_s: float, *, succeeded: bool) -> None:
        """The response has begun."""
        hedge, self._hedge = self._hedge, None
        two = hedge is not None and hedge.second is not None
        if succeeded and (two or self.attempts == 1):
            first_bytes.observe(winner.placement.model, self._request.stream, now_s - self._sent_s)
        if hedge is not None:
            hedge.settle(winner)
        if two:
            self._go_on_with(winner)

    def asked_beside(self, placement: Placement) -> PlacementRequest:
        """For another instance than that placement's; limits of keys have been counted."""
        excluded = frozenset((placement.prefill.instance_id,))
        hedge_of = placement.placement_id
        return replace(self._asked(), excluded=excluded, retry_of=None, hedge_of=hedge_of, grant=0)

    def attempt_beside(self, placement: Placement) -> Attempt:
        self.attempts += 1
        return Attempt(self, self._exchange, self.services, self._request, placement, beside=True)

    def _end_hedge(self) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.end()

    def _go_on_with(self, attempt: Attempt) -> None:
        """Of two that were asked, the other one is left."""
        if self._trace is not None:
            self._trace.settled(first=attempt is self._attempt)
            self._trace.placed(attempt.placement)
        self._attempt, self.placement = attempt, attempt.placement

    def tell(self, report: Callable[..., None], *arguments: object) -> None:
        """Report to the scheduler; a fault of its must not cost the client its response."""
        try:
            report(*arguments)
        except RejectedError:
            raise
        except Exception:
            logger.exception(
                "the scheduler failed", request_id=self._exchange.request_id, call=report.__name__
            )
        line = self.services.line
        if line.waiting:
            line.pump()

    def fail_unexpectedly(self) -> None:
        """Where an exception is handled that nobody foresaw."""
        self._exchange.fail_unexpectedly()

    # What happens to the connection

    def check_deadline(self, now_s: float) -> None:
        """Give a silent engine up, or a client that takes nothing. Called periodically."""
        client_reads = not self._exchange.door.flow.write_paused
        for attempt in self._attempts_under_way():
            attempt.check_deadline(now_s, client_reads=client_reads)

    def client_stalled(self, limit_s: float) -> None:
        """It holds a place at an engine, and of its key's limits, for a response that it does not read."""
        logger.warning(
            "the client took nothing of its response and is given up",
            request_id=self._exchange.request_id,
            for_s=limit_s,
        )
        self._exchange.door.transport.abort()

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """Place anew what waits for an instance that is down."""
        for attempt in self._attempts_under_way():
            attempt.instance_lost(instance_id, reason)

    def _attempts_under_way(self) -> list[Attempt]:
        both = (self._attempt, None if self._hedge is None else self._hedge.second)
        return [attempt for attempt in both if attempt is not None]

    def placement_revoked(self, placement_id: str, error: PlacementError) -> None:
        """Answer with the refusal; a response that has begun goes on."""
        if self._attempt is not None and self._attempt.revoked(placement_id):
            self.refused(error)

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the engine."""
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self) -> None:
        if self._attempt is not None:
            self._attempt.resume()

    def stop(self, reason: str) -> bool:
        """Give the request up; tells whether a part of the response has gone to the client."""
        self.services.line.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_hedge()
        attempt, self._attempt = self._attempt, None
        usage = None if attempt is None else attempt.stop(reason)
        if usage is None:
            return False
        self.usage = usage
        return True
