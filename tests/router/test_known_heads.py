"""A request whose head was read before has the outcome that the parser alone would give it."""

from __future__ import annotations

import asyncio
import itertools
import re
from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router import ApiKey, KeyRing
from router.accounts import KeyLimits
from router.known_heads import MAX_HEAD_BYTES, CutHead, KnownHead, KnownHeads
from tests.router.conftest import MODEL
from tests.router.without_sockets import Door, settled

BODY = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
OTHER = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %b\r\nAccept: */*\r\n\r\n"
HEADS = [
    HEAD,
    b"POST /v1/chat/completions?a=b HTTP/1.1\r\nCONTENT-length:%b\r\n\r\n",
    b"POST http://x/v1/completions HTTP/1.1\r\nHost: x\r\nX-Conductor-Tenant: me\r\ncontent-length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nX-Conductor-Priority: high\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nX-Request-Id: mine\r\nContent-Length: %b\r\nX: y\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %b\r\nContent-Length: 5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %b\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nA: b\r\n folded\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nA: b\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\nContent-Length: 4\n\nABCD\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: %b\r\n\r\n",
    b"POST /unknown HTTP/1.1\r\nContent-Length: %b\r\n\r\n",
    b"PUT /v1/chat/completions HTTP/1.1\r\nContent-Length: %b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\nPOST /v1/chat/completions HTTP/1.1\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length : %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %b \r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nX: \x00\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nX-Long: "
    + b"x" * MAX_HEAD_BYTES
    + b"\r\nContent-Length: %b\r\n\r\n",
]
LENGTHS = [
    *(b"", b"-1", b"+5", b"5,5", b"5 5", b"0x5", b"5;", b"5\r\n", "²".encode(), b"1_0", b" 5", b"\t5", b"5\n"),
    *(b"0", b"00", b"1", b"0" * 14 + b"5", b"0" * 15 + b"5", b"9" * 15, b"9" * 16, b"9" * 25),
]  # fmt: skip


def cut_up(data: bytes, places: list[int]) -> list[bytes]:
    """In pieces that end anywhere, or with a line where the place is odd."""
    lines = [0, *(found.end() for found in re.finditer(rb"\n", data))]
    ends = {lines[place % len(lines)] if place % 2 else place % (len(data) + 1) for place in places}
    return [data[start:end] for start, end in itertools.pairwise(sorted(ends | {0, len(data)}))]


def filled(head: bytes, length: bytes) -> bytes:
    return head.replace(b"%b", length)


async def both(head: bytes, pieces: list[bytes], **options: Any) -> list[Any]:
    """The outcome with a door that knows the head, and with one that knows none."""
    usual = filled(head, b"%d" % len(BODY)) + BODY
    outcomes = []
    for knows in (True, False):
        door = Door(knows=knows, **options)
        for _ in range(2):
            await door.exchange([usual])
        outcomes.append((await door.exchange(pieces, before=usual), door.seen))
        door.services.close()
    return outcomes


USUAL = filled(HEAD, b"%d" % len(BODY)) + BODY
requests = st.lists(
    st.tuples(
        st.sampled_from([b"%d" % len(BODY), b"%d" % len(OTHER), None, *LENGTHS]),
        st.sampled_from([BODY, OTHER, b"", b"{", b"\r\n", USUAL, b"\n" + USUAL, b"5\r\nhello\r\n0\r\n\r\n"]),
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=120)
@given(
    st.one_of(st.just(HEAD), st.sampled_from(HEADS)),
    requests,
    st.lists(st.integers(0, 10_000), max_size=4),
    st.sampled_from([1, 30]),  # an engine answers before the next piece comes, or later
)
@example(HEAD, [(b"5, 5", BODY)], [], 1)
@example(HEAD, [(b"9" * 15, BODY)], [], 1)
@example(HEAD, [(b"0" * 15 + b"5", BODY)], [], 1)
@example(HEAD, [(None, BODY), (None, b"\n" + USUAL)], [3, 5, 7, 9, 11, 13], 1)
@example(HEAD, [(None, BODY), (None, USUAL)], [1, 3, 5, 7, 9, 11, 13, 15], 1)
@example(HEAD, [(b"%d" % (len(BODY) + len(USUAL)), BODY), (None, USUAL)], [1, 3, 5, 7, 9, 11, 13, 15], 1)
@example(HEAD, [(None, BODY), (None, OTHER), (None, BODY)], [], 1)
def test_a_known_head_changes_no_outcome(
    head: bytes, sent: list[tuple[bytes | None, bytes]], places: list[int], turns: int
) -> None:
    data = b"".join(
        filled(head, b"%d" % len(body) if length is None else length) + body for length, body in sent
    )
    known, unknown = asyncio.run(both(head, cut_up(data, places), turns=turns))
    assert known == unknown


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("turns", [1, 30])
@pytest.mark.parametrize(
    "pieces",
    [
        [b"POST /v1/chat/completions HTTP/1.1\r\nX: ", USUAL],
        [b"POST /v1/chat/completions HTTP/1.1\r\n", USUAL],
        [b"P", USUAL],
        [b"\r", USUAL],
        [b"\r\n", USUAL],
        [USUAL + b"\r\n", USUAL],
        [USUAL + USUAL, USUAL],
        [USUAL, filled(HEAD, b"1") + b"{"],
        [USUAL, USUAL + USUAL[:50], USUAL[50:]],
        [CHUNKED, b"%x\r\n" % len(USUAL), USUAL, b"\r\n0\r\n", b"\r\n", USUAL],
        [CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY), b"X: ", USUAL],
        [b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", USUAL],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", USUAL, USUAL],
        [b"GET /health HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", USUAL],
        [USUAL, b"\x00\r\n\r\n", USUAL],
        [filled(HEAD, b"9000") + USUAL, USUAL],
        [filled(HEAD, b"9000") + b"x" * 9_000 + USUAL, USUAL],
    ],
)
async def test_bytes_that_look_like_a_known_head_are_what_they_are_where_they_stand(
    pieces: list[bytes], turns: int
) -> None:
    known, unknown = await both(HEAD, pieces, turns=turns)
    assert known == unknown


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([BODY, OTHER, b"{"]), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_pieces_of_a_known_request_are_the_same_request(body: bytes, places: list[int]) -> None:
    data = filled(HEAD, b"%d" % len(body)) + body
    whole, _ = asyncio.run(both(HEAD, [data]))
    pieces, _ = asyncio.run(both(HEAD, cut_up(data, places)))
    assert whole == pieces


@pytest.mark.parametrize("sizes", [[1], [100, 5_000], [4_096, 1], [70_000], [1 << 20]])
async def test_long_bodies_arrive_whole(sizes: list[int]) -> None:
    text = "".join(map(str, range(40_000)))
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": text[:200_000]}]})
    if sizes == [1]:
        body = body[:20_000] + body[-4:]
    data = filled(HEAD, b"%d" % len(body)) + body
    pieces: list[bytes] = []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    pieces = [b"".join(pieces[:200]), *pieces[200:]] if sizes == [1] else pieces
    door = Door(knows=True, max_body_bytes=1 << 20)
    await door.exchange([filled(HEAD, b"%d" % len(BODY)) + BODY])
    await door.exchange([filled(HEAD, b"%d" % len(BODY)) + BODY])
    door.seen.clear()
    protocol, wire = door.client()
    for piece in pieces:
        protocol.data_received(piece)
    await settled()
    [request] = door.seen
    assert request.partition(b"\r\n\r\n")[2] == body and wire.written.startswith(b"HTTP/1.1 200")
    door.services.close()


async def test_a_long_body_that_is_no_json_is_refused() -> None:
    door = Door(knows=True, max_body_bytes=1 << 20)
    for _ in range(2):
        await door.exchange([filled(HEAD, b"%d" % len(BODY)) + BODY])
    door.seen.clear()
    protocol, wire = door.client()
    protocol.data_received(filled(HEAD, b"100000") + b"[" * 100_000 + USUAL)
    await settled()
    assert wire.written.startswith(b"HTTP/1.1 400") and wire.written.count(b"HTTP/1.1 200") == 1
    assert [request.partition(b"\r\n\r\n")[2] for request in door.seen] == [BODY]
    door.services.close()


@pytest.mark.parametrize("place", [0, 20, 150])
@pytest.mark.parametrize("length", [None, b"5000", b"9" * 15])
async def test_keys_and_limits_hold_for_known_heads(length: bytes | None, place: int) -> None:
    """One key is known, another one is not; a minute's fifth request is one too many."""
    key = ApiKey("k", sha256(b"secret").digest(), "t", limits=KeyLimits(requests_per_minute=4))
    head = HEAD.replace(b"Accept: */*", b"Authorization: Bearer secret")
    for sent in (head, head.replace(b"secret", b"Secret")):
        data = filled(sent, length or b"%d" % len(BODY)) + BODY
        outcomes = []
        for knows in (True, False):
            door = Door(knows=knows, keys=KeyRing([key]))
            for _ in range(3):
                await door.exchange([filled(sent, b"%d" % len(BODY)) + BODY])
            outcomes.append([(await door.exchange(cut_up(data, [place])))[0][:12] for _ in range(3)])
            door.services.close()
        assert outcomes[0] == outcomes[1]


# What is remembered


def test_heads_are_kept_when_they_come_again_and_make_room_for_others() -> None:
    heads = KnownHeads(most=3)
    for number in range(10):
        data = filled(HEAD.replace(b"*/*", b"text/%d" % (100 + number)), b"5") + b"hello"
        assert heads.look_up(data) is None
        cut = heads.look_up(data)
        assert isinstance(cut, CutHead) and cut.before + cut.digits + cut.behind + b"hello" == data
        heads.keep(cut, Any, Any)  # type: ignore[arg-type]
        known = heads.look_up(data.replace(b" 5\r", b" 6\r"))
        assert isinstance(known, KnownHead)
        assert known.begins(data) == (len(data) - 5, len(data))
        assert len(heads) == min(number + 1, 3)


@pytest.mark.parametrize("data", [b"", HEAD[:-1], HEAD, filled(HEADS[-1], b"5"), b"GET / HTTP/1.1\r\n\r\n"])
def test_other_heads_are_never_kept(data: bytes) -> None:
    heads = KnownHeads()
    assert heads.look_up(data) is None
    assert heads.look_up(data) is None


async def test_a_door_knows_the_heads_that_it_reads_again() -> None:
    door = Door(knows=True)
    request = filled(HEAD, b"%d" % len(BODY)) + BODY
    for _ in range(4):
        await door.exchange([request, request])
    assert len(door.services.known_heads) == 1 and len(door.seen) == 8
    known = door.services.known_heads.look_up(request)
    assert isinstance(known, KnownHead)
    protocol, _ = door.client()
    protocol.data_received(request)
    assert protocol.cycle.head is known.head
    await settled()
    door.services.close()


async def test_a_head_that_never_comes_again_takes_no_room() -> None:
    door = Door(knows=True)
    for number in range(2_000):
        door.services.known_heads.look_up(filled(HEAD.replace(b"*/*", b"%d" % number), b"5"))
    await door.exchange([filled(HEAD, b"%d" % len(BODY)) + BODY])
    assert len(door.services.known_heads) == 0
    door.services.close()
