"""One request of a gateway, message by message: a state machine that answers them, without any gRPC.

In full duplex the gateway sends the whole request before it is answered, and gets its body back; with a buffered
body it is answered twice, and the body stays where it is. Of the response it shows what it is configured to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conductor.placement import FailureKind, InstanceFailure, Placement, Target, Usage
from router.error_shapes import error_shape
from router.errors import RequestError, internal_error, too_long
from router.ext_proc import answers
from router.ext_proc.messages import (
    BODY_BUFFERED,
    BODY_FULL_DUPLEX_STREAMED,
    ProcessingRequest,
)
from router.heads import Headers, placement_fields
from router.inference import Endpoint
from router.picking import GatewayRequest, Picked, endpoint_of, pick, pick_again
from router.picks import Pick, PickEnd, request_headers
from router.services import RouterServices, logger
from router.usage import NO_USAGE, usage_from_tail

GATEWAY: Final = "ext_proc"  # in metrics
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_REMEMBERED: Final = 8  # streams
_TAIL_BYTES: Final = 8_192  # of a response, which hold what it used
_MODES: Final = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
_OURS: Final = (b"x-conductor-", b"x-prefiller-host-port", b"x-data-parallel-rank")  # no client's to choose
_CREDENTIALS: Final = (b"authorization", b"x-api-key")


class BrokenMessageError(Exception):
    """What a gateway sent is no message of the protocol; the text says what is wrong."""


class Surroundings:
    """What all streams share: the router's services, the cluster as targets, and what gateways were seen to do."""

    def __init__(
        self,
        services: RouterServices,
        targets: Callable[[], Sequence[Target]],
        alternatives: Callable[[str], Sequence[Target]],
    ) -> None:
        """``targets`` are all instances, ``alternatives`` those to try after the one of a placement, best first."""
        self.services = services
        self.targets = targets
        self.alternatives = alternatives
        self.addresses = services.picks.addresses
        self.sees_responses = False
        self._early = 0

    def ends_with_request(self, pick: Pick) -> bool:
        """Whether the end of a stream in full duplex, which showed nothing of the response, is the request's end.

        Envoy ends such a stream as soon as it has its endpoint, unless `response_trailer_mode` is `SEND`; it does
        not say which. What ends before an engine could have answered tells, for the streams after it as well.
        """
        early = pick.age_s < pick.placement.predicted_ttft_s / 2
        self._early = min(self._early + 1, _REMEMBERED) if early else max(self._early - 1, -_REMEMBERED)
        return not early and self._early <= 0


@dataclass(slots=True)
class _Sent:
    """A request that was picked for: ``endpoints`` are the addresses that the gateway was told."""

    picked: Picked
    endpoints: list[str]
    pick: Pick | None


class GatewayStream:
    """``receive`` every message; then exactly one of ``ended`` and ``broken_off``."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._services = around.services
        self._headers: Headers = []
        self._path = b""
        self._subset: frozenset[str] | None = None
        self._body: bytes | bytearray = b""
        self._request_mode = BODY_BUFFERED  # of gateways that do not say it yet
        self._response_mode = 0
        self._answered = False
        self._sent: _Sent | None = None
        self._response_seen = False
        self._status = 200
        self._tail = b""

    @property
    def answered(self) -> bool:
        """Whether the gateway has its endpoint, or a refusal."""
        return self._answered and not self._body

    async def receive(self, raw: bytes) -> Iterable[bytes]:
        """The answers to a message. Raises BrokenMessageError."""
        try:
            message = ProcessingRequest.FromString(raw)
        except Exception as error:  # protobuf's own differs between its implementations
            raise BrokenMessageError(
                f"a message of {len(raw)} bytes is no ProcessingRequest: {error}"
            ) from None
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        told = await self._receive(message)
        return () if message.observability_mode else told

    def ended(self) -> None:
        """The gateway has no more to say."""
        sent = self._sent
        if (
            sent is not None
            and sent.pick is not None
            and self._request_mode == BODY_FULL_DUPLEX_STREAMED
            and not self._response_seen
            and not self._around.ends_with_request(sent.pick)
        ):
            self.broken_off()
        else:
            self._end(NO_USAGE, PickEnd.STREAM)

    def broken_off(self) -> None:
        """The gateway gave the stream up, which it does as soon as it needs no more answers."""
        sent = self._sent
        if sent is not None and sent.pick is not None:
            sent.pick.ends_as_predicted()
        self._end_grant(NO_USAGE)

    async def _receive(self, message: Any) -> Iterable[bytes]:
        if message.HasField("request_headers"):
            return await self._request_headers(message)
        if message.HasField("request_body"):
            return await self._request_body(message.request_body)
        if message.HasField("request_trailers"):
            return await self._request_trailers()
        if message.HasField("response_headers"):
            return await self._response_headers(message)
        if message.HasField("response_body"):
            return self._response_body(message.response_body)
        if message.HasField("response_trailers"):
            self._end(usage_from_tail(self._tail), PickEnd.OBSERVED)
            return (answers.UNCHANGED["response_trailers"],)
        raise BrokenMessageError(
            "a ProcessingRequest holds none of request_headers, request_body, request_trailers, "
            "response_headers, response_body and response_trailers"
        )

    # The request

    async def _request_headers(self, message: Any) -> Iterable[bytes]:
        if self._headers:
            raise BrokenMessageError("request_headers came a second time on one stream")
        self._headers = [
            (header.key.encode("latin-1", "replace"), header.raw_value or header.value.encode())
            for header in message.request_headers.headers.headers
        ]
        self._path = next((value for name, value in self._headers if name == b":path"), b"")
        self._subset = _subset(message)
        if message.request_headers.end_of_stream:
            return await self._pick("request_headers")
        if self._request_mode == BODY_FULL_DUPLEX_STREAMED:
            return ()
        if self._request_mode == BODY_BUFFERED:
            return (answers.UNCHANGED["request_headers"],)
        mode = _MODES[self._request_mode] if self._request_mode < len(_MODES) else str(self._request_mode)
        return self._refused(
            RequestError(
                500,
                "The gateway does not show the request's body before it asks for an endpoint "
                f"(request_body_mode {mode}). Set it to FULL_DUPLEX_STREAMED or BUFFERED.",
                kind="server_error",
                code="configuration_error",
            )
        )

    async def _request_body(self, part: Any) -> Iterable[bytes]:
        if self._answered:
            return ()  # of a request that was refused
        if not self._headers:
            raise BrokenMessageError("request_body came before request_headers")
        limit = self._services.settings.max_body_bytes
        if len(self._body) + len(part.body) > limit:
            return self._refused(too_long(limit))
        if not self._body:
            self._body = part.body
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += part.body
        if part.end_of_stream:
            return await self._pick("request_body")
        return () if self._request_mode == BODY_FULL_DUPLEX_STREAMED else (answers.UNCHANGED["request_body"],)

    async def _request_trailers(self) -> Iterable[bytes]:
        if self._answered or self._request_mode != BODY_FULL_DUPLEX_STREAMED:
            return (answers.UNCHANGED["request_trailers"],)
        told = await self._pick("request_trailers")
        return told if self._sent is None else (*told, answers.UNCHANGED["request_trailers"])

    async def _pick(self, part: str) -> Iterable[bytes]:
        """The request is complete with this part of it."""
        self._answered = True
        around, services = self._around, self._services
        try:
            excluded: frozenset[str] = frozenset()
            if self._subset is not None:
                excluded = await self._outside(self._subset)
            given = GatewayRequest(
                path=self._path,
                headers=self._headers,
                body=self._body,
                arrived_s=services.clock(),
                excluded=excluded,
                sees_first_byte=around.sees_responses,
            )
            picked = await pick(services, given)
        except RequestError as error:
            if error.code == "no_instance_available" and self._subset is not None:
                error = _no_endpoint("none of the endpoints that the gateway allows can")
            return self._refused(error)
        except Exception:
            logger.exception("picking an endpoint failed unexpectedly")
            return self._refused(internal_error())
        self._sent = _Sent(picked, [], picked.pick)
        return await self._picked(part, picked, self._sent)

    async def _outside(self, subset: frozenset[str]) -> frozenset[str]:
        """Raises RequestError where nothing is inside."""
        targets = self._around.targets()
        excluded = await self._around.addresses.outside(subset, targets)
        if len(excluded) == len(targets):
            shown = ", ".join(sorted(subset)[:8]) or "none"
            raise _no_endpoint(f"none of the gateway's endpoints ({shown}) is an instance here")
        return excluded

    async def _picked(self, part: str, picked: Picked, sent: _Sent) -> Iterable[bytes]:
        placement = picked.placement
        addresses = self._around.addresses
        first = await addresses.of(picked.target)
        if first is None:
            if sent.pick is not None:
                sent.pick.cancelled()
            return self._refused(_no_endpoint(f"the host name {picked.target.host!r} has no address"))
        sent.endpoints.append(first)
        if placement.placement_id:
            for target in self._around.alternatives(placement.placement_id):
                if target.api_key != placement.decode.api_key:
                    continue  # it would get the key of another engine
                address = addresses.known(target)
                if address is not None and (self._subset is None or address in self._subset):
                    sent.endpoints.append(address)
        prefill = await addresses.of(placement.prefill) if placement.disaggregated else None
        headers = request_headers(placement, prefill)
        if placement.decode.api_key is not None:  # only gateways come to this port
            headers["authorization"] = f"Bearer {placement.decode.api_key}"
        self._told(200, picked)
        removed = self._removed(headers)
        endpoints = ",".join(sent.endpoints)
        if self._request_mode == BODY_FULL_DUPLEX_STREAMED and part != "request_headers":
            body = bytes(self._body if picked.body is None else picked.body)
            ends = part == "request_body"
            told: Iterable[bytes] = (
                answers.picked("request_headers", endpoints, headers, removed),
                *answers.echoed("request_body", body, ends=ends),
            )
        else:
            changed = None if picked.body is None else bytes(picked.body)
            told = (answers.picked(part, endpoints, headers, removed, changed),)
        self._body = b""
        return told

    def _removed(self, headers: dict[str, str]) -> list[str]:
        """Header fields of the client that engines are not to see."""
        prefixes = _OURS if self._services.keys is None else _OURS + _CREDENTIALS
        return [
            text
            for name, _ in self._headers
            if name.startswith(prefixes) and (text := name.decode("latin-1")) not in headers
        ]

    def _refused(self, error: RequestError) -> Iterable[bytes]:
        self._answered = True
        self._body = b""
        self._told(error.status)
        request_id = next((v for n, v in self._headers if n == b"x-request-id"), b"").decode("latin-1")
        body = error_shape(endpoint_of(self._path) or Endpoint.CHAT).body(error, request_id)
        return (answers.refused(error, body),)

    def _told(self, status: int, picked: Picked | None = None) -> None:
        """Count it, and write the line that the front door would."""
        self._services.picks.made[GATEWAY, endpoint_of(self._path) or "other", status] += 1
        if self._services.settings.log_requests:
            placement = None if picked is None else picked.placement
            logger.info(
                "pick",
                request_id=None if picked is None else picked.asked.request_id,
                model="unknown" if placement is None else placement.model,
                status=status,
                placement_id=None if placement is None else placement.placement_id or None,
                prefill=None if placement is None else placement.prefill.instance_id,
                decode=None if placement is None else placement.decode.instance_id,
            )

    # The response

    async def _response_headers(self, message: Any) -> Iterable[bytes]:
        self._around.sees_responses = self._response_seen = True
        sent = self._sent
        if sent is None:  # the gateway's own answer, to a request that was refused
            return (answers.UNCHANGED["response_headers"],)
        for header in message.response_headers.headers.headers:
            if header.key == ":status":
                value = header.raw_value.decode("latin-1") or header.value
                self._status = int(value) if value.isdecimal() else 502
        placement = await self._served(sent, _text(message, answers.BALANCER, answers.SERVED))
        if sent.pick is not None:
            if self._status >= 500:
                detail = f"the gateway got HTTP {self._status}"
                sent.pick.failed(InstanceFailure(placement.decode.instance_id, FailureKind.ERROR, detail))
            elif self._status >= 300:
                sent.pick.cancelled()
            else:
                sent.pick.first_byte()
        if message.response_headers.end_of_stream:
            self._end(NO_USAGE, PickEnd.OBSERVED)
        return (answers.response_headers(placement_fields(placement, 1)),)

    async def _served(self, sent: _Sent, served: str | None) -> Placement:
        """What the gateway's choice leaves of the placement: another one where it went elsewhere."""
        first = sent.pick
        if served is None or first is None or served == sent.endpoints[0]:
            return sent.picked.placement
        self._services.picks.elsewhere += 1
        targets = self._around.targets()
        addresses = self._around.addresses
        there = next((each for each in targets if addresses.known(each) == served), None)
        chosen = sent.picked.target.instance_id
        first.failed(InstanceFailure(chosen, FailureKind.ERROR, f"the gateway went to {served} instead"))
        sent.pick = None
        if there is not None and self._status < 300:
            others = [each.instance_id for each in targets]
            sent.pick = await pick_again(self._services, sent.picked, there.instance_id, others)
        return sent.picked.placement if sent.pick is None else sent.pick.placement

    def _response_body(self, part: Any) -> Iterable[bytes]:
        self._tail = (self._tail + part.body)[-_TAIL_BYTES:]
        if part.end_of_stream:
            self._end(usage_from_tail(self._tail), PickEnd.OBSERVED)
        if self._response_mode == BODY_FULL_DUPLEX_STREAMED:
            return answers.echoed("response_body", part.body, ends=part.end_of_stream)
        return (answers.UNCHANGED["response_body"],)

    def _end(self, usage: Usage, how: PickEnd) -> None:
        sent = self._sent
        if sent is not None and sent.pick is not None:
            sent.pick.finished(usage, how)
        self._end_grant(usage)

    def _end_grant(self, usage: Usage) -> None:
        sent = self._sent
        if sent is not None and sent.picked.grant is not None:
            sent.picked.grant.end(
                self._services.clock(),
                failed=self._status >= 400,
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
            )


def _no_endpoint(reason: str) -> RequestError:
    return RequestError(
        503,
        f"No instance can take the request now: {reason}",
        kind="service_unavailable",
        code="no_instance_available",
        retry_after_s=1,
    )


def _subset(message: Any) -> frozenset[str] | None:
    """The endpoints that the gateway allows; None where it does not say."""
    if not message.HasField("metadata_context"):
        return None
    hint = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE not in hint or _SUBSET not in hint[_SUBSET_NAMESPACE].fields:
        return None
    value = hint[_SUBSET_NAMESPACE].fields[_SUBSET]
    if value.WhichOneof("kind") == "list_value":
        given = [each.string_value for each in value.list_value.values]
    else:
        given = value.string_value.split(",")
    return frozenset([each.strip() for each in given if each.strip()])


def _text(message: Any, namespace: str, name: str) -> str | None:
    if not message.HasField("metadata_context"):
        return None
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata or name not in metadata[namespace].fields:
        return None
    return metadata[namespace].fields[name].string_value or None
