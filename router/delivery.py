"""A parsed request on its way to a complete response: placed, attempted, placed anew where an attempt fails.

Until the first response byte has gone to the client, a failure leads to another placement; from then on it
ends the response. Whatever goes wrong, the request gets one complete answer or one error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

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
from router.services import logger
from router.terms import RequestTerms
from router.tokens import Prompt
from router.usage import NO_USAGE

if TYPE_CHECKING:
    from router.exchange import Exchange

_NOTHING: frozenset[str] = frozenset()


class Delivery:
    """Gets one request answered. ``placement`` is the last one that was made, ``attempts`` their number."""

    __slots__ = (
        "_attempt",
        "_credentials",
        "_exchange",
        "_fields",
        "_hedge",
        "_prompt",
        "_request",
        "_sent_s",
        "_terms",
        "_timer",
        "_trace",
        "_tried",
        "attempts",
        "client_takes_chunks",
        "endpoint",
        "placement",
        "services",
        "transport",
        "usage",
    )

    def __init__(
        self,
        exchange: Exchange,
        request: InferenceRequest,
        prompt: Prompt,
        terms: RequestTerms,
    ) -> None:
        self.services = exchange.services
        self.transport = exchange.transport
        self.client_takes_chunks = exchange.head.client_takes_chunks
        self.endpoint = request.endpoint
        self.placement: Placement | None = None
        self.attempts = 0
        self.usage = NO_USAGE
        self._exchange = exchange
        self._request = request
        self._prompt = prompt
        self._terms = terms
        trace = self._trace = exchange.trace
        if trace is None:
            self._fields, self._credentials = exchange.head.forwarded()
        else:
            headers = trace.engine_headers(exchange.head.headers)
            self._fields, self._credentials = forwarded_fields(headers)
        if exchange.services.keys is not None:
            self._credentials = b""  # a key to this router is nothing that engines should see
        self._attempt: Attempt | None = None
        self._sent_s = 0.0
        self._hedge: Hedge | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tried: list[InstanceFailure] = []

    def place(self) -> None:
        """Ask for a placement and start its attempt."""
        self._timer = None
        try:
            self._place()
        except PlacementError as error:
            self.refused(error)
        except Exception:
            self.fail_unexpectedly()

    def _place(self) -> None:
        services = self.services
        if self._trace is not None:
            self._trace.placing(self._prompt)
        asked = self._asked()
        now_s = services.clock()
        if self.endpoint.computes:
            placement = services.line.arrive(self, asked)
        else:
            placement = services.line.hold(self, services.placements.anywhere(asked, now_s))
        if placement is not None:
            services.metrics.placement_s.observe(services.clock() - now_s)
            self.placed(placement)

    def _asked(self) -> PlacementRequest:
        previous = self.placement
        return placement_question(
            self._request,
            self._prompt,
            self._terms,
            request_id=self._exchange.request_id,
            arrived_s=self._exchange.started_s,
            streamed=self._request.stream,
            excluded=_excluded(self._tried),
            retry_of=previous.placement_id or None if previous is not None else None,
            grant=self._exchange.grant_number,
        )

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
        apart = placement.disaggregated
        if apart and not self.endpoint.generates:
            placement = replace(placement, decode=placement.prefill)  # nothing to hand over
            apart = False
        self.placement = placement
        self.attempts += 1
        attempt = self._attempt = Attempt(self, self._request, placement)
        try:
            self._count(placement)
            attempt.start()
            if not apart:  # a hand-off writes another body when the prefill is done
                self._request.forget_document()
            if self.services.first_bytes is not None:
                self._watch(attempt, self.services.first_bytes)
        except RequestError as error:
            attempt.end()
            self.attempt_refused(error)
        except Exception:
            self.fail_unexpectedly()

    def _count(self, placement: Placement) -> None:
        if self._trace is not None:
            self._trace.placed(placement)
        if self.attempts > 1:
            return
        services = self.services
        services.retry_budget.requested(placement.model)
        if self.endpoint.computes:
            metrics = services.metrics
            metrics.token_source[self._prompt.source] += 1
            metrics.prompt_tokens += self._prompt.prompt_tokens
            metrics.overlap_tokens += placement.overlap_tokens

    # What the attempt reports

    def engine_head(self, target: Target, body_bytes: int, *, beside: bool = False) -> bytes:
        """The head of a request to an engine, which may go on beside the one before it."""
        fields = self._fields
        if self._trace is not None:
            fields += self._trace.leg(target, beside=beside)
        exchange = self._exchange
        return request_head(
            exchange.head.url, target, fields, self._credentials, exchange.request_id, body_bytes
        )

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
        self._tried.append(failure)
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
        self._request.release()
        if head.status < 300 and self._request.stream:
            services.metrics.ttft_s.observe(now_s - exchange.started_s)
        if exchange.door.flow.write_paused and leg.connection is not None:
            leg.connection.transport.pause_reading()
        return exchange.response_started(head, now_s)

    def response_finished(self, usage: Usage | None, events: int) -> None:
        """``usage`` is None of a response that nothing was computed for."""
        self._attempt = None
        exchange = self._exchange
        if usage is not None:
            self.usage = usage
            gaps = (usage.output_tokens or 0) - 1
            if events and gaps > 0 and exchange.first_byte_s is not None:
                self.services.metrics.itl_s.observe((self.services.clock() - exchange.first_byte_s) / gaps)
        exchange.complete()

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
        self._exchange.complete()

    # A second instance beside one that is late

    def _watch(self, attempt: Attempt, first_bytes: FirstBytes) -> None:
        placement = attempt.placement
        self._sent_s = self.services.clock()
        if self.attempts > 1 or placement.disaggregated or not self.endpoint.computes:
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
        return Attempt(self, self._request, placement, beside=True)

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
        self.services.line.pump()

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
        self.transport.abort()

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


def _excluded(tried: list[InstanceFailure]) -> frozenset[str]:
    return frozenset([failure.instance_id for failure in tried]) if tried else _NOTHING
