"""Streams over real sockets, from a publisher that behaves like an engine's."""

from __future__ import annotations

import dataclasses
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from waiting import wait_for

from cache_index import (
    CacheIndex,
    Holder,
    Namespace,
    StreamConfig,
    StreamIngest,
    StreamStats,
    Tier,
    VllmEventSource,
    load,
    replay,
    save,
    sequence_hashes,
    zmq_source,
)
from cache_index.hashing import Hashes

HOLDER = Holder("engine", 0)
NAMESPACE = Namespace("tiny", 4)


class Engine:
    """PUB socket plus a ROUTER that replays, as vLLM has them; ports may be taken over from another."""

    def __init__(self, *, like: Engine | None = None, replayable: bool = True) -> None:
        self._context = zmq.Context()
        self._publisher = self._socket(zmq.PUB)
        self._port = self._bind(self._publisher, like._port if like else None)
        self._router = self._socket(zmq.ROUTER) if replayable else None
        if self._router is not None:
            self._replay_port = self._bind(self._router, like._replay_port if like else None)
        self.first_kept = 0
        self.batches: list[bytes] = []
        self.requests: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        created = self._context.socket(kind)
        created.setsockopt(zmq.LINGER, 0)
        return created

    def _bind(self, listener: zmq.Socket[bytes], port: int | None) -> int:
        if port is None:
            return listener.bind_to_random_port("tcp://127.0.0.1")
        wait_for(lambda: self._try_bind(listener, port))
        return port

    def _try_bind(self, listener: zmq.Socket[bytes], port: int) -> bool:
        try:
            listener.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError:
            return False
        return True

    def config(self, holder: Holder = HOLDER, **options: Any) -> StreamConfig:
        replay_endpoint = None if self._router is None else f"tcp://127.0.0.1:{self._replay_port}"
        return StreamConfig(holder, "tiny", f"tcp://127.0.0.1:{self._port}", replay_endpoint, **options)

    def publish(self, *events: dict[str, Any], lost: bool = False, topic: bytes | None = b"kv") -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.batches.append(payload)
        if not lost:
            self.send(len(self.batches) - 1, payload, topic)

    def send(self, sequence: int, payload: bytes, topic: bytes | None = b"kv") -> None:
        frames = [sequence.to_bytes(8, "big"), payload]
        self._publisher.send_multipart(frames if topic is None else [topic, *frames])

    def send_frames(self, *frames: bytes) -> None:
        self._publisher.send_multipart(list(frames))

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._router is None or not self._router.poll(20):
                self._stop.wait(0.01)
                continue
            identity, empty, first = self._router.recv_multipart()
            assert empty == b""
            self.requests.append(int.from_bytes(first, "big"))
            for sequence in range(max(self.requests[-1], self.first_kept), len(self.batches)):
                answer = [identity, b"", b"kv", sequence.to_bytes(8, "big"), self.batches[sequence]]
                self._router.send_multipart(answer)
            self._router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(0)


def stored(engine_hash: int, token: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash],
        "parent_block_hash": parent,
        "token_ids": [token] * 4,
        "block_size": 4,
        "medium": "GPU",
    }


def hashes_of(*tokens: int) -> Hashes:
    return sequence_hashes(np.repeat(np.array(tokens, np.uint32), 4), 4)


class Setup:
    """An index fed by a source."""

    def __init__(self, index: CacheIndex | None = None) -> None:
        self.index = CacheIndex() if index is None else index
        self.source = VllmEventSource(self.index)
        self.source.start()

    def stats(self, holder: Holder = HOLDER) -> StreamStats:
        return next(each for each in self.source.stream_stats() if each.holder == holder)

    def blocks(self, *tokens: int, holder: Holder = HOLDER) -> int:
        """Matched prefix of a prompt that repeats each token for a block."""
        row = self.index.holder_id(holder)
        assert row is not None
        return int(self.index.match(NAMESPACE, hashes_of(*tokens))[row, 0])

    def follow(self, engine: Engine, holder: Holder = HOLDER, **options: Any) -> None:
        self.source.add_stream(engine.config(holder, **options))
        wait_for(lambda: self.stats(holder).state != "connecting")


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.source.close()


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


Make = Callable[..., Engine]


def test_joining_late_catches_up_by_replay(setup: Setup, engines: Make) -> None:
    engine = engines()
    for number in range(5):
        engine.publish(stored(100 + number, number, 99 + number if number else None))
    setup.follow(engine)
    assert setup.blocks(0, 1, 2, 3, 4) == 5
    assert setup.stats().state == "warm"
    assert setup.stats().last_seq == 4
    engine.publish(stored(105, 5, 104))
    wait_for(lambda: setup.blocks(0, 1, 2, 3, 4, 5) == 6)
    assert setup.stats().last_event_at_s is not None
    assert engine.requests == [0]


def test_a_gap_is_closed_by_replay(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    setup.follow(engine)
    engine.publish(stored(101, 1, 100), lost=True)
    engine.publish(stored(102, 2, 101))
    wait_for(lambda: setup.blocks(0, 1, 2) == 3)
    stats = setup.stats()
    assert (stats.state, stats.gaps, stats.replays, stats.batches) == ("warm", 1, 2, 3)


def test_a_gap_that_cannot_be_closed_clears_and_is_cold(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    setup.follow(engine)
    assert setup.blocks(0) == 1
    engine.publish(lost=True)
    engine.first_kept = 2
    engine.publish(stored(200, 7))
    wait_for(lambda: setup.blocks(7) == 1)
    assert setup.blocks(0) == 0
    assert (setup.stats().state, setup.stats().gaps) == ("cold", 1)


def test_without_replay_endpoint_a_gap_clears(setup: Setup, engines: Make) -> None:
    engine = engines(replayable=False)
    setup.follow(engine)
    wait_for(
        lambda: [engine.publish(stored(1, 1)), setup.blocks(1)][1] == 1
    )  # until the subscription is there
    engine.publish(lost=True)
    engine.publish(stored(2, 2))
    wait_for(lambda: setup.blocks(2) == 1)
    assert setup.blocks(1) == 0
    assert setup.stats().state == "cold"


def test_a_restarted_engine_leaves_nothing_stale(setup: Setup, engines: Make) -> None:
    old = engines()
    for number in range(3):
        old.publish(stored(100 + number, number, 99 + number if number else None))
    setup.follow(old)
    assert setup.blocks(0, 1, 2) == 3
    old.close()
    wait_for(lambda: setup.stats().state == "connecting")
    new = engines(like=old)
    new.publish(stored(300, 8))
    wait_for(lambda: setup.blocks(8) == 1)
    assert setup.blocks(0) == 0
    wait_for(lambda: setup.stats().state == "warm")


def test_a_sequence_that_steps_back_is_a_restart(setup: Setup, engines: Make) -> None:
    engine = engines()
    setup.follow(engine)
    for number in range(3):
        engine.publish(stored(100 + number, number, 99 + number if number else None))
    wait_for(lambda: setup.blocks(0, 1, 2) == 3)
    engine.batches.clear()
    engine.publish(stored(300, 8))
    wait_for(lambda: setup.blocks(8) == 1)
    assert setup.blocks(0) == 0
    assert setup.stats().state == "warm"


def test_a_reconnection_asks_for_what_was_missed_though_nothing_follows(setup: Setup, engines: Make) -> None:
    old = engines()
    old.publish(stored(100, 0))
    setup.follow(old)
    old.close()
    wait_for(lambda: setup.stats().state == "connecting")
    again = engines(like=old)  # the same engine behind a broken network: it still has its batches
    again.batches = [*old.batches]
    again.publish(stored(101, 1, 100), lost=True)
    wait_for(lambda: setup.blocks(0, 1) == 2)
    assert setup.stats().state in ("warm", "connecting")


def test_resync_reads_everything_again(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    setup.follow(engine)
    engine.batches = []
    engine.publish(stored(300, 8), lost=True)
    setup.source.resync(HOLDER)
    wait_for(lambda: setup.blocks(8) == 1)
    assert setup.blocks(0) == 0
    assert engine.requests == [0, 0]


def test_a_dead_replay_endpoint_delays_nobody_else(
    setup: Setup, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "REPLAY_TIMEOUT_S", 0.7)
    stuck, lively = engines(), engines()
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        config = stuck.config()
        dead = StreamConfig(HOLDER, "tiny", config.endpoint, f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        setup.source.add_stream(dead)
        setup.follow(lively, Holder("lively"))
        lively.publish(stored(1, 1))
        wait_for(lambda: setup.blocks(1, holder=Holder("lively")) == 1)
        wait_for(lambda: setup.stats().state == "cold")
    lively.publish(stored(2, 2, 1))
    wait_for(lambda: setup.blocks(1, 2, holder=Holder("lively")) == 2)
    stuck.publish(stored(5, 5))
    wait_for(lambda: setup.blocks(5) == 1)


def test_malformed_frames_are_counted_and_the_stream_goes_on(setup: Setup, engines: Make) -> None:
    engine = engines()
    setup.follow(engine)
    engine.publish(stored(1, 1))
    engine.send_frames(b"kv")
    engine.send_frames(b"kv", b"short", b"payload")
    engine.batches.append(b"\xc1 no msgpack")
    engine.send(1, engine.batches[-1])
    engine.publish(stored(2, 2, 1), {"type": "BlockStored"}, {"type": "Unheard"})
    wait_for(lambda: setup.blocks(1, 2) == 2)
    stats = setup.stats()
    assert (stats.malformed_frames, stats.malformed_events, stats.unknown_events) == (3, 1, 1)
    assert (stats.state, stats.batches, stats.events, stats.gaps) == ("warm", 3, 2, 0)


def test_messages_without_topic_and_of_other_topics(setup: Setup, engines: Make) -> None:
    engine = engines()
    setup.follow(engine)
    engine.publish(stored(1, 1), topic=None)
    wait_for(lambda: setup.blocks(1) == 1)
    setup.source.remove_stream(HOLDER)
    setup.follow(engine, topic="kv@")
    engine.publish(stored(2, 2, 1), topic=b"other")
    engine.publish(stored(3, 3, 2), topic=b"kv@host")
    wait_for(lambda: setup.blocks(1, 2, 3) == 3)


def test_a_removed_stream_leaves_nothing_and_may_come_back(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    setup.follow(engine)
    setup.source.remove_stream(HOLDER)
    assert setup.blocks(1) == 0
    assert setup.source.stream_stats() == []
    engine.publish(stored(2, 2, 1))
    setup.follow(engine)
    assert setup.blocks(1, 2) == 2


def test_an_unregistered_holder_does_not_stop_the_thread(setup: Setup, engines: Make) -> None:
    engine = engines()
    setup.follow(engine)
    setup.index.unregister(HOLDER)
    engine.publish(stored(1, 1))
    wait_for(lambda: setup.stats().batches == 1)
    setup.follow(engine)
    assert setup.blocks(1) == 1


def test_more_messages_than_one_turn_takes(
    setup: Setup, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn leaves messages unread, and nothing new arrives that would tell of them."""
    monkeypatch.setattr(zmq_source, "MESSAGES_PER_TURN", 3)
    busy, calm = engines(), engines()
    for number in range(50):
        busy.publish(stored(100 + number, number, 99 + number if number else None))
    setup.follow(busy)
    setup.follow(calm, Holder("calm"))
    assert setup.blocks(*range(50)) == 50
    for number in range(50, 100):
        busy.publish(stored(100 + number, number, 99 + number))
    calm.publish(stored(1, 1))
    wait_for(lambda: setup.blocks(*range(100)) == 100)
    wait_for(lambda: setup.blocks(1, holder=Holder("calm")) == 1)
    assert (setup.stats().batches, setup.stats().events, setup.stats().gaps) == (100, 100, 0)


def test_a_fault_of_ours_puts_one_stream_in_doubt_and_spares_the_others(
    setup: Setup, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = engines(), engines()
    setup.follow(broken)
    setup.follow(sound, Holder("sound"))
    broken.publish(stored(1, 1))
    wait_for(lambda: setup.blocks(1) == 1)
    apply_payloads = StreamIngest.apply_payloads

    def fail(ingest: StreamIngest, payloads: list[bytes]) -> Any:
        if any(b"marked" in payload for payload in payloads):
            raise RuntimeError("a fault")
        return apply_payloads(ingest, payloads)

    monkeypatch.setattr(StreamIngest, "apply_payloads", fail)
    broken.publish({"type": "marked"})
    wait_for(lambda: setup.stats().state == "cold")
    assert setup.blocks(1) == 0
    sound.publish(stored(2, 2))
    wait_for(lambda: setup.blocks(2, holder=Holder("sound")) == 1)
    broken.publish(stored(3, 3))
    wait_for(lambda: setup.blocks(3) == 1)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 8192, reason="too few open files")
def test_hundreds_of_streams(setup: Setup, engines: Make) -> None:
    """More sockets than the library allows by default."""
    engine = engines(replayable=False)
    holders = [Holder("engine", rank) for rank in range(600)]
    for holder in holders:
        setup.source.add_stream(engine.config(holder))
    wait_for(lambda: all(each.state != "connecting" for each in setup.source.stream_stats()))

    def everyone_has_it() -> bool:
        engine.publish(stored(1, 1))  # again, until the last subscription is there
        return min(setup.blocks(1, holder=holder) for holder in holders) == 1

    wait_for(everyone_has_it)


def test_ranks_are_streams_of_their_own(setup: Setup, engines: Make) -> None:
    first, second = engines(), engines()
    setup.follow(first, Holder("engine", 0))
    setup.follow(second, Holder("engine", 1))
    second.publish(stored(1, 1))
    wait_for(lambda: setup.blocks(1, holder=Holder("engine", 1)) == 1)
    assert setup.blocks(1, holder=Holder("engine", 0)) == 0


def test_an_engine_that_is_not_there_yet(setup: Setup, engines: Make) -> None:
    engine = engines()
    config = engine.config()
    engine.close()
    setup.source.add_stream(config)
    assert setup.stats().state == "connecting"
    again = engines(like=engine)
    again.publish(stored(1, 1))
    wait_for(lambda: setup.blocks(1) == 1)


def test_a_bad_endpoint_is_no_end_of_the_thread(setup: Setup, engines: Make) -> None:
    setup.source.add_stream(StreamConfig(Holder("bad"), "tiny", "nonsense", None))
    setup.follow(engines())
    assert setup.stats(Holder("bad")).state == "connecting"


def test_streams_may_be_added_before_the_start_and_close_is_idempotent(engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    index = CacheIndex()
    source = VllmEventSource(index)
    source.add_stream(engine.config())
    assert source.stream_stats()[0].state == "connecting"
    source.start()
    wait_for(lambda: source.stream_stats()[0].state == "warm")
    source.close()
    source.close()
    never_started = VllmEventSource(index)
    never_started.close()


def stop(setup: Setup, path: Path) -> None:
    """What a process does at its end."""
    setup.source.close()
    save(setup.index, path, setup.source.paused)


def start_again(path: Path) -> Setup:
    """What a later process does at its start."""
    loaded = load(path)
    made = Setup(loaded.index)
    made.source.resume(loaded.positions)
    return made


@pytest.fixture
def restarted(setup: Setup, tmp_path: Path) -> Iterator[Callable[[], Setup]]:
    made: list[Setup] = []

    def restart() -> Setup:
        stop(made[-1] if made else setup, tmp_path / "index")
        made.append(start_again(tmp_path / "index"))
        return made[-1]

    yield restart
    for each in made:
        each.source.close()


Restart = Callable[[], Setup]


def test_a_later_process_goes_on_exactly_where_the_earlier_stopped(
    setup: Setup, engines: Make, restarted: Restart
) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    engine.publish(stored(100, 0))  # a second copy
    engine.publish(stored(101, 1, 100))
    setup.follow(engine)
    later = restarted()
    engine.publish(stored(102, 2, 101))
    later.follow(engine)
    assert later.blocks(0, 1, 2) == 3
    assert (later.stats().state, later.stats().batches, later.stats().last_seq) == ("warm", 1, 3)
    assert engine.requests == [0, 2]
    engine.publish({"type": "BlockRemoved", "block_hashes": [100], "medium": "GPU"})
    engine.publish(stored(103, 3, 102))
    wait_for(lambda: later.blocks(0, 1, 2, 3) == 4)
    engine.publish({"type": "BlockRemoved", "block_hashes": [100], "medium": "GPU"})
    wait_for(lambda: later.blocks(0) == 0)
    again = restarted()
    again.follow(engine)
    assert again.blocks(0) == 0
    engine.publish(stored(100, 0))
    wait_for(lambda: again.blocks(0, 1, 2, 3) == 4)
    assert again.stats().unresolved_blocks == 0


@pytest.mark.parametrize("published", [0, 1, 2, 5])
def test_an_engine_that_restarted_meanwhile_has_only_its_new_content(
    setup: Setup, engines: Make, restarted: Restart, published: int
) -> None:
    old = engines()
    old.publish(stored(100, 0))
    old.publish(stored(101, 1, 100))
    setup.follow(old)
    later = restarted()
    assert later.blocks(0, 1) == 2
    old.close()
    new = engines(like=old)
    for number in range(published):
        new.publish(stored(200 + number, 50 + number, 199 + number if number else None))
    later.follow(new)
    assert later.blocks(0) == 0
    assert later.blocks(*range(50, 50 + published or 51)) == published
    wait_for(lambda: later.stats().state == "warm")


def test_an_engine_that_cannot_replay_begins_empty(setup: Setup, engines: Make, restarted: Restart) -> None:
    engine = engines(replayable=False)
    setup.follow(engine)
    wait_for(lambda: [engine.publish(stored(1, 1)), setup.blocks(1)][1] == 1)
    later = restarted()
    with later.source.paused() as positions:
        assert positions == []
    later.follow(engine)
    assert later.stats().state == "cold"


def test_a_stream_that_means_something_else_begins_anew(
    setup: Setup, engines: Make, restarted: Restart
) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    setup.follow(engine)
    later = restarted()
    later.follow(engine, tenant="other")
    assert later.blocks(1) == 0
    assert later.stats().state == "warm"
    assert engine.requests == [0, 0]


@pytest.mark.parametrize("added", [False, True], ids=["never added", "added without its engine"])
def test_what_no_engine_confirms_in_time_is_forgotten(
    setup: Setup, engines: Make, restarted: Restart, monkeypatch: pytest.MonkeyPatch, added: bool
) -> None:
    monkeypatch.setattr(zmq_source, "RESUME_WITHIN_S", 0.3)
    engine = engines()
    engine.publish(stored(1, 1))
    setup.follow(engine)
    config = engine.config()
    engine.close()
    later = restarted()
    assert later.blocks(1) == 1
    with later.source.paused() as positions:
        assert [each.config for each in positions] == [config]
    if added:
        later.source.add_stream(config)
    wait_for(lambda: later.blocks(1) == 0)
    with later.source.paused() as positions:
        assert positions == []


@pytest.mark.parametrize("forget", ["remove_stream", "resync"])
def test_what_is_forgotten_is_not_resumed(
    setup: Setup, engines: Make, restarted: Restart, forget: str
) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    setup.follow(engine)
    later = restarted()
    getattr(later.source, forget)(HOLDER)
    assert later.blocks(1) == 0
    later.follow(engine)
    assert engine.requests == [0, 0]
    assert later.blocks(1) == 1


def test_a_cold_stream_is_warm_again_when_its_engine_has_cleared_its_cache(
    setup: Setup, engines: Make
) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    engine.publish(stored(2, 2))
    engine.first_kept = 1
    setup.follow(engine)
    assert (setup.stats().state, setup.blocks(2)) == ("cold", 1)
    engine.publish({"type": "AllBlocksCleared"}, stored(3, 3))
    wait_for(lambda: setup.blocks(3) == 1)
    assert setup.blocks(2) == 0
    wait_for(lambda: setup.stats().state == "warm")


def test_a_bad_endpoint_stays_without_effect_when_it_is_asked_again(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    replay_endpoint = engine.config().replay_endpoint
    setup.source.add_stream(StreamConfig(Holder("bad"), "tiny", "nonsense", replay_endpoint))
    setup.source.resync(Holder("bad"))
    setup.follow(engine)
    assert engine.requests == [0]
    assert setup.stats(Holder("bad")).state == "connecting"


def test_a_bad_replay_endpoint_makes_a_stream_cold(setup: Setup, engines: Make) -> None:
    engine = engines()
    setup.source.add_stream(dataclasses.replace(engine.config(), replay_endpoint="nonsense"))
    wait_for(lambda: setup.stats().state == "cold")
    wait_for(lambda: [engine.publish(stored(1, 1)), setup.blocks(1)][1] == 1)


def test_one_stream_remains_of_many_that_are_added_at_once(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    threads = [threading.Thread(target=setup.source.add_stream, args=(engine.config(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: setup.stats().state == "warm")
    engine.publish({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, stored(2, 2))
    wait_for(lambda: setup.blocks(2) == 1)
    assert setup.blocks(1) == 0, "it was stored once"
    assert len(setup.source.stream_stats()) == 1


def test_a_holder_that_comes_back_without_its_stream_is_cold(setup: Setup, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    setup.follow(engine)
    setup.index.unregister(HOLDER)
    engine.publish(stored(2, 2))
    wait_for(lambda: setup.stats().state == "cold")


def test_after_the_end_nothing_is_followed(setup: Setup, engines: Make) -> None:
    engine = engines()
    setup.source.close()
    setup.source.add_stream(engine.config())
    setup.source.remove_stream(HOLDER)
    assert setup.source.stream_stats() == []


def test_a_snapshot_of_any_moment_leads_to_the_same_index(
    setup: Setup, engines: Make, tmp_path: Path
) -> None:
    """Saved while batches are applied; blocks are stored several times, and removed as often or less."""
    engine, rng = engines(), np.random.default_rng(3)
    setup.follow(engine)
    saved: list[Path] = []
    copies: Counter[int] = Counter()
    for number in range(1500):
        token = int(rng.integers(40))
        if copies[token] and rng.random() < 0.45:
            copies[token] -= 1
            engine.publish({"type": "BlockRemoved", "block_hashes": [token], "medium": "GPU"})
        elif copies[token] < 3:
            copies[token] += 1
            engine.publish(stored(token, token))
        if number % 250 == 100:
            saved.append(tmp_path / str(number))
            save(setup.index, saved[-1], setup.source.paused)
    last = len(engine.batches) - 1
    wait_for(lambda: setup.stats().last_seq == last)
    held = {token for token, count in copies.items() if count}
    positions = []
    for path in saved:
        later = start_again(path)
        with later.source.paused() as streams:
            positions += [each.position.last_sequence for each in streams]
        later.follow(engine)
        wait_for(lambda later=later: later.stats().last_seq == last)  # type: ignore[misc]
        assert {token for token in range(40) if later.blocks(token)} == held
        later.source.close()
        for token in held:  # as many copies as in the index that saw everything
            for _ in range(copies[token]):
                assert later.blocks(token) == 1
                later.index.remove(HOLDER, Tier.DEVICE, NAMESPACE, hashes_of(token))
            assert later.blocks(token) == 0
    assert len(set(positions)) > 1
