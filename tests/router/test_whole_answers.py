"""An answer that comes at once is passed on, and told of, as one that comes in pieces."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.router.conftest import MODEL
from tests.router.without_sockets import Door, settled, without_ids


def request(stream: bool) -> bytes:
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream})
    return b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


bodies = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda prompt, output: b'{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (prompt, output),
        st.integers(0, 9_999),
        st.integers(0, 9_999),
    ),
    st.lists(
        st.sampled_from([b"data: 1\n\n", b'data: {"usage":{"completion_tokens":3}}\n\n']), max_size=4
    ).map(b"".join),
)


async def answered(pieces: list[bytes], stream: bool) -> tuple[bytes, list[tuple[str, Any]], int, bool]:
    """What the client gets, what is told of it, idle connections to the engine, and whether the client's ends."""
    door = Door(answer=pieces)
    protocol, wire = door.client()
    before = len(door.services.pool.instance(door.target).idle)
    protocol.data_received(request(stream))
    await settled(30)
    kept = len(door.services.pool.instance(door.target).idle) - before
    outcome = without_ids(wire.written), list(door.placements.calls), kept, wire.closing
    door.services.close()
    return outcome


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([b"200 OK", b"201 Created", b"404 Not Found", b"503 Busy"]),
    st.sampled_from([b"application/json", b"text/event-stream"]),
    st.sampled_from([b"", b"connection: close\r\n"]),
    bodies,
    st.integers(1, 10_000),
    st.booleans(),
)
@example(b"200 OK", b"application/json", b"", b"", 1, False)
@example(b"200 OK", b"application/json", b"", b"{}", 10, True)
def test_whole_or_in_pieces(
    status: bytes, kind: bytes, more: bytes, body: bytes, cut: int, stream: bool
) -> None:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n" % (
        status,
        kind,
        more,
        len(body),
    )
    answer = head + body
    place = 1 + cut % len(head)
    pieces = [answer[:place], answer[place:]] if answer[place:] else [answer]
    whole = asyncio.run(answered([answer], stream))
    assert asyncio.run(answered(pieces, stream)) == whole
    if status < b"300":
        assert [call for call, _ in whole[1]] == ["place", *["first_token"] * stream, "finished"]
        assert whole[0].endswith(body)
