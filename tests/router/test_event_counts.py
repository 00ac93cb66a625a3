"""Events of a stream are counted, however its bytes are cut: engines may not say how many tokens they made."""

from __future__ import annotations

import asyncio
import itertools

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conductor.placement import Usage
from tests.router.conftest import MODEL, chunk
from tests.router.without_sockets import Door, settled

BODY = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True})
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%b\r\n"
CHUNKED, TO_THE_END = HEAD % b"transfer-encoding: chunked\r\n", HEAD % b""

events = st.lists(
    st.builds(
        lambda text: b"data: %b\n\n" % text.encode(),
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n")),
    ),
    min_size=2,
    max_size=12,
)


async def streamed(pieces: list[bytes], *, ends: bool) -> tuple[bytes, Usage]:
    """What the client gets, and what is told of the usage."""
    door = Door(answer=pieces)
    protocol, wire = door.client()
    protocol.data_received(REQUEST)
    await settled(30)
    if ends:
        for connection in list(door.services.pool.instance(door.target).open_connections):
            connection.connection_lost(None)
    await settled()
    [usage] = door.placements.named("finished")
    door.services.close()
    return wire.written.partition(b"\r\n\r\n")[2], usage


@settings(deadline=None, max_examples=150)
@given(events, st.lists(st.integers(0, 5_000), max_size=12), st.booleans())
@example([b"data: 1\n\n", b"data: 2\n\n"], [*range(200)], True)
@example([b"data: 1\n\n", b"data: 2\n\n"], [*range(200)], False)
def test_however_a_stream_is_cut_its_events_are_counted(
    stream: list[bytes], places: list[int], in_chunks: bool
) -> None:
    if in_chunks:
        body = b"".join(map(chunk, stream)) + b"0\r\n\r\n"
        data = CHUNKED + body
    else:
        body = b"".join(stream)
        data = TO_THE_END + body
    ends = sorted({place % len(data) for place in places} | {0, len(data)})
    pieces = [data[start:end] for start, end in itertools.pairwise(ends)]
    written, usage = asyncio.run(streamed(pieces, ends=not in_chunks))
    assert written == body
    assert usage == Usage(output_tokens=len(stream) - 1)  # the last one is [DONE]
