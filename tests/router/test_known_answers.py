"""A response's head reads as if it had been parsed from its first byte to its last."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from router.framing import FramingError, ResponseHead, parse_head
from router.known_answers import KNOWN_ANSWERS, KnownAnswers

LINES = [
    b"content-length: 5",
    b"Content-Length:5",
    b"CONTENT-LENGTH: 12345",
    b"content-length: 0",
    b"x: content-length: 5",
    b"content-length : 5",
    b"content-length:  5",
    b"content-length: 5 ",
    b"content-length: +5",
    b"content-length: ",
    b"content-length: " + b"9" * 15,
    b"content-length: " + b"9" * 16,
    b"content-length: 5, 5",
    b"content-length\t: 5",
    b"transfer-encoding: chunked",
    b"transfer-encoding: identity",
    b"connection: close",
    b"connection: keep-alive",
    b"content-type: text/event-stream",
    b"content-type: application/json",
    b"content-encoding: gzip",
    b"date: now",
    b"x-request-id: theirs",
    b"x-conductor-attempts: 9",
    b" folded",
    b"no colon",
    b"a: b\nc: d",
    b"a: b\rc: d",
    b"",
]
blocks = st.builds(
    lambda status, lines: b"\r\n".join((status, *lines)),
    st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.0 404 Not Found", b"HTTP/1.1 204 X", b"HTTP/2 200", b""]),
    st.lists(st.sampled_from(LINES), max_size=4),
)


def outcome(block: bytes, *, known: bool) -> ResponseHead | str:
    try:
        return KNOWN_ANSWERS[block] if known else parse_head(block)
    except FramingError as error:
        return str(error)


@given(st.lists(blocks, min_size=1, max_size=4))
@example([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 0"])
@example([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5"])
@example([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked"])
@example([b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\ncontent-length: 5"])
def test_a_head_reads_the_same_whatever_was_read_before(read: list[bytes]) -> None:
    for block in read:
        assert outcome(block, known=True) == outcome(block, known=False)


@given(st.lists(st.integers(0, 10**15 - 1), min_size=1, max_size=10))
def test_heads_that_differ_in_their_length_alone(lengths: list[int]) -> None:
    for length in lengths:
        block = (
            b"HTTP/1.1 200 OK\r\nserver: x\r\nContent-Length: %d\r\ncontent-type: application/json" % length
        )
        assert KNOWN_ANSWERS[block] == parse_head(block)
        assert KNOWN_ANSWERS[block].content_length == length


def test_little_is_remembered() -> None:
    known = KnownAnswers()
    for number in range(1_000):
        assert known[b"HTTP/1.1 200 OK\r\nx: %d" % number].status == 200
        assert known[b"HTTP/1.1 200 OK\r\nx: %d%b" % (number, b"x" * 2_000)].status == 200
    assert 0 < len(known) <= 256
