"""A parsed request on its way to a complete response: placed, sent to one or two instances, retried.

The legs report here. Until the first response byte has gone to the client, a failure leads to another
placement; from then on it ends the response.
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
from router.disaggregation import Handoff, HandoffError, PrefillAnswer, handoff_protocol
from router.disaggregation.bodies import forwarded_body
from router.disaggregation.bootstrap import bootstrap_head, bootstrap_target
from router.errors import internal_error
from router.framing import ResponseHead
from router.heads import Headers, forwarded_fields, request_head
from router.inference import Endpoint, InferenceRequest
from router.legs import BootstrapLeg, DecodeLeg, Leg, PrefillLeg
from router.refusals import given_up, misconfigured, not_placed
from router.services import logger
from router.terms import RequestTerms
from router.tokens import Prompt
from router.upstream import UpstreamFailure, UpstreamUnreachable
from router.usage import NO_USAGE

if TYPE_CHECKING:
    from router.exchange import Exchange

_DETAIL_BYTES = 300
_NOTHING: frozenset[str] = frozenset()
_ONE_EVENT_A_TOKEN = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))


class Delivery:
    """Gets one request answered. ``placement`` is the last one that was made, ``attempts`` their number."""

    __slots__ = (
        "_credentials",
        "_exchange",
        "_fields",
        "_handoff",
        "_leg",
        "_placed",
        "_prefill_answer",
        "_prompt",
        "_request",
        "_task",
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
        headers: Headers,
        request: InferenceRequest,
        prompt: Prompt,
        terms: RequestTerms,
    ) -> None:
        self.services = exchange.services
        self.transport = exchange.transport
        self.client_takes_chunks = exchange.client_takes_chunks
        self.endpoint = request.endpoint
        self.placement: Placement | None = None
        self.attempts = 0
        self.usage = NO_USAGE
        self._exchange = exchange
        self._request = request
        self._prompt = prompt
        self._terms = terms
        trace = self._trace = exchange.trace
        if trace is not None:
            headers = trace.engine_headers(headers)
        self._fields, self._credentials = forwarded_fields(headers, exchange.request_id)
        if exchange.services.keys is not None:
            self._credentials = b""  # a key to this router is nothing that engines should see
        self._placed = False  # the last placement has not ended yet
        self._handoff: Handoff | None = None
        self._prefill_answer: PrefillAnswer | None = None
        self._leg: Leg | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tried: list[InstanceFailure] = []

    def place(self) -> None:
        """Ask for a placement and start its first leg."""
        self._timer = None
        request, prompt, services = self._request, self._prompt, self.services
        previous = self.placement
        if self._trace is not None:
            self._trace.placing(prompt)
        asked = PlacementRequest(
            request_id=self._exchange.request_id,
            model=request.model,
            tokens=prompt.tokens,
            prompt_tokens=prompt.prompt_tokens,
            token_source=prompt.source,
            token_fallback=prompt.fallback,
            streamed=request.stream,
            max_output_tokens=request.max_output_tokens,
            cache_salt=request.cache_salt,
            tenant=self._terms.tenant,
            route=request.endpoint.value,
            priority=self._terms.priority,
            arrived_s=self._exchange.started_s,
            ttft_objective_s=self._terms.ttft_objective_s,
            tbt_objective_s=self._terms.tbt_objective_s,
            excluded=_excluded(self._tried),
            retry_of=previous.placement_id or None if previous is not None else None,
            grant=self._exchange.grant_number,
        )
        now_s = services.clock()
        try:
            if self.endpoint.computes:
                placement = services.line.arrive(self, asked)
            else:
                placement = services.line.hold(self, services.placements.anywhere(asked, now_s))
        except PlacementError as error:
            self.refused(error)
            return
        except Exception:
            logger.exception("placement failed unexpectedly", request_id=self._exchange.request_id)
            self._exchange.reply_error(internal_error())
            return
        if placement is not None:
            services.metrics.placement_s.observe(services.clock() - now_s)
            self.placed(placement)

    def refused(self, error: PlacementError) -> None:
        """There is no placement, at once or after a wait."""
        if self._trace is not None:
            self._trace.failed("refused", str(error))
        served = self.services.placements.models
        self._exchange.reply_error(not_placed(error, self._request.model, served, self._tried))

    def placed(self, placement: Placement) -> None:
        """Start the first leg of a placement, made at once or after a wait."""
        self.placement = placement
        self._placed = True
        self.attempts += 1
        try:
            self._start(placement)
        except Exception:
            self._exchange.fail_unexpectedly()

    def _start(self, placement: Placement) -> None:
        request, services, now_s = self._request, self.services, self.services.clock()
        if placement.disaggregated and not self.endpoint.generates:
            self.placement = placement = replace(placement, decode=placement.prefill)  # nothing to hand over
        if self._trace is not None:
            self._trace.placed(placement)
        if self.attempts == 1 and self.endpoint.computes:
            metrics = services.metrics
            metrics.token_source[self._prompt.source] += 1
            metrics.prompt_tokens += self._prompt.prompt_tokens
            metrics.overlap_tokens += placement.overlap_tokens
        self._prefill_answer = None
        if placement.disaggregated:
            self._start_prefill(request, placement, now_s)
        else:
            body = forwarded_body(request, placement.model)
            self._start_decode(body, placement, now_s)

    def _start_prefill(self, request: InferenceRequest, placement: Placement, now_s: float) -> None:
        try:
            handoff = handoff_protocol(placement.prefill.protocol).begin(placement.prefill)
        except HandoffError as error:
            self._release_placement()
            logger.error("hand-off impossible", instance=placement.prefill.instance_id, error=str(error))
            self._exchange.reply_error(misconfigured(placement.prefill.instance_id, str(error)))
            return
        if not handoff.hands_over(request):
            self._decode_computes(request, placement, now_s)
            return
        self._handoff = handoff
        if handoff.bootstrap_path is None:
            self._send_prefill(handoff, placement, now_s)
            return
        beside = bootstrap_target(placement.prefill)
        deadline_s = now_s + self.services.settings.bootstrap_timeout_s
        self._leg = BootstrapLeg(
            self, beside, bootstrap_head(handoff.bootstrap_path, beside), b"", deadline_s
        )
        self._leg.start()

    def _send_prefill(self, handoff: Handoff, placement: Placement, now_s: float) -> None:
        body = handoff.prefill_body(self._request, placement.model)
        deadline_s = now_s + self.services.settings.prefill_timeout_s
        self._leg = PrefillLeg(self, placement.prefill, self._head(placement.prefill, body), body, deadline_s)
        self._leg.start()

    def _decode_computes(self, request: InferenceRequest, placement: Placement, now_s: float) -> None:
        """The decode instance gets the whole request: there is nothing that it could take over."""
        self.services.metrics.handoffs_without_transfer += 1
        self._start_decode(forwarded_body(request, placement.model), placement, now_s)

    def _start_decode(self, body: bytes | bytearray, placement: Placement, now_s: float) -> None:
        deadline_s = now_s + self.services.settings.first_byte_timeout_s
        self._leg = DecodeLeg(self, placement.decode, self._head(placement.decode, body), body, deadline_s)
        self._leg.start()

    def _head(self, target: Target, body: bytes | bytearray) -> bytes:
        fields = self._fields
        if self._trace is not None:
            fields += self._trace.leg(target)
        return request_head(self._exchange.url, target, fields, self._credentials, len(body))

    # What the legs report

    def bootstrap_answered(self, leg: BootstrapLeg, head: ResponseHead, body: bytes) -> None:
        """What a decode instance would learn there."""
        placement, handoff = self.placement, self._handoff
        assert placement is not None and handoff is not None
        self._leg = None
        try:
            if head.status != 200:
                raise HandoffError(f"the bootstrap server answered HTTP {head.status}")
            handoff.bootstrap_answered(body)
        except HandoffError as error:
            self._retry(InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        self._send_prefill(handoff, placement, self.services.clock())

    def prefill_answered(self, leg: PrefillLeg, head: ResponseHead, body: bytes) -> None:
        """The prefill leg's complete answer, 5xx excepted."""
        request, placement, handoff = self._request, self.placement, self._handoff
        assert placement is not None and handoff is not None
        self._leg = None
        if self._trace is not None:
            self._trace.answered(head.status)
        if head.status >= 300:
            self._release_placement()
            self._exchange.reply(head.status, body, content_type=head.content_type or b"application/json")
            return
        try:
            answer = self._prefill_answer = handoff.prefill_answer(body)
        except HandoffError as error:
            self._retry(InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        now_s = self.services.clock()
        try:
            self._tell(self.services.placements.prefill_finished, placement.placement_id, now_s)
        except RejectedError as error:
            self._placed = False
            self.refused(error)
            return
        if answer.transfer is None:
            self._decode_computes(request, placement, now_s)
            return
        decode_body = handoff.decode_body(request, placement.model, answer.transfer)
        self._start_decode(decode_body, placement, now_s)

    def response_started(self, leg: DecodeLeg, head: ResponseHead) -> bytes:
        """The first body byte is here: no other instance can take over. Returns the client's head."""
        services, placement, exchange = self.services, self.placement, self._exchange
        assert placement is not None
        now_s = services.clock()
        leg.deadline_s = now_s + services.settings.stall_timeout_s
        leg.forget_request()
        self._request.release()
        if self._trace is not None:
            self._trace.answered(head.status)
        if head.status < 300:
            self._tell(services.placements.first_token, placement.placement_id, now_s)
            if self._request.stream:
                services.metrics.ttft_s.observe(now_s - exchange.started_s)
        if exchange.door.flow.write_paused and leg.connection is not None:
            leg.connection.transport.pause_reading()
        return exchange.response_started(head, now_s)

    def response_finished(self, leg: DecodeLeg) -> None:
        services, placement = self.services, self.placement
        assert placement is not None
        self._leg = None
        if self._exchange.status >= 300:
            self._release_placement()
            self._exchange.complete()
            return
        now_s = services.clock()
        usage = leg.usage()
        answer = self._prefill_answer
        if answer is not None and answer.cached_tokens is not None:
            usage = Usage(usage.prompt_tokens, usage.output_tokens, answer.cached_tokens)
        if usage.output_tokens is None and leg.events > 1 and self.endpoint in _ONE_EVENT_A_TOKEN:
            # A stream without usage: the last event is [DONE].
            usage = Usage(usage.prompt_tokens, leg.events - 1, usage.cached_tokens)
        self._placed = False
        self.usage = usage
        self._tell(services.placements.finished, placement.placement_id, now_s, usage)
        if leg.events and self._exchange.first_byte_s is not None:
            gaps = (usage.output_tokens or 0) - 1
            if gaps > 0:
                services.metrics.itl_s.observe((now_s - self._exchange.first_byte_s) / gaps)
        self._exchange.complete()

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
            connection = await self.services.pool.connect(prefill)
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
        self._tell(services.placements.failed, placement.placement_id, services.clock(), failure)
        if self._trace is not None:
            self._trace.failed(failure.kind.value, failure.detail)
        self._tried.append(failure)
        logger.warning(
            "attempt failed",
            request_id=self._exchange.request_id,
            placement_id=placement.placement_id,
            instance=failure.instance_id,
            kind=failure.kind.value,
            detail=failure.detail,
            attempt=self.attempts,
        )
        if self.attempts >= services.settings.max_attempts:
            self._exchange.reply_error(given_up(self._tried))
            return
        services.metrics.retries[failure.kind] += 1
        longest_s = services.settings.retry_backoff_s * 2.0 ** (self.attempts - 1)
        delay_s = longest_s * random.uniform(0.5, 1.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.place)

    def _break_off(self, leg: DecodeLeg, failure: InstanceFailure) -> None:
        """The instance failed after the client had received a part of its response."""
        services, placement = self.services, self.placement
        assert placement is not None
        self._placed = False
        self._tell(services.placements.failed, placement.placement_id, services.clock(), failure)
        if self._trace is not None:
            self._trace.failed(failure.kind.value, failure.detail)
        services.metrics.stream_failures += 1
        logger.warning(
            "response broke off",
            request_id=self._exchange.request_id,
            placement_id=placement.placement_id,
            instance=failure.instance_id,
            kind=failure.kind.value,
            detail=failure.detail,
        )
        message = f"Instance {failure.instance_id!r} failed in the middle of the response: {failure.detail}"
        self.usage = self._so_far(leg)
        if not leg.end_broken_stream(message):
            self._exchange.keep_alive = False
        self._exchange.complete()

    # What happens to the connection

    def check_deadline(self, now_s: float) -> None:
        """Give a silent engine up. Called periodically."""
        leg = self._leg
        if leg is None:
            return
        settings = self.services.settings
        if isinstance(leg, DecodeLeg) and leg.started:
            if leg.reads != leg.reads_seen or self._exchange.door.flow.write_paused:
                leg.reads_seen = leg.reads
                leg.deadline_s = now_s + settings.stall_timeout_s
            elif now_s >= leg.deadline_s:
                leg.timed_out(f"the engine was silent for {settings.stall_timeout_s:g} s")
        elif now_s >= leg.deadline_s:
            if isinstance(leg, BootstrapLeg):
                limit_s = settings.bootstrap_timeout_s
            elif isinstance(leg, PrefillLeg):
                limit_s = settings.prefill_timeout_s
            else:
                limit_s = settings.first_byte_timeout_s
            leg.timed_out(f"no answer within {limit_s:g} s")

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """Place anew what waits for an instance that is down; a response that has begun may still go on."""
        leg = self._leg
        if leg is None or leg.target.instance_id != instance_id:
            return
        if not (isinstance(leg, DecodeLeg) and leg.started):
            leg.lost(reason)

    def placement_revoked(self, placement_id: str, error: PlacementError) -> None:
        """Answer with the refusal; a response that has begun goes on."""
        leg, placement = self._leg, self.placement
        if placement is None or placement.placement_id != placement_id or not self._placed:
            return
        if leg is None or not (isinstance(leg, DecodeLeg) and leg.started):
            self._placed = False
            self._leg = None
            if self._task is not None:
                self._task.cancel()
            if leg is not None:
                leg.abort()
            self.refused(error)

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the engine."""
        leg = self._leg
        if isinstance(leg, DecodeLeg) and leg.connection is not None:
            leg.connection.transport.pause_reading()

    def resume(self) -> None:
        leg = self._leg
        if isinstance(leg, DecodeLeg) and leg.connection is not None:
            leg.connection.transport.resume_reading()

    def stop(self, reason: str) -> bool:
        """Give the request up; tells whether a part of the response has gone to the client."""
        leg, self._leg = self._leg, None
        self.services.line.leave(self)
        for pending in (self._task, self._timer):
            if pending is not None:
                pending.cancel()
        if leg is not None:
            leg.abort()
        self._release_placement()
        if not isinstance(leg, DecodeLeg) or not leg.started:
            return False
        self.usage = self._so_far(leg)
        if not self.transport.is_closing():
            leg.end_broken_stream(reason)
        return True

    def _so_far(self, leg: DecodeLeg) -> Usage:
        """Of a response that was not finished."""
        return Usage(output_tokens=leg.events if self.endpoint in _ONE_EVENT_A_TOKEN else None)

    def _tell(self, report: Callable[..., None], *arguments: object) -> None:
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

    def _release_placement(self) -> None:
        placement = self.placement
        if placement is not None and self._placed:
            self._placed = False
            self._tell(self.services.placements.cancelled, placement.placement_id, self.services.clock())


def _excluded(tried: list[InstanceFailure]) -> frozenset[str]:
    return frozenset([failure.instance_id for failure in tried]) if tried else _NOTHING
