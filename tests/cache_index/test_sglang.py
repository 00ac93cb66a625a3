"""SGLang: recorded events against a plain model, its load feed over real sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zmq
from plain_publisher import PlainPublisher
from recordings import frames_of, recorded_lines
from waiting import wait_for

from cache_index import (
    CacheIndex,
    Holder,
    MalformedEventError,
    Namespace,
    StreamConfig,
    StreamIngest,
    Tier,
    VllmEventSource,
    decode_batch,
    sequence_hashes,
)
from cache_index.hashing import fold_extra_keys
from cache_index.sglang_load import LoadStat, SglangLoadFeeds, decode_load

HOLDER = Holder("sglang")
PAGE = 16
NAMESPACE = Namespace("tiny", PAGE)
MEDIA = {"GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST}
STREAMS = ["SG_page16", "SG_salt", "SG_hicache", "SG_hicache2"]


def recorded(label: str) -> list[tuple[list[bytes], Any]]:
    records = recorded_lines("sglang_kv_events.jsonl")
    return [(frames_of(record), record["decoded"]) for record in records if record["label"] == label]


class Model:
    """Residencies by the decoded form, hashed with another library: every store adds a copy."""

    def __init__(self) -> None:
        self.chain: dict[int, int] = {}  # SGLang's hash -> sequence hash
        self.copies: Counter[tuple[int, Tier]] = Counter()

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
            return
        tier = MEDIA[event["medium"]]
        if event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.copies[self.chain[name], tier] -= 1
            return
        parent = event["parent_block_hash"]
        previous = None if parent is None else self.chain[parent]
        for i, name in enumerate(event["block_hashes"]):
            tokens = np.array(event["token_ids"][i * PAGE : (i + 1) * PAGE], "<u4").tobytes()
            local = xxhash.xxh3_64_intdigest(tokens, 1337)
            if previous is None and event.get("cache_salt"):
                folded = local.to_bytes(8, "little") + self._salt(event["cache_salt"])
                local = xxhash.xxh3_64_intdigest(folded, 1337)
            if previous is not None:
                joined = previous.to_bytes(8, "little") + local.to_bytes(8, "little")
                local = xxhash.xxh3_64_intdigest(joined, 1337)
            previous = self.chain[name] = local
            self.copies[local, tier] += 1

    def _salt(self, salt: str) -> bytes:
        return fold_extra_keys([salt]).to_bytes(8, "little")

    def residencies(self) -> set[tuple[int, Tier]]:
        return {(h ^ NAMESPACE.domain, tier) for (h, tier), copies in self.copies.items() if copies > 0}


@pytest.mark.parametrize("label", STREAMS)
def test_recorded_frames_give_the_residencies_of_their_decoded_form(label: str) -> None:
    index, model = CacheIndex(), Model()
    index.register(HOLDER)
    ingest = StreamIngest(index, HOLDER, "tiny")
    for frames, decoded in recorded(label):
        ingest.apply(decode_batch(frames[-1]))
        for event in decoded[1]:
            model.apply(event)
        assert index.residencies(HOLDER) == model.residencies()
    counters = ingest.counters
    assert (counters.malformed_events, counters.unknown_events, counters.unresolved_blocks) == (0, 0, 0)


@pytest.mark.parametrize("label", STREAMS)
def test_recorded_frames_through_a_socket(label: str) -> None:
    batches, model = recorded(label), Model()
    for _, decoded in batches:
        for event in decoded[1]:
            model.apply(event)
    context = zmq.Context()
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    index = CacheIndex()
    source = VllmEventSource(index)
    try:
        port, replay_port = (s.bind_to_random_port("tcp://127.0.0.1") for s in (publisher, router))
        source.start()
        endpoint, replay_endpoint = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
        source.add_stream(StreamConfig(HOLDER, "tiny", endpoint, replay_endpoint, topic="kv-events"))
        assert router.poll(20_000)
        identity = router.recv_multipart()[0]
        for frames, _ in batches:
            router.send_multipart([identity, b"", *frames])
        router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])
        wait_for(lambda: source.stream_stats()[0].batches == len(batches))
        assert index.residencies(HOLDER) == model.residencies()
    finally:
        source.close()
        context.destroy(0)


def test_a_salted_prompt_is_found_under_its_salt_only() -> None:
    index = CacheIndex()
    index.register(HOLDER)
    ingest = StreamIngest(index, HOLDER, "tiny")
    frames, decoded = recorded("SG_salt")[1]
    ingest.apply(decode_batch(frames[-1]))
    tokens = np.array(decoded[1][0]["token_ids"], np.uint32)
    for salt, pages in (("A", 3), ("B", 0), (None, 0)):
        assert index.match(NAMESPACE, sequence_hashes(tokens, PAGE, cache_salt=salt))[0, 0] == pages


def test_extra_keys_are_not_published_so_the_same_pages_come_twice() -> None:
    """Pages of requests with ``extra_key`` have the names of those without, one physical copy each.

    Whose copy is evicted cannot be told, so pages stay until the last is gone; and a prompt that is cached
    under some key only looks cached for everybody.
    """
    index, copies = CacheIndex(), Counter[int]()
    index.register(HOLDER)
    ingest = StreamIngest(index, HOLDER, "tiny")
    twice: set[int] = set()
    for frames, decoded in recorded("SG_page16")[:9]:
        ingest.apply(decode_batch(frames[-1]))
        for event in decoded[1]:
            sign = 1 if event["type"] == "BlockStored" else -1
            copies.update(dict.fromkeys(event["block_hashes"], sign))
            twice.update(name for name, count in copies.items() if count > 1)
    assert len(twice) == 4
    assert len(index.residencies(HOLDER)) == sum(count > 0 for count in copies.values())


def test_recorded_loads_are_read() -> None:
    stats = [decode_load(frames[-1]) for frames, _ in recorded("SG_load")]
    assert [list(decoded[1:]) for _, decoded in recorded("SG_load")] == [
        [getattr(stat, field) for field in LoadStat.__slots__] for stat in stats
    ]
    first, last = stats[0], stats[-1]
    assert (first.kv_token_capacity, first.kv_usage) == (3200, 0.0)
    speed = last.prefill_tokens_per_s(first)
    assert speed == pytest.approx(4510 / 0.149593)
    assert first.prefill_tokens_per_s(last) is None
    assert last.prefill_tokens_per_s(last) is None


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (b"\xc1", "payload"),
        (["Other", 1], "payload"),
        ({}, "payload"),
        (["LoadStat", 1, 2, 3], "kv_token_capacity"),
        (["LoadStat", 1, 2, 3, 4, 0, 6, 7, 8, 9], "prefill_busy_us"),
        (["LoadStat", 1, "2", 3, 4, 0, 6, 7, 8, 9, 10], "waiting"),
        (["LoadStat", 1, 2, 3, 4, -1, 6, 7, 8, 9, 10], "rank"),
        (["LoadStat", True, 2, 3, 4, 0, 6, 7, 8, 9, 10], "running"),
    ],
)
def test_a_malformed_load_names_its_field(value: Any, field: str) -> None:
    payload = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    with pytest.raises(MalformedEventError) as caught:
        decode_load(payload)
    assert caught.value.field == field


def test_later_fields_are_ignored_and_no_capacity_is_no_usage() -> None:
    stat = decode_load(msgspec.msgpack.encode(["LoadStat", 1, 2, 3, 0, 1, 6, 7, 8, 9, 10, "new"]))
    assert (stat.rank, stat.prefill_busy_us, stat.kv_usage) == (1, 10, 0.0)


class LoadPublisher(PlainPublisher):
    _sequence = 0

    def publish(self, running: int, rank: int = 0) -> None:
        payload = msgspec.msgpack.encode(["LoadStat", running, 0, 0, 100, rank, 0, 0, 8, 0, 0])
        self.send_frames(b"load", self._sequence.to_bytes(8, "big"), payload)
        self._sequence += 1


@pytest.fixture
def publishers() -> Iterator[list[LoadPublisher]]:
    made = [LoadPublisher(), LoadPublisher()]
    yield made
    for each in made:
        each.close()


class Loads:
    """Feeds whose latest reports are kept."""

    def __init__(self) -> None:
        self.latest: dict[Holder, LoadStat] = {}
        self.feeds = SglangLoadFeeds(self._deliver)
        self.feeds.start()

    def _deliver(self, holder: Holder, stat: LoadStat) -> None:
        if stat.running == 13:
            raise RuntimeError("a fault of the receiver")
        self.latest[holder] = stat

    def running(self, holder: Holder) -> int | None:
        stat = self.latest.get(holder)
        return None if stat is None else stat.running


@pytest.fixture
def loads() -> Iterator[Loads]:
    made = Loads()
    yield made
    made.feeds.close()
    made.feeds.close()


def test_loads_of_many_ranks_are_delivered(loads: Loads, publishers: list[LoadPublisher]) -> None:
    ranks = [Holder("a", 0), Holder("a", 1)]
    for rank, (holder, publisher) in enumerate(zip(ranks, publishers, strict=True)):
        loads.feeds.follow(holder, publisher.endpoint)
        wait_for(lambda h=holder, p=publisher, r=rank: [p.publish(5, r), loads.running(h)][1] == 5)
    publishers[1].publish(6, 1)
    wait_for(lambda: loads.running(ranks[1]) == 6)
    assert loads.running(ranks[0]) == 5


def test_bad_messages_and_faults_stop_no_feed(loads: Loads, publishers: list[LoadPublisher]) -> None:
    holder, publisher = Holder("a"), publishers[0]
    loads.feeds.follow(holder, publisher.endpoint)
    wait_for(lambda: [publisher.publish(1), loads.running(holder)][1] == 1)
    publisher.send_frames(b"load")
    publisher.send_frames(b"load", b"short", b"payload")
    publisher.send_frames(b"load", b"12345678", b"\xc1")
    publisher.send_frames(b"other", b"12345678", b"\xc1")
    publisher.publish(13)
    publisher.publish(2)
    wait_for(lambda: loads.running(holder) == 2)
    assert loads.feeds.malformed == 3


def test_a_feed_survives_a_restart_and_ends_when_it_is_dropped(loads: Loads) -> None:
    holder, old = Holder("a"), LoadPublisher()
    loads.feeds.follow(holder, old.endpoint)
    wait_for(lambda: [old.publish(1), loads.running(holder)][1] == 1)
    old.close()
    new = LoadPublisher(old.endpoint)
    try:
        wait_for(lambda: [new.publish(2), loads.running(holder)][1] == 2)
        loads.feeds.unfollow(holder)
        loads.feeds.unfollow(holder)
        other = LoadPublisher()
        try:
            loads.feeds.follow(Holder("b"), other.endpoint)
            new.publish(3)
            wait_for(lambda: [other.publish(4), loads.running(Holder("b"))][1] == 4)
        finally:
            other.close()
        assert loads.running(holder) == 2
    finally:
        new.close()


def test_a_bad_endpoint_is_no_end_of_the_thread(loads: Loads, publishers: list[LoadPublisher]) -> None:
    loads.feeds.follow(Holder("bad"), "nonsense")
    loads.feeds.follow(Holder("a"), publishers[0].endpoint)
    wait_for(lambda: [publishers[0].publish(1), loads.running(Holder("a"))][1] == 1)


def test_never_started_feeds_can_be_closed() -> None:
    feeds = SglangLoadFeeds(lambda holder, stat: None)
    feeds.follow(Holder("a"), "tcp://127.0.0.1:1")
    feeds.close()
