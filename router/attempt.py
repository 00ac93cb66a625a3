"""One placement of a request: its legs to one or two instances, and what they report.

An attempt ends by telling its delivery exactly once: it failed before the client got anything, it was answered
with a refusal, or the response ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from conductor.placement import FailureKind, InstanceFailure, Placement, RejectedError, Target, Usage
from router.disaggregation import Handoff, HandoffError, PrefillAnswer, handoff_protocol
from router.disaggregation.bodies import forwarded_body
from router.disaggregation.bootstrap import bootstrap_head, bootstrap_target
from router.framing import ResponseHead
from router.inference import Endpoint, InferenceRequest
from router.legs import BootstrapLeg, DecodeLeg, Leg, PrefillLeg
from router.refusals import misconfigured
from router.services import logger
from router.upstream import UpstreamFailure, UpstreamUnreachable

if TYPE_CHECKING:
    from router.delivery import Delivery

_DETAIL_BYTES = 300
_ONE_EVENT_A_TOKEN = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))


class Attempt:
    """Runs the legs of ``placement``: one to a mixed instance, or prefill and decode one after the other."""

    __slots__ = (
        "_handoff",
        "_leg",
        "_open",
        "_prefill_answer",
        "_request",
        "_task",
        "client_takes_chunks",
        "delivery",
        "endpoint",
        "placement",
        "services",
        "transport",
    )

    def __init__(self, delivery: Delivery, request: InferenceRequest, placement: Placement) -> None:
        self.delivery = delivery
        self.placement = placement
        self.services = delivery.services
        self.transport = delivery.transport
        self.endpoint = delivery.endpoint
        self.client_takes_chunks = delivery.client_takes_chunks
        self._request = request
        self._open = True  # the placement has not ended yet
        self._handoff: Handoff | None = None
        self._prefill_answer: PrefillAnswer | None = None
        self._leg: Leg | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the response has begun: no other instance can take over."""
        leg = self._leg
        return isinstance(leg, DecodeLeg) and leg.started

    def start(self) -> None:
        request, placement, now_s = self._request, self.placement, self.services.clock()
        if not placement.disaggregated:
            self._start_decode(forwarded_body(request, placement.model), now_s)
            return
        try:
            handoff = handoff_protocol(placement.prefill.protocol).begin(placement.prefill)
        except HandoffError as error:
            logger.error("hand-off impossible", instance=placement.prefill.instance_id, error=str(error))
            self.end()
            self.delivery.attempt_refused(misconfigured(placement.prefill.instance_id, str(error)))
            return
        if not handoff.hands_over(request):
            self._decode_computes(now_s)
            return
        self._handoff = handoff
        if handoff.bootstrap_path is None:
            self._send_prefill(handoff, now_s)
            return
        beside = bootstrap_target(placement.prefill)
        deadline_s = now_s + self.services.settings.bootstrap_timeout_s
        self._leg = BootstrapLeg(
            self, beside, bootstrap_head(handoff.bootstrap_path, beside), b"", deadline_s
        )
        self._leg.start()

    def _send_prefill(self, handoff: Handoff, now_s: float) -> None:
        prefill = self.placement.prefill
        body = handoff.prefill_body(self._request, self.placement.model)
        deadline_s = now_s + self.services.settings.prefill_timeout_s
        self._leg = PrefillLeg(self, prefill, self._head(prefill, body), body, deadline_s)
        self._leg.start()

    def _decode_computes(self, now_s: float) -> None:
        """The decode instance gets the whole request: there is nothing that it could take over."""
        self.services.metrics.handoffs_without_transfer += 1
        self._start_decode(forwarded_body(self._request, self.placement.model), now_s)

    def _start_decode(self, body: bytes | bytearray, now_s: float) -> None:
        decode = self.placement.decode
        deadline_s = now_s + self.services.settings.first_byte_timeout_s
        self._leg = DecodeLeg(self, decode, self._head(decode, body), body, deadline_s)
        self._leg.start()

    def _head(self, target: Target, body: bytes | bytearray) -> bytes:
        return self.delivery.engine_head(target, len(body))

    # What the legs report

    def bootstrap_answered(self, leg: BootstrapLeg, head: ResponseHead, body: bytes) -> None:
        """What a decode instance would learn there."""
        handoff = self._handoff
        assert handoff is not None
        self._leg = None
        try:
            if head.status != 200:
                raise HandoffError(f"the bootstrap server answered HTTP {head.status}")
            handoff.bootstrap_answered(body)
        except HandoffError as error:
            self._fail(InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        self._send_prefill(handoff, self.services.clock())

    def prefill_answered(self, leg: PrefillLeg, head: ResponseHead, body: bytes) -> None:
        """The prefill leg's complete answer, 5xx excepted."""
        handoff = self._handoff
        assert handoff is not None
        self._leg = None
        self.delivery.engine_answered(head.status)
        if head.status >= 300:
            self.end()
            self.delivery.attempt_answered(head.status, body, head.content_type or b"application/json")
            return
        try:
            answer = self._prefill_answer = handoff.prefill_answer(body)
        except HandoffError as error:
            self._fail(InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        now_s = self.services.clock()
        try:
            self.delivery.tell(self.services.placements.prefill_finished, self.placement.placement_id, now_s)
        except RejectedError as error:
            self._open = False
            self.delivery.refused(error)
            return
        if answer.transfer is None:
            self._decode_computes(now_s)
            return
        self._start_decode(handoff.decode_body(self._request, self.placement.model, answer.transfer), now_s)

    def response_started(self, leg: DecodeLeg, head: ResponseHead) -> bytes:
        """The first body byte is here: no other instance can take over. Returns the client's head."""
        services, now_s = self.services, self.services.clock()
        leg.deadline_s = now_s + services.settings.stall_timeout_s
        leg.forget_request()
        self.delivery.engine_answered(head.status)
        if head.status < 300:
            self.delivery.tell(services.placements.first_token, self.placement.placement_id, now_s)
        return self.delivery.response_started(self, leg, head, now_s)

    def response_finished(self, leg: DecodeLeg) -> None:
        assert leg.head is not None
        self._leg = None
        if leg.head.status >= 300:
            self.end()
            self.delivery.response_finished(None, 0)
            return
        usage = leg.usage()
        answer = self._prefill_answer
        if answer is not None and answer.cached_tokens is not None:
            usage = Usage(usage.prompt_tokens, usage.output_tokens, answer.cached_tokens)
        if usage.output_tokens is None and leg.events > 1 and self.endpoint in _ONE_EVENT_A_TOKEN:
            # A stream without usage: the last event is [DONE].
            usage = Usage(usage.prompt_tokens, leg.events - 1, usage.cached_tokens)
        self._open = False
        now_s = self.services.clock()
        self.delivery.tell(self.services.placements.finished, self.placement.placement_id, now_s, usage)
        self.delivery.response_finished(usage, leg.events)

    def engine_error(self, leg: Leg, status: int, body: bytes) -> None:
        """An instance answered 5xx; the client has not seen anything of it."""
        detail = f"HTTP {status}: {body[:_DETAIL_BYTES].decode('utf-8', 'replace').strip()}"
        self._leg = None
        failure = InstanceFailure(leg.target.instance_id, FailureKind.ERROR, detail)
        if isinstance(leg, DecodeLeg) and self._prefill_answer is not None:
            self._task = asyncio.get_running_loop().create_task(self._blame(failure))
        else:
            self._fail(failure)

    async def _blame(self, failure: InstanceFailure) -> None:
        """A decode instance fails too when the instance it should pull from is gone: find out which it is."""
        prefill = self.placement.prefill
        try:
            try:
                connection = await self.services.pool.connect(prefill)
            except UpstreamUnreachable as error:
                detail = f"{error.failure.detail}; the decode instance answered {failure.detail}"
                failure = InstanceFailure(prefill.instance_id, FailureKind.UNREACHABLE, detail)
            else:
                connection.pool.release(connection)
            self._task = None
            self._fail(failure)
        except Exception:
            self.fail_unexpectedly()

    def leg_failed(self, leg: Leg, failure: UpstreamFailure) -> None:
        self._leg = None
        instance_failure = InstanceFailure(leg.target.instance_id, failure.kind, failure.detail)
        if isinstance(leg, DecodeLeg) and leg.started:
            self._open = False
            now_s = self.services.clock()
            self.delivery.tell(
                self.services.placements.failed, self.placement.placement_id, now_s, instance_failure
            )
            self.delivery.response_broke_off(leg, instance_failure, self._so_far(leg))
        else:
            self._fail(instance_failure)

    def fail_unexpectedly(self) -> None:
        """Where an exception is handled that nobody foresaw: the request is given up."""
        self.delivery.fail_unexpectedly()

    # How it ends

    def _fail(self, failure: InstanceFailure) -> None:
        """Before the client got anything."""
        self._open = False
        now_s = self.services.clock()
        self.delivery.tell(self.services.placements.failed, self.placement.placement_id, now_s, failure)
        self.delivery.attempt_failed(self, failure)

    def end(self) -> None:
        """Drop the legs at once, and give back what is reserved."""
        leg, self._leg = self._leg, None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if leg is not None:
            leg.abort()
        if self._open:
            self._open = False
            now_s = self.services.clock()
            self.delivery.tell(self.services.placements.cancelled, self.placement.placement_id, now_s)

    def stop(self, reason: str) -> Usage | None:
        """Give it up; of a response that has begun, what it used so far, its stream ended with ``reason``."""
        leg = self._leg
        self.end()
        if not isinstance(leg, DecodeLeg) or not leg.started:
            return None
        if not self.transport.is_closing():
            leg.end_broken_stream(reason)
        return self._so_far(leg)

    def _so_far(self, leg: DecodeLeg) -> Usage:
        """Of a response that was not finished."""
        return Usage(output_tokens=leg.events if self.endpoint in _ONE_EVENT_A_TOKEN else None)

    # What happens meanwhile

    def check_deadline(self, now_s: float, *, client_reads: bool) -> None:
        """Give a silent engine up. Called periodically."""
        leg = self._leg
        if leg is None:
            return
        settings = self.services.settings
        if isinstance(leg, DecodeLeg) and leg.started:
            if leg.reads != leg.reads_seen or not client_reads:
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
        """Give up what waits for an instance that is down; a response that has begun may still go on."""
        leg = self._leg
        if leg is not None and leg.target.instance_id == instance_id and not self.begun:
            leg.lost(reason)

    def revoked(self, placement_id: str) -> bool:
        """Whether the end of that placement ends this attempt; a response that has begun goes on."""
        if not self._open or self.placement.placement_id != placement_id or self.begun:
            return False
        self._open = False
        self.end()
        return True

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the engine."""
        leg = self._leg
        if isinstance(leg, DecodeLeg) and leg.connection is not None:
            leg.connection.transport.pause_reading()

    def resume(self) -> None:
        leg = self._leg
        if isinstance(leg, DecodeLeg) and leg.connection is not None:
            leg.connection.transport.resume_reading()
