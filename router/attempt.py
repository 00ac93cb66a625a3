"""One placement of a request: its legs to one or two instances, and what they report.

An attempt ends by telling its delivery exactly once: it failed before the client got anything, it was answered
with a refusal, or the response ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from conductor.placement import FailureKind, InstanceFailure, Placement, RejectedError, Usage
from router.disaggregation import Handoff, HandoffError, JointHandoff, PrefillAnswer, handoff_protocol
from router.disaggregation.bodies import forwarded_body
from router.disaggregation.bootstrap import bootstrap_head, bootstrap_target
from router.framing import ResponseHead
from router.inference import Body, Endpoint, InferenceRequest
from router.legs import BootstrapLeg, DecodeLeg, Leg, PrefillLeg
from router.refusals import misconfigured
from router.services import logger
from router.upstream import UpstreamFailure, UpstreamUnreachable

if TYPE_CHECKING:
    from router.delivery import Delivery
    from router.exchange import Exchange
    from router.services import RouterServices

_DETAIL_BYTES = 300
_ONE_EVENT_A_TOKEN = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))


class Attempt(msgspec.Struct, eq=False):
    """Runs the legs of ``placement``: one to a mixed instance, or prefill and decode, in turn or together.

    Of legs that run together, the first that fails ends the other.
    """

    delivery: Delivery
    exchange: Exchange
    services: RouterServices
    _request: InferenceRequest
    placement: Placement
    beside: bool = False  # another attempt at the same request, which goes on
    _open: bool = True  # the placement has not ended yet
    _handoff: Handoff | JointHandoff | None = None
    _prefill_answer: PrefillAnswer | None = None
    _prefill: Leg | None = None  # to the prefill instance or the server beside it
    _decode: DecodeLeg | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the response has begun: no other instance can take over."""
        return self._decode is not None and self._decode.started

    def start(self) -> None:
        """Where one instance prefills and decodes, or computes what has no such parts."""
        self._start_decode(forwarded_body(self._request, self.placement.model))

    def start_handoff(self) -> None:
        """Where two do."""
        request, placement = self._request, self.placement
        try:
            handoff = handoff_protocol(placement.prefill.protocol).begin(placement.prefill)
        except HandoffError as error:
            logger.error("hand-off impossible", instance=placement.prefill.instance_id, error=str(error))
            self.end()
            self.delivery.attempt_refused(misconfigured(placement.prefill.instance_id, str(error)))
            return
        if not isinstance(handoff, JointHandoff) and not handoff.hands_over(request):
            self._decode_computes()
            return
        self._handoff = handoff
        if isinstance(handoff, JointHandoff):
            self._start_both(handoff)
        elif handoff.bootstrap_path is None:
            self._send_prefill(handoff)
        else:
            beside = bootstrap_target(placement.prefill)
            head = bootstrap_head(handoff.bootstrap_path, beside)
            self._prefill = BootstrapLeg(self, beside, head, b"", self.services.settings.bootstrap_timeout_s)

    def _start_both(self, handoff: JointHandoff) -> None:
        settings, placement = self.services.settings, self.placement
        body = handoff.body(self._request, placement.model)
        self._prefill = self._prefill_leg(body)
        head = self.delivery.engine_head(placement.decode, len(body), beside=True)
        limit_s = settings.prefill_timeout_s + settings.first_byte_timeout_s
        self._decode = DecodeLeg(self, placement.decode, head, body, limit_s)

    def _send_prefill(self, handoff: Handoff) -> None:
        self._prefill = self._prefill_leg(handoff.prefill_body(self._request, self.placement.model))

    def _prefill_leg(self, body: bytes) -> PrefillLeg:
        target = self.placement.prefill
        head = self.delivery.engine_head(target, len(body), beside=self.beside)
        return PrefillLeg(self, target, head, body, self.services.settings.prefill_timeout_s)

    def _decode_computes(self) -> None:
        """The decode instance gets the whole request: there is nothing that it could take over."""
        self.services.metrics.handoffs_without_transfer += 1
        self._start_decode(forwarded_body(self._request, self.placement.model))

    def _start_decode(self, body: Body) -> None:
        target = self.placement.decode
        head = self.delivery.engine_head(target, len(body), beside=self.beside)
        limit_s = self.services.settings.first_byte_timeout_s
        self._decode = DecodeLeg(self, target, head, body, limit_s)

    # What the legs report

    def bootstrap_answered(self, leg: BootstrapLeg, head: ResponseHead, body: bytes) -> None:
        """What a decode instance would learn there."""
        handoff = self._handoff
        assert handoff is not None and not isinstance(handoff, JointHandoff)
        self._prefill = None
        try:
            if head.status != 200:
                raise HandoffError(f"the bootstrap server answered HTTP {head.status}")
            handoff.bootstrap_answered(body)
        except HandoffError as error:
            self._fail(InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        self._send_prefill(handoff)

    def prefill_answered(self, leg: PrefillLeg, head: ResponseHead, body: bytes) -> None:
        """The prefill leg's complete answer, 5xx excepted."""
        handoff, decode = self._handoff, self._decode
        assert handoff is not None
        self._prefill = None
        self.delivery.engine_answered(head.status, beside=decode is not None)
        if head.status >= 300:
            if not self.begun:
                self.end()
                self.delivery.attempt_answered(head.status, body, head.content_type or b"application/json")
            return
        try:
            answer = self._prefill_answer = handoff.prefill_answer(body)
        except HandoffError as error:
            self._leg_lost(leg, InstanceFailure(leg.target.instance_id, FailureKind.ERROR, str(error)))
            return
        if self.begun:
            return
        try:
            self._tell_prefill_finished()
        except RejectedError as error:
            self._open = False
            self.end()
            self.delivery.refused(error)
            return
        if isinstance(handoff, JointHandoff):
            assert decode is not None
            settings = self.services.settings
            streams = self._request.stream
            limit_s = settings.transfer_timeout_s if streams else settings.first_byte_timeout_s
            decode.expect(limit_s)
        elif answer.transfer is None:
            self._decode_computes()
        else:
            model = self.placement.model
            self._start_decode(handoff.decode_body(self._request, model, answer.transfer))

    def _tell_prefill_finished(self) -> None:
        """Raises RejectedError."""
        report = self.services.placements.prefill_finished
        self.delivery.tell(report, self.placement.placement_id, self.services.clock())

    def response_started(self, leg: DecodeLeg, head: ResponseHead, now_s: float) -> bytes:
        """The first body byte is here: no other instance can take over. Returns the client's head."""
        if head.status >= 300:
            self._drop_prefill()
        else:
            if self._prefill is not None:  # whose answer is on its way
                try:
                    self._tell_prefill_finished()
                except RejectedError:
                    self._open = False  # too late: what it would have cost others has been paid
            if self._request.stream:  # else its end tells the same
                report = self.services.placements.first_token
                self.delivery.tell(report, self.placement.placement_id, now_s)
        return self.delivery.response_started(self, leg, head, now_s)

    def response_finished(self, usage: Usage | None, events: int, now_s: float) -> None:
        """``usage`` is None of a response that nothing was computed for."""
        self._decode = None
        if self._prefill is not None:
            self._drop_prefill()
        delivery = self.delivery
        if usage is None:
            self.end()
            delivery.response_finished(None, 0, now_s)
            return
        answer = self._prefill_answer
        if answer is not None and answer.cached_tokens is not None:
            usage = Usage(usage.prompt_tokens, usage.output_tokens, answer.cached_tokens)
        if events > 1 and usage.output_tokens is None and self._has_one_event_a_token():
            # A stream without usage: the last event is [DONE].
            usage = Usage(usage.prompt_tokens, events - 1, usage.cached_tokens)
        self._open = False
        delivery.tell(self.services.placements.finished, self.placement.placement_id, now_s, usage)
        delivery.response_finished(usage, events, now_s)

    def engine_error(self, leg: Leg, status: int, body: bytes) -> None:
        """An instance answered 5xx; the client has not seen anything of it."""
        detail = f"HTTP {status}: {body[:_DETAIL_BYTES].decode('utf-8', 'replace').strip()}"
        failure = InstanceFailure(leg.target.instance_id, FailureKind.ERROR, detail)
        if leg is self._decode and self._handoff is not None:
            self._decode = None
            self._drop_prefill()
            self._task = asyncio.get_running_loop().create_task(self._blame(failure))
        else:
            self._leg_lost(leg, failure)

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
        self._leg_lost(leg, InstanceFailure(leg.target.instance_id, failure.kind, failure.detail))

    def _leg_lost(self, leg: Leg, failure: InstanceFailure) -> None:
        """It is over; so is the attempt, unless the decode instance has what it needs already."""
        if leg is self._decode and self._decode.started:
            decode, self._decode = self._decode, None
            self._drop_prefill()
            self._open = False
            self.delivery.tell(
                self.services.placements.failed,
                self.placement.placement_id,
                self.services.clock(),
                failure,
            )
            self.delivery.response_broke_off(decode, failure, self._so_far(decode))
        elif self.begun:
            self._prefill = None
            logger.info("late failure of a prefill leg", instance=failure.instance_id, detail=failure.detail)
        else:
            self._fail(failure)

    def fail_unexpectedly(self) -> None:
        """Where an exception is handled that nobody foresaw: the request is given up."""
        self.delivery.fail_unexpectedly()

    # How it ends

    def _fail(self, failure: InstanceFailure) -> None:
        """Before the client got anything."""
        self._open = False
        self.end()
        now_s = self.services.clock()
        self.delivery.tell(self.services.placements.failed, self.placement.placement_id, now_s, failure)
        self.delivery.attempt_failed(self, failure)

    def _drop_prefill(self) -> None:
        leg, self._prefill = self._prefill, None
        if leg is not None:
            leg.abort()

    def end(self) -> None:
        """Drop the legs at once, and give back what is reserved."""
        self._drop_prefill()
        decode, self._decode = self._decode, None
        if decode is not None:
            decode.abort()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._open:
            self._open = False
            now_s = self.services.clock()
            self.delivery.tell(self.services.placements.cancelled, self.placement.placement_id, now_s)

    def stop(self, reason: str) -> Usage | None:
        """Give it up; of a response that has begun, what it used so far, its stream ended with ``reason``."""
        decode = self._decode
        self.end()
        if decode is None or not decode.started:
            return None
        if not self.exchange.door.transport.is_closing():
            decode.end_broken_stream(reason)
        return self._so_far(decode)

    def _so_far(self, leg: DecodeLeg) -> Usage:
        """Of a response that was not finished."""
        return Usage(output_tokens=leg.events if self._has_one_event_a_token() else None)

    def _has_one_event_a_token(self) -> bool:
        return self._request.endpoint in _ONE_EVENT_A_TOKEN

    # What happens meanwhile

    def check_deadline(self, now_s: float, *, client_reads: bool) -> None:
        """Give a silent engine up, or a client that takes nothing. Called periodically."""
        decode = self._decode
        if decode is not None and decode.started:
            unread_bytes = 0 if client_reads else self.exchange.door.transport.get_write_buffer_size()
            if decode.reads != decode.reads_seen or unread_bytes != decode.unread_bytes_seen:
                decode.reads_seen, decode.unread_bytes_seen = decode.reads, unread_bytes
                decode.expect(decode.limit_s)
            if not decode.is_late(now_s):
                return
            if client_reads:
                decode.timed_out(f"the engine was silent for {decode.limit_s:g} s")
            else:
                self.delivery.client_stalled(decode.limit_s)
            return
        for leg in (self._prefill, decode):
            if leg is not None and leg.is_late(now_s):
                leg.timed_out(f"no answer within {leg.limit_s:g} s")
                return

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """Give up what waits for an instance that is down; a response that has begun may still go on."""
        if self.begun:
            return
        for leg in (self._prefill, self._decode):
            if leg is not None and leg.target.instance_id == instance_id:
                leg.lost(reason)
                return

    def revoked(self, placement_id: str) -> bool:
        """Whether the end of that placement ends this attempt; a response that has begun goes on."""
        if not self._open or self.placement.placement_id != placement_id or self.begun:
            return False
        self._open = False
        self.end()
        return True

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the engine."""
        if self._decode is not None and self._decode.connection is not None:
            self._decode.connection.transport.pause_reading()

    def resume(self) -> None:
        if self._decode is not None and self._decode.connection is not None:
            self._decode.connection.transport.resume_reading()
