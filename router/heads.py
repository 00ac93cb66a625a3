"""The header lines that go to engines and those that are added for the client."""

from __future__ import annotations

import re
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


def forwarded_fields(headers: Headers, request_id: str) -> tuple[bytes, bytes]:
    """The client's end-to-end header lines, and those with its credentials apart; each with its line end.

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
    parts.append(b"x-request-id: %b\r\n" % request_id.encode("ascii"))
    return b"".join(parts), credentials


def request_head(url: bytes, target: Target, fields: bytes, credentials: bytes, body_bytes: int) -> bytes:
    """The head of a leg. An engine's own key takes the place of the client's credentials."""
    own = f"host: {host_field(target)}\r\ncontent-length: {body_bytes}\r\n"
    if target.ranks > 1:
        own += f"x-data-parallel-rank: {target.rank}\r\n"
    if target.api_key is not None:
        own += f"authorization: Bearer {target.api_key}\r\n"
        credentials = b""
    return b"POST %b HTTP/1.1\r\n%b%b%b\r\n" % (url, own.encode("latin-1"), credentials, fields)


def host_field(target: Target) -> str:
    return f"{host_in_url(target.host)}:{target.port}"


def host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def placement_fields(placement: Placement, attempts: int) -> str:
    """The ``x-conductor-*`` lines of a response; nothing is predicted where nothing was reserved."""
    where = (
        f"x-conductor-prefill-instance: {_field_text(placement.prefill.instance_id)}\r\n"
        f"x-conductor-decode-instance: {_field_text(placement.decode.instance_id)}\r\n"
        f"x-conductor-attempts: {attempts}\r\n"
    )
    if not placement.placement_id:
        return where
    return where + (
        f"x-conductor-placement-id: {placement.placement_id}\r\n"
        f"x-conductor-overlap-tokens: {placement.overlap_tokens}\r\n"
        f"x-conductor-predicted-ttft-ms: {placement.predicted_ttft_s * 1e3:.1f}\r\n"
    )


def _field_text(name: str) -> str:
    """A configured name as the value of a header field: percent-encoded where it could not stand there."""
    return name if name.isascii() and name.isprintable() else quote(name)


def response_head(
    head: ResponseHead, added: str, *, own_cors: bool, client_takes_chunks: bool, keep_alive: bool
) -> bytes:
    """An engine's response head for the client: end-to-end lines as they were, ours added.

    With ``own_cors`` what the engine says about web pages stays here: browsers accept it once only.
    """
    fields = head.fields
    if own_cors:
        fields = [line for line in fields if not line[:15].lower().startswith(b"access-control-")]
    if not client_takes_chunks:
        fields = [line for line in fields if not line[:18].lower().startswith(b"transfer-encoding:")]
    if not keep_alive:
        added += "connection: close\r\n"
    lines = b"\r\n".join((b"HTTP/1.1" + head.status_line[8:], *fields, added.encode("latin-1")))
    return lines + b"\r\n"
