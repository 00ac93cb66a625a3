"""Waiting for many ZeroMQ sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from cache_index.readiness import Readiness

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]
MakePair = Callable[[str], Pair]
PATIENCE_MS = 10_000


@pytest.fixture
def pair() -> Iterator[MakePair]:
    """Makes connected sockets: (sender, receiver)."""
    context = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(name: str) -> Pair:
        sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        made.extend((sender, receiver))
        receiver.bind(f"inproc://{name}")
        sender.connect(f"inproc://{name}")
        return sender, receiver

    yield make
    for each in made:
        each.close(0)
    context.term()


@pytest.fixture
def readiness() -> Iterator[Readiness[str]]:
    made: Readiness[str] = Readiness()
    yield made
    made.close()


def read_all(receiver: zmq.Socket[bytes]) -> list[bytes]:
    messages = []
    with suppress(zmq.Again):
        while True:
            messages.append(receiver.recv(zmq.NOBLOCK))
    return messages


def read_until_quiet(readiness: Readiness[str], *receivers: zmq.Socket[bytes]) -> None:
    while readiness.wait(0):
        for receiver in receivers:
            read_all(receiver)


def test_only_owners_with_something_to_read(pair: MakePair, readiness: Readiness[str]) -> None:
    pairs = {name: pair(name) for name in ("a", "b", "c")}
    for name, (_, receiver) in pairs.items():
        readiness.watch(receiver, name)
    assert readiness.wait(0) == {"a", "b", "c"}  # new sockets may have messages already
    read_until_quiet(readiness, *(receiver for _, receiver in pairs.values()))
    pairs["b"][0].send(b"1")
    assert readiness.wait(PATIENCE_MS) == {"b"}
    assert read_all(pairs["b"][1]) == [b"1"]
    read_until_quiet(readiness, pairs["b"][1])
    assert readiness.wait(0) == set()


def test_messages_left_unread_need_to_be_named(pair: MakePair, readiness: Readiness[str]) -> None:
    sender, receiver = pair("a")
    readiness.watch(receiver, "a")
    read_until_quiet(readiness, receiver)
    sender.send(b"1")
    sender.send(b"2")
    assert readiness.wait(PATIENCE_MS) == {"a"}
    assert receiver.recv(zmq.NOBLOCK) == b"1"
    readiness.again("a")
    assert readiness.wait(0) == {"a"}
    assert receiver.recv(zmq.NOBLOCK) == b"2"
    readiness.again("a")
    readiness.drop("a")
    read_until_quiet(readiness, receiver)
    assert readiness.wait(0) == set()


def test_a_forgotten_socket_wakes_nobody(pair: MakePair, readiness: Readiness[str]) -> None:
    sender, receiver = pair("a")
    readiness.watch(receiver, "a")
    read_until_quiet(readiness, receiver)
    readiness.forget(receiver)
    readiness.forget(receiver)
    sender.send(b"1")
    assert readiness.wait(0) == set()


def test_plain_descriptors(readiness: Readiness[str]) -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        readiness.watch_descriptor(receiver.fileno(), "wake-up")
        assert readiness.wait(0) == set()
        sender.send(b"x")
        assert readiness.wait(PATIENCE_MS) == {"wake-up"}
        assert readiness.wait(0) == {"wake-up"}  # until it is read
