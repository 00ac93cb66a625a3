"""Two streams of one holder over real sockets: what one of them loses, the other still tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from plain_publisher import PlainPublisher
from waiting import wait_for

from cache_index import (
    CacheIndex,
    Holder,
    Namespace,
    StreamConfig,
    StreamIngest,
    Tier,
    VllmEventSource,
    decode_batch,
    sequence_hashes,
)

HOLDER = Holder("engine")
NAMESPACE = Namespace("tiny", 4)


class Publisher(PlainPublisher):
    """A KV event publisher without replay."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 0

    def publish(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.send_frames(b"kv", self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1


def stored(name: int, token: int, medium: str) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [token] * 4,
        "block_size": 4,
        "medium": medium,
    }


class Pair:
    """An engine that tells of its device and a connector that tells of host memory."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.engine, self.connector = Publisher(), Publisher()
        self.source = VllmEventSource(self.index)
        self.source.start()
        self.follow(self.engine, Tier.DEVICE)
        self.follow(self.connector, Tier.HOST, Tier.DISK)
        self.tell(self.engine, 0, stored(1, 1, "GPU"), Tier.DEVICE)
        self.tell(self.connector, 1, stored(1, 1, "cpu"), Tier.HOST)

    def follow(self, publisher: Publisher, *tiers: Tier) -> None:
        spoken_for = frozenset(tiers)
        config = StreamConfig(HOLDER, "tiny", publisher.endpoint, None, topic="kv", tiers=spoken_for)
        self.source.add_stream(config)

    def tell(self, publisher: Publisher, stream: int, event: dict[str, Any], tier: Tier) -> None:
        """Until the subscription is there, what is published is lost."""
        wait_for(lambda: [publisher.publish(event), tier in self.tiers(1)][1])
        settled = publisher.sequence - 1
        wait_for(lambda: self.source.stream_stats()[stream].last_seq == settled)

    def tiers(self, token: int) -> set[Tier]:
        key = int(sequence_hashes(np.full(4, token, np.uint32), 4)[0]) ^ NAMESPACE.domain
        return {tier for held, tier in self.index.residencies(HOLDER) if held == key}

    def close(self) -> None:
        for each in (self.source, self.engine, self.connector):
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
    assert [each.state for each in pair.source.stream_stats()][1] == "cold"


def test_a_clear_of_every_tier_it_speaks_for_makes_a_stream_complete(pair: Pair) -> None:
    pair.engine.sequence += 5
    pair.engine.publish(stored(2, 2, "GPU"))
    wait_for(lambda: pair.tiers(2) == {Tier.DEVICE})
    assert pair.source.stream_stats()[0].state == "cold"
    pair.engine.publish({"type": "AllBlocksCleared", "medium": "cpu"})
    pair.engine.publish(stored(3, 3, "GPU"))
    wait_for(lambda: pair.tiers(3) == {Tier.DEVICE})
    assert pair.source.stream_stats()[0].state == "cold"
    pair.engine.publish({"type": "AllBlocksCleared", "medium": "gpu"})
    wait_for(lambda: pair.source.stream_stats()[0].state == "warm")
    assert pair.tiers(2) == pair.tiers(3) == set()
    assert pair.tiers(1) == {Tier.HOST}


def test_a_stream_replaces_those_that_speak_for_its_tiers(pair: Pair) -> None:
    pair.follow(pair.engine, Tier.DEVICE, Tier.POD)
    assert pair.tiers(1) == {Tier.HOST}
    assert len(pair.source.stream_stats()) == 2
    pair.source.add_stream(StreamConfig(HOLDER, "tiny", pair.engine.endpoint, None, topic="kv"))
    assert pair.tiers(1) == set()
    assert len(pair.source.stream_stats()) == 1


def test_a_removed_holder_leaves_nothing(pair: Pair) -> None:
    pair.source.remove_stream(HOLDER)
    assert pair.tiers(1) == set()
    assert pair.source.stream_stats() == []


@pytest.mark.parametrize("decoded", [False, True], ids=["compiled", "decoded"])
def test_ingest_clears_its_own_tiers_only(decoded: bool) -> None:
    index = CacheIndex()
    index.register(HOLDER)
    ingest = StreamIngest(index, HOLDER, "tiny", tiers=[Tier.HOST])
    hashes = sequence_hashes(np.full(4, 1, np.uint32), 4)
    for tier in (Tier.DEVICE, Tier.HOST):
        index.store(HOLDER, tier, NAMESPACE, hashes)
    for medium, tiers, clears in (("GPU", 2, 0), (None, 1, 1)):
        payload = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared", "medium": medium}], 0])
        if decoded:
            ingest.apply(decode_batch(payload))
        else:
            ingest.apply_payloads([payload])
        assert (len(index.residencies(HOLDER)), ingest.clears) == (tiers, clears)
    assert {tier for _, tier in index.residencies(HOLDER)} == {Tier.DEVICE}
