"""Two streams of one holder over real sockets: what one of them loses, the other still tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from cache_index import CacheIndex, Holder, Namespace, StreamConfig, Tier, VllmEventSource, sequence_hashes
from cache_index.tier_scope import scoped_index

HOLDER = Holder("engine")
NAMESPACE = Namespace("tiny", 4)


class Publisher:
    """A KV event publisher without replay."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.sequence = 0

    def publish(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self._socket.send_multipart([b"kv", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    def close(self) -> None:
        self._context.destroy(0)


def stored(name: int, token: int, medium: str) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [token] * 4,
        "block_size": 4,
        "medium": medium,
    }


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


class Pair:
    """An engine that tells of its device and a connector that tells of host memory."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.engine, self.connector = Publisher(), Publisher()
        self.device = VllmEventSource(scoped_index(self.index, [Tier.DEVICE]))
        self.host = VllmEventSource(scoped_index(self.index, [Tier.HOST, Tier.DISK]))
        for source, publisher in ((self.device, self.engine), (self.host, self.connector)):
            source.start()
            source.add_stream(StreamConfig(HOLDER, "tiny", publisher.endpoint, None, topic="kv"))
        self.tell(self.engine, stored(1, 1, "GPU"), Tier.DEVICE)
        self.tell(self.connector, stored(1, 1, "cpu"), Tier.HOST)

    def tell(self, publisher: Publisher, event: dict[str, Any], tier: Tier) -> None:
        """Until the subscription is there, what is published is lost."""
        wait_for(lambda: [publisher.publish(event), tier in self.tiers(1)][1])
        settled = publisher.sequence - 1
        source = self.device if publisher is self.engine else self.host
        wait_for(lambda: source.stream_stats()[0].last_seq == settled)

    def tiers(self, token: int) -> set[Tier]:
        key = int(sequence_hashes(np.full(4, token, np.uint32), 4)[0]) ^ NAMESPACE.domain
        return {tier for held, tier in self.index.residencies(HOLDER) if held == key}

    def close(self) -> None:
        for each in (self.device, self.host, self.engine, self.connector):
            each.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_tiers_of_two_streams_add_up(pair: Pair) -> None:
    assert pair.tiers(1) == {Tier.DEVICE, Tier.HOST}
    levels = pair.index.match(NAMESPACE, sequence_hashes(np.full(4, 1, np.uint32), 4))[0]
    assert levels[Tier.DEVICE] == 1


def test_a_clear_of_the_engine_spares_the_host(pair: Pair) -> None:
    pair.engine.publish({"type": "AllBlocksCleared"})
    wait_for(lambda: Tier.DEVICE not in pair.tiers(1))
    assert pair.tiers(1) == {Tier.HOST}


def test_a_gap_of_one_stream_spares_the_other(pair: Pair) -> None:
    pair.connector.sequence += 5
    pair.connector.publish(stored(2, 2, "cpu"))
    wait_for(lambda: pair.tiers(2) == {Tier.HOST})
    assert pair.tiers(1) == {Tier.DEVICE}
    assert pair.host.stream_stats()[0].state == "cold"


def test_a_removed_stream_leaves_the_other(pair: Pair) -> None:
    pair.device.remove_stream(HOLDER)
    assert pair.tiers(1) == {Tier.HOST}
    pair.connector.publish(stored(2, 2, "cpu"))
    wait_for(lambda: pair.tiers(2) == {Tier.HOST})


def test_a_scope_clears_its_own_tiers_only() -> None:
    index = CacheIndex()
    index.register(HOLDER)
    scoped = scoped_index(index, [Tier.HOST])
    hashes = sequence_hashes(np.full(4, 1, np.uint32), 4)
    for tier in (Tier.DEVICE, Tier.HOST):
        scoped.store(HOLDER, tier, NAMESPACE, hashes)
    scoped.clear(HOLDER, Tier.DEVICE)
    assert len(index.residencies(HOLDER)) == 2
    scoped.clear(HOLDER)
    assert {tier for _, tier in index.residencies(HOLDER)} == {Tier.DEVICE}
