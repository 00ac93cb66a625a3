"""Where a response ends: HTTP/1.1 framing over bytes that arrive in any pieces, without I/O.

The data path forwards an engine's bytes as they are, so nothing is decoded here unless a *sink* asks for
it: a :class:`BodyFramer` only walks over the framing to know when the response is complete and up to where
the bytes seen so far consist of whole chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024  # chunk size line or trailer field
MAX_LENGTH_DIGITS = 15  # of a content-length
MAX_CACHED_SIZES = 4_096

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
    )
)

_LONG_PIECE_BYTES = 1_024  # in which there may be chunks enough for a compiled walk to pay

# Compiled (`router.chunk_walk`), in a process that has loaded the compiler anyway.
walk_chunks: Callable[..., tuple[int, int, int]] | None = None

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r")
_chunk_sizes: dict[bytes, int] = {}  # size lines repeat: most streamed events have one of few lengths


class FramingError(Exception):
    """The bytes are no well-formed HTTP/1.1 response."""


@dataclass(slots=True)
class ResponseHead:
    """Status line and the fields that matter here; ``fields`` are the header lines that are passed on.

    ``block`` is all that is passed on. ``close_delimited``: only the end of the connection ends the body.
    """

    status: int
    status_line: bytes
    fields: list[bytes]
    content_type: bytes = b""
    content_length: int | None = None
    chunked: bool = False
    keep_alive: bool = True
    encoded: bool = False  # compressed: events cannot be added to it
    event_stream: bool = False
    bodiless: bool = False
    close_delimited: bool = False
    block: bytes = b""


def parse_head(block: bytes) -> ResponseHead:
    """Parse a response head given without its final blank line. Raises FramingError."""
    lines = block.split(b"\r\n")
    if not block.count(b"\r") == block.count(b"\n") == len(lines) - 1:
        raise FramingError("a header line does not end in CRLF")
    status_line = lines[0]
    if status_line[:7] != b"HTTP/1." or not status_line[9:12].isdigit():
        raise FramingError(f"not an HTTP/1.1 status line: {status_line[:60]!r}")
    fields: list[bytes] = []
    head = ResponseHead(int(status_line[9:12]), status_line, fields, keep_alive=status_line[7:8] == b"1")
    transfer_encoded = False
    length_field: bytes | None = None
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise FramingError(f"header line without a colon: {line[:60]!r}")
        if name.split() != [name]:
            raise FramingError(f"space in the name of a header field: {line[:60]!r}")
        name = name.lower()
        if name == b"content-length":
            length = value.strip()
            if (
                not length.isdigit()
                or len(length) > MAX_LENGTH_DIGITS
                or (length_field is not None and int(length) != head.content_length)
            ):
                raise FramingError(f"content-length is {length[:60]!r}")
            if length_field is None:
                length_field = line
                head.content_length = int(length)
            continue
        if name in HOP_BY_HOP:
            if name == b"connection":
                options = value.lower()
                head.keep_alive = b"close" not in options and (head.keep_alive or b"keep-alive" in options)
            continue
        if name == b"transfer-encoding":
            transfer_encoded = True
            head.chunked = value.lower().strip().endswith(b"chunked")
        elif name == b"content-type":
            head.content_type = value.strip().lower()
        elif name == b"content-encoding":
            head.encoded = value.strip().lower() not in (b"", b"identity")
        elif name == b"x-request-id" or name.startswith(b"x-conductor-"):
            continue  # ours take their place
        fields.append(line)
    if transfer_encoded:
        head.content_length = None  # RFC 9112 section 6.3: transfer-encoding overrides it
    elif length_field is not None:
        fields.append(length_field)
    head.event_stream = head.content_type.startswith(b"text/event-stream")
    head.bodiless = head.status == 204 or head.status == 304
    head.close_delimited = not head.chunked and head.content_length is None and not head.bodiless
    head.block = b"HTTP/1.1%b\r\n" % b"\r\n".join((status_line[8:], *fields))
    return head


class BodyFramer:
    """Follows one response body to its end.

    ``complete`` tells that the end was seen. ``boundary`` is the index in the last fed piece up to which
    whole chunks have arrived (its end, where the body is not chunked).
    """

    __slots__ = ("_chunked", "_line", "_remaining", "_trailers", "boundary", "close_delimited", "complete")

    def __init__(self, head: ResponseHead) -> None:
        self.close_delimited = head.close_delimited
        self.boundary = 0
        self._chunked = head.chunked and not head.bodiless
        self._remaining = 0 if self._chunked or head.bodiless else head.content_length or 0
        self._line = b""  # beginning of a size or trailer line that is still to be completed
        self._trailers = False
        self.complete = not self._chunked and not self.close_delimited and self._remaining == 0

    def feed(self, data: bytes, start: int = 0, sink: list[bytes] | None = None) -> int:
        """Walk over ``data[start:]`` and return the index behind the body's last byte in it.

        Decoded payload is appended to ``sink`` when one is given. Raises FramingError.
        """
        if self._chunked:
            return self._feed_chunks(data, start, sink)
        end = len(data)
        if not self.close_delimited:
            end = min(end, start + self._remaining)
            self._remaining -= end - start
            self.complete = self._remaining == 0
        if sink is not None and end > start:
            sink.append(data[start:end])
        self.boundary = end
        return end

    def _feed_chunks(self, data: bytes, pos: int, sink: list[bytes] | None) -> int:
        size = len(data)
        self.boundary = pos
        if (
            walk_chunks is not None
            and sink is None
            and size - pos > _LONG_PIECE_BYTES
            and not (self._line or self._trailers)
        ):
            walked = walk_chunks(np.frombuffer(data, np.uint8), pos, self._remaining)
            self.boundary, pos, self._remaining = walked
        while pos < size:
            remaining = self._remaining  # bytes of the current chunk's data, its line end included
            if remaining:
                available = size - pos
                if sink is not None and remaining > 2:
                    sink.append(data[pos : pos + min(remaining - 2, available)])
                if remaining > available:
                    self._remaining = remaining - available
                    return size
                pos += remaining
                self._remaining = 0
                self.boundary = pos
                continue
            line_end = data.find(b"\n", pos)
            if line_end < 0:
                self._line += data[pos:]
                if len(self._line) > MAX_LINE_BYTES:
                    raise FramingError(f"a chunk size or trailer line exceeds {MAX_LINE_BYTES} bytes")
                return size
            line = data[pos:line_end]
            if self._line:
                line = self._line + line
                self._line = b""
            pos = line_end + 1
            if self._trailers:
                if line == b"\r":
                    self.complete = True
                    self.boundary = pos
                    return pos
                if line[-1:] != b"\r":
                    raise FramingError(f"trailer line does not end in CRLF: {line[:60]!r}")
                continue
            chunk_bytes = _chunk_sizes.get(line)
            if chunk_bytes is None:
                chunk_bytes = _parse_size(line)
            if chunk_bytes:
                self._remaining = chunk_bytes + 2
            else:
                self._trailers = True
        return pos


def _parse_size(line: bytes) -> int:
    match = _SIZE_LINE.fullmatch(line)
    if match is None:
        raise FramingError(f"chunk size line is {line[:60]!r}")
    size = int(match[1], 16)
    if len(_chunk_sizes) < MAX_CACHED_SIZES and len(line) <= 17:
        _chunk_sizes[line] = size
    return size
