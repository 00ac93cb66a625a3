"""The framing tracker against a C parser, over every way of cutting a response into pieces."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import framing
from router.chunk_walk import compiled_walk
from router.framing import BodyFramer, FramingError, parse_head

payloads = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
extensions = st.sampled_from([b"", b";a", b';a="b;c"', b";x=1;y=2"])
trailers = st.lists(st.sampled_from([b"x-a: 1", b"x-b: two words", b"e: "]), max_size=3)


class Oracle:
    """llhttp's view of one response."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Head, framed body, and the bytes behind the response."""
    pieces = draw(payloads)
    behind = draw(st.sampled_from([b"", b"x", b"HTTP/1.1 200 OK\r\n\r\n"]))
    if draw(st.booleans()):
        body = b"".join(pieces)
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body, behind
    size = draw(st.sampled_from([b"%x", b"%X", b"0%x"]))
    body = b"".join((size % len(p)) + draw(extensions) + b"\r\n" + p + b"\r\n" for p in pieces)
    body += b"0" + draw(extensions) + b"\r\n" + b"".join(line + b"\r\n" for line in draw(trailers)) + b"\r\n"
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body, behind


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


@given(responses(), st.lists(st.integers(0, 2_000), max_size=12))
def test_any_split_gives_the_same_end_and_payload(
    response: tuple[bytes, bytes, bytes], places: list[int]
) -> None:
    head, body, behind = response
    oracle = Oracle()
    httptools.HttpResponseParser(oracle).feed_data(head + body)
    assert oracle.complete
    framer = BodyFramer(parse_head(head[:-4]))
    payload: list[bytes] = []
    seen = b""
    for piece in cut(body + behind, places):
        if framer.complete:
            break
        end = framer.feed(piece, 0, payload)
        assert 0 <= framer.boundary <= end
        seen += piece[:end]
        assert framer.complete == (len(seen) == len(body))
    assert framer.complete
    assert seen == body
    assert b"".join(payload) == oracle.body


@given(
    st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_boundary_is_where_the_last_whole_chunk_ends(pieces: list[bytes], places: list[int]) -> None:
    framed = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    ends = {sum(map(len, framed[: n + 1])) for n in range(len(framed))} | {0}
    framer = BodyFramer(parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"))
    fed = 0
    for piece in cut(b"".join(framed), places):
        framer.feed(piece)
        last = max(end for end in ends if end <= fed + len(piece))
        assert framer.boundary == max(0, last - fed)
        fed += len(piece)


@pytest.mark.parametrize(
    "line", [b"x", b"-1", b"+1", b"0x1", b"1_0", b"", b" 1", b"1 2", b"g", b"1" * 16, b"1\r"]
)
def test_bad_chunk_sizes_are_refused(line: bytes) -> None:
    framer = BodyFramer(parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"))
    with pytest.raises(FramingError):
        framer.feed(line + b"\r\nabc\r\n")


def test_padded_chunk_sizes_are_accepted() -> None:
    framer = BodyFramer(parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"))
    framer.feed(b"1  \r\na\r\n0 ;x\r\n\r\n")
    assert framer.complete


def test_bare_line_feeds_are_refused() -> None:
    for body in (b"1\na\r\n0\r\n\r\n", b"0\r\nx: y\n\r\n"):
        framer = BodyFramer(parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"))
        with pytest.raises(FramingError):
            framer.feed(body)


def test_endless_size_line_is_refused() -> None:
    framer = BodyFramer(parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"))
    with pytest.raises(FramingError):
        for _ in range(100):
            framer.feed(b"1;" + b"x" * 1_000)


@pytest.mark.parametrize("status", [204, 304])
def test_bodiless_statuses_are_complete_at_once(status: int) -> None:
    for field in (b"content-length: 5", b"transfer-encoding: chunked"):
        head = parse_head(b"HTTP/1.1 %d X\r\n%b" % (status, field))
        assert BodyFramer(head).complete


@pytest.mark.parametrize(
    ("block", "keep_alive", "chunked", "content_length"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0", True, False, 0),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length:7", False, False, 7),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1", False, False, 1),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 1", True, False, 1),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\ncontent-length: 1", True, True, None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5", True, False, 5),
        (b"HTTP/1.1 200", True, False, None),
    ],
)
def test_heads(block: bytes, keep_alive: bool, chunked: bool, content_length: int | None) -> None:
    head = parse_head(block)
    assert (head.keep_alive, head.chunked, head.content_length) == (keep_alive, chunked, content_length)
    lengths = sum(field.lower().startswith(b"content-length") for field in head.fields)
    assert lengths == (content_length is not None)


@pytest.mark.parametrize(
    "block",
    [
        b"HTTP/2 200",
        b"HTTP/1.1 abc",
        b"",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: +1",
        b"HTTP/1.1 200 OK\r\ncontent-length : 1",
        b"HTTP/1.1 200 OK\r\na: b\r\n folded: c",
        b"HTTP/1.1 200 OK\r\n: no name",
        b"HTTP/1.1 200 OK\r\na: b\nx-added: c",
        b"HTTP/1.1 200 OK\r\na: b\rx-added: c",
        b"HTTP/1.1 200 OK\na: b",
    ],
)
def test_malformed_heads_are_refused(block: bytes) -> None:
    with pytest.raises(FramingError):
        parse_head(block)


@given(
    responses(),
    st.lists(st.integers(0, 2_000), max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=2),
)
def test_the_compiled_walk_is_the_interpreted_one(
    response: tuple[bytes, bytes, bytes], places: list[int], damages: list[tuple[int, bytes]]
) -> None:
    head, body, behind = response
    for place, damage in damages:
        body = body[:place] + damage + body[place + len(damage) :]
    pieces = cut(body + behind, places)
    assert _walked(head, pieces, compiled=True) == _walked(head, pieces, compiled=False)


def _walked(head: bytes, pieces: list[bytes], *, compiled: bool) -> list[object]:
    """What the framer says behind each piece."""
    framer, said = BodyFramer(parse_head(head[:-4])), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "walk_chunks", compiled_walk() if compiled else None)
        patch.setattr(framing, "_LONG_PIECE_BYTES", 0)
        for piece in pieces:
            try:
                said.append((framer.feed(piece), framer.boundary, framer.complete))
            except FramingError as error:
                return [*said, str(error)]
            if framer.complete:
                break
    return said
