"""Bodies of which a part is known are read as they are read whole, whatever stands in them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import known_bodies
from router.known_bodies import KnownBodies

# Whose concatenations are JSON now and then: names that occur twice, escapes, numbers that go on, marks in texts.
PIECES = [
    '{"model":"m","messages":[',
    '"\\u006dessages" : [',
    '"x":[',
    '{"role":"user","content":"hello, what is this?"}',
    '{"role":"user","content":"hello, what is this"}',
    '{"role":"tool","content":"}, {\\"messages\\":[1"}',
    '{"é":"ﬀ\\ud83d\\ude00"}',
    *("1", "12", "-0", "1e5", "true", "null", '"', '"a"', "[", "{}"),
    *(",", ",", ",", " , ", "]", "],", "]}", "]}", "} ", '],"messages":[', ',"max_tokens":16}'),
]


@pytest.fixture(autouse=True)
def short_bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known_bodies, "LONG_BYTES", 16)
    monkeypatch.setattr(known_bodies, "_NAME_BYTES", 8)
    yield


def whole(body: bytes) -> Any:
    try:
        return orjson.dumps(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        return str(error)


def read(known: KnownBodies, body: bytes | bytearray) -> Any:
    try:
        return orjson.dumps(known.read(body))
    except orjson.JSONDecodeError as error:
        return str(error)


@given(st.lists(st.tuples(st.integers(0, 400), st.lists(st.sampled_from(PIECES), max_size=12)), max_size=8))
def test_any_bytes_that_begin_alike(changes: list[tuple[int, list[str]]]) -> None:
    known = KnownBodies()
    body = PIECES[0].encode() + b",".join([PIECES[3].encode()] * 6) + b"]}"
    assert read(known, body) == whole(body)
    for kept, pieces in changes:
        body = body[:kept] + "".join(pieces).encode()
        assert read(known, body) == whole(body)


ONE, TWO, OTHER = (f'{{"role":"user","content":"{text}"}}' for text in ("hello", "what?", "where"))


@pytest.mark.parametrize("before", [f'{{"messages":[{ONE},{TWO}', f'{{"x":[{ONE},1],"messages":[{ONE},{TWO}'])
@pytest.mark.parametrize(
    "ends", [("],'messages':[1,2]}", "]}"), ("]}", "],'messages':[1]}"), ("]}", "],'messages':7}")]
)
@pytest.mark.parametrize("name", ["messages", "\\u006dessages"])
def test_messages_that_are_said_twice(before: str, ends: tuple[str, str], name: str) -> None:
    known = KnownBodies()
    for end in (*ends, *ends):
        body = (before + end.replace("'messages'", f'"{name}"')).encode()
        assert read(known, body) == whole(body)


def test_messages_that_are_said_twice_almost_alike() -> None:
    known = KnownBodies()
    for body in (
        f'{{"messages":[{ONE},{TWO}],"messages":[{ONE},{OTHER}]}}',
        f'{{"messages":[{ONE},{TWO}],"n":1}}',
        f'{{"messages":[{ONE},{TWO}],"messages":[{OTHER}]}}',
        f'{{"messages":[{ONE},{TWO},{OTHER}]}}',
    ):
        assert read(known, body.encode()) == whole(body.encode())


@given(st.randoms(use_true_random=False), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
def test_chats_that_grow_and_branch(randoms: random.Random, separators: tuple[str, str]) -> None:
    known = KnownBodies()
    messages: list[Any] = []
    for _ in range(12):
        del messages[randoms.randint(0, len(messages)) :]
        for _ in range(randoms.randint(1, 6)):
            messages.append(
                randoms.choice([{"role": "user", "content": "ü\n" * randoms.randint(0, 9)}, 7, [{}]])
            )
        document = {"tools": [{}], "messages": messages, "seed": randoms.random()}
        body = json.dumps(document, separators=separators).encode()
        assert known.read(bytearray(body)) == document


def test_known_messages_are_not_parsed_again() -> None:
    known = KnownBodies()
    one, two, three = ({"role": "user", "content": str(number) * 40} for number in range(3))
    first = known.read(orjson.dumps({"messages": [one, two], "stream": True}))
    longer = known.read(orjson.dumps({"messages": [one, two, three], "n": 1}))
    branch = known.read(orjson.dumps({"messages": [one, two, 12]}))
    assert longer == {"messages": [one, two, three], "n": 1} and branch == {"messages": [one, two, 12]}
    assert longer["messages"][0] is branch["messages"][0] is first["messages"][0]
    assert longer["messages"][1] is first["messages"][1]
    assert known.read(b'{"messages": []}') == {"messages": []}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownBodies(10_000)
    for number in range(100):
        body = orjson.dumps({"messages": [str(number) * 30, "a" * (number * 37 % 400)]})
        assert known.read(body) == orjson.loads(body)
        assert 0 < known.kept_bytes <= 10_000
    too_long = orjson.dumps({"messages": ["b" * 10_000]})
    before = known.kept_bytes
    assert known.read(too_long) == orjson.loads(too_long) and known.kept_bytes == before
