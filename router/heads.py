"""The header lines that go to engines and those that are added for the client."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import quote

from conductor.placement import Placement, Target
from router.framing import HOP_BY_HOP, ResponseHead

Headers = list[tuple[bytes, bytes]]

_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"transfer-encoding",
    b"expect",
    b"x-request-id",
    b"x-data-parallel-rank",
}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def client_request_id(headers: Headers) -> str | None:
    """The client's X-Request-Id where it is printable, without spaces and of bounded length."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else None
    return None


def forwarded_fields(headers: Headers) -> tuple[bytes, bytes]:
    """The client's end-to-end header lines, and those with its credentials apart; each with its line end.

    The request's id is left out: a client's may be none that can be used.

    Hop-by-hop fields, including those that ``Connection`` names, stay here.
    """
    dropped: frozenset[bytes] | set[bytes] = _NOT_FORWARDED
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            dropped = dropped | {option.strip().lower() for option in value.split(b",")}
    parts: list[bytes] = []
    credentials = b""
    for name, value in headers:
        if name in dropped or name.startswith(b"x-conductor-"):
            continue
        if name == b"authorization" or name == b"x-api-key":
            credentials += b"%b: %b\r\n" % (name, value)
        else:
            parts.append(b"%b: %b\r\n" % (name, value))
    return b"".join(parts), credentials


def request_head(
    url: bytes, target: Target, fields: bytes, credentials: bytes, request_id: str, body_bytes: int
) -> bytes:
    """The head of a leg. An engine's own key takes the place of the client's credentials."""
    if target.api_key is not None:
        credentials = f"authorization: Bearer {target.api_key}\r\n".encode("latin-1")
    if target.ranks > 1:
        credentials = b"x-data-parallel-rank: %d\r\n%b" % (target.rank, credentials)
    return b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n%b%bx-request-id: %b\r\n\r\n" % (
        url,
        _host_line(target.host, target.port),
        body_bytes,
        credentials,
        fields,
        request_id.encode("ascii"),
    )


@lru_cache(maxsize=1_024)
def _host_line(host: str, port: int) -> bytes:
    return f"host: {host_in_url(host)}:{port}\r\n".encode("latin-1")


def host_field(target: Target) -> str:
    return f"{host_in_url(target.host)}:{target.port}"


def host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def placement_fields(placement: Placement, attempts: int) -> str:
    """The ``x-conductor-*`` lines of a response; nothing is predicted where nothing was reserved."""
    where = _where(placement.prefill.instance_id, placement.decode.instance_id)
    if not placement.placement_id:
        return f"{where}x-conductor-attempts: {attempts}\r\n"
    return (
        f"{where}x-conductor-attempts: {attempts}\r\n"
        f"x-conductor-placement-id: {placement.placement_id}\r\n"
        f"x-conductor-overlap-tokens: {placement.overlap_tokens}\r\n"
        f"x-conductor-predicted-ttft-ms: {placement.predicted_ttft_s * 1e3:.1f}\r\n"
    )


@lru_cache(maxsize=1_024)
def _where(prefill: str, decode: str) -> str:
    return (
        f"x-conductor-prefill-instance: {_field_text(prefill)}\r\n"
        f"x-conductor-decode-instance: {_field_text(decode)}\r\n"
    )


def _field_text(name: str) -> str:
    """A configured name as the value of a header field: percent-encoded where it could not stand there."""
    return name if name.isascii() and name.isprintable() else quote(name)


def changed_response_head(
    head: ResponseHead, added: str, *, own_cors: bool, client_takes_chunks: bool
) -> bytes:
    """An engine's response head for a client that does not get all its lines; ours are added.

    With ``own_cors`` what the engine says about web pages stays here: browsers accept it once only.
    """
    fields = head.fields
    if own_cors:
        fields = [line for line in fields if not line[:15].lower().startswith(b"access-control-")]
    if not client_takes_chunks:
        fields = [line for line in fields if not line[:18].lower().startswith(b"transfer-encoding:")]
    lines = b"\r\n".join((b"HTTP/1.1" + head.status_line[8:], *fields, added.encode("latin-1")))
    return lines + b"\r\n"
