"""What a gateway is answered: messages as bytes, ready to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from router.errors import RequestError
from router.ext_proc.messages import OVERWRITE_OR_ADD, ProcessingResponse

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
BALANCER: Final = "envoy.lb"  # the metadata namespace that Envoy's load balancers read
_ECHO_BYTES: Final = 1 << 20  # of a body a message; gateways take 4 MiB at least


def _constant(kind: str) -> bytes:
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return bytes(answer.SerializeToString())


# Go on, with nothing changed.
UNCHANGED: Final = {
    kind: _constant(kind)
    for kind in (
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    )
}


def picked(
    answered: str,
    endpoints: str,
    headers: Mapping[str, str],
    removed: Iterable[str],
    body: bytes | None = None,
) -> bytes:
    """In answer to a request's ``answered`` part; ``endpoints`` are ``ip:port``, the first choice first."""
    answer = ProcessingResponse()
    common = getattr(answer, answered).response
    common.clear_route_cache = True  # routes may ask for the header that names the endpoint
    mutation = common.header_mutation
    _set(mutation, DESTINATION, endpoints)
    for name, value in headers.items():
        _set(mutation, name, value)
    mutation.remove_headers.extend(removed)
    if body is not None:
        common.body_mutation.body = body
        _set(mutation, "content-length", str(len(body)))
    answer.dynamic_metadata.fields[BALANCER].struct_value.fields[DESTINATION].string_value = endpoints
    return bytes(answer.SerializeToString())


def echoed(kind: str, body: bytes, *, ends: bool) -> Iterator[bytes]:
    """A body in full duplex, where what is not sent back is lost."""
    for start in range(0, max(len(body), 1), _ECHO_BYTES):
        answer = ProcessingResponse()
        streamed = getattr(answer, kind).response.body_mutation.streamed_response
        streamed.body = body[start : start + _ECHO_BYTES]
        streamed.end_of_stream = ends and start + _ECHO_BYTES >= len(body)
        yield bytes(answer.SerializeToString())


def response_headers(fields: str) -> bytes:
    """Add lines of a response's head, as `router.heads` writes them."""
    answer = ProcessingResponse()
    mutation = answer.response_headers.response.header_mutation
    for line in fields.splitlines():
        name, _, value = line.partition(": ")
        _set(mutation, name, value)
    return bytes(answer.SerializeToString())


def refused(error: RequestError, body: bytes) -> bytes:
    """The gateway answers in the engine's place."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = error.status
    immediate.body = body
    immediate.details = error.code or error.kind
    _set(immediate.headers, "content-type", "application/json")
    if error.retry_after_s is not None:
        _set(immediate.headers, "retry-after", str(error.retry_after_s))
    return bytes(answer.SerializeToString())


def _set(mutation: Any, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode("latin-1")
    option.append_action = OVERWRITE_OR_ADD
