"""Streams over real sockets, from a publisher that behaves like an engine's."""

from __future__ import annotations

import dataclasses
import resource
import socket
import threading
from typing import Any

import pytest
from engine_feed import HOLDER, Feed, Make, stored
from waiting import wait_for

from cache_index import CacheIndex, Holder, StreamConfig, StreamIngest, VllmEventSource, replay, zmq_source


def test_joining_late_catches_up_by_replay(feed: Feed, engines: Make) -> None:
    engine = engines()
    for number in range(5):
        engine.publish(stored(100 + number, number, 99 + number if number else None))
    feed.follow(engine)
    wait_for(
        lambda: feed.blocks(0, 1, 2, 3, 4) == 5
    )  # the last ones may not have been published when it asked
    assert feed.stats().state == "warm"
    assert feed.stats().last_seq == 4
    engine.publish(stored(105, 5, 104))
    wait_for(lambda: feed.blocks(0, 1, 2, 3, 4, 5) == 6)
    assert feed.stats().last_event_at_s is not None
    assert engine.requests.count(0) == 1


def test_a_gap_is_closed_by_replay(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    feed.follow(engine)
    engine.publish(stored(101, 1, 100), lost=True)
    engine.publish(stored(102, 2, 101))
    wait_for(lambda: feed.blocks(0, 1, 2) == 3)
    stats = feed.stats()
    assert (stats.state, stats.gaps, stats.replays, stats.batches) == ("warm", 1, 2, 3)


def test_a_gap_that_cannot_be_closed_clears_and_is_cold(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    feed.follow(engine)
    assert feed.blocks(0) == 1
    engine.publish(lost=True)
    engine.first_kept = 2
    engine.publish(stored(200, 7))
    wait_for(lambda: feed.blocks(7) == 1)
    assert feed.blocks(0) == 0
    assert (feed.stats().state, feed.stats().gaps) == ("cold", 1)


def test_without_replay_endpoint_a_gap_clears(feed: Feed, engines: Make) -> None:
    engine = engines(replayable=False)
    feed.follow(engine)
    wait_for(
        lambda: [engine.publish(stored(1, 1)), feed.blocks(1)][1] == 1
    )  # until the subscription is there
    engine.publish(lost=True)
    engine.publish(stored(2, 2))
    wait_for(lambda: feed.blocks(2) == 1)
    assert feed.blocks(1) == 0
    assert feed.stats().state == "cold"


def test_a_restarted_engine_leaves_nothing_stale(feed: Feed, engines: Make) -> None:
    old = engines()
    for number in range(3):
        old.publish(stored(100 + number, number, 99 + number if number else None))
    feed.follow(old)
    wait_for(lambda: feed.blocks(0, 1, 2) == 3)
    old.close()
    wait_for(lambda: feed.stats().state == "connecting")
    new = engines(like=old)
    new.publish(stored(300, 8))
    wait_for(lambda: feed.blocks(8) == 1)
    assert feed.blocks(0) == 0
    wait_for(lambda: feed.stats().state == "warm")


def test_a_sequence_that_steps_back_is_a_restart(feed: Feed, engines: Make) -> None:
    engine = engines()
    feed.follow(engine)
    for number in range(3):
        engine.publish(stored(100 + number, number, 99 + number if number else None))
    wait_for(lambda: feed.blocks(0, 1, 2) == 3)
    engine.batches.clear()
    engine.publish(stored(300, 8))
    wait_for(lambda: feed.blocks(8) == 1)
    assert feed.blocks(0) == 0
    assert feed.stats().state == "warm"


def test_a_reconnection_asks_for_what_was_missed_though_nothing_follows(feed: Feed, engines: Make) -> None:
    old = engines()
    old.publish(stored(100, 0))
    feed.follow(old)
    old.close()
    wait_for(lambda: feed.stats().state == "connecting")
    again = engines(like=old)  # the same engine behind a broken network: it still has its batches
    again.batches = [*old.batches]
    again.publish(stored(101, 1, 100), lost=True)
    wait_for(lambda: feed.blocks(0, 1) == 2)
    assert feed.stats().state in ("warm", "connecting")


def test_resync_reads_everything_again(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    feed.follow(engine)
    engine.batches = []
    engine.publish(stored(300, 8), lost=True)
    feed.source.resync(HOLDER)
    wait_for(lambda: feed.blocks(8) == 1)
    assert feed.blocks(0) == 0
    assert engine.requests[:2] == [0, 0]


def test_a_dead_replay_endpoint_delays_nobody_else(
    feed: Feed, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "REPLAY_TIMEOUT_S", 0.7)
    stuck, lively = engines(), engines()
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        config = stuck.config()
        dead = StreamConfig(HOLDER, "tiny", config.endpoint, f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        feed.source.add_stream(dead)
        feed.follow(lively, Holder("lively"))
        lively.publish(stored(1, 1))
        wait_for(lambda: feed.blocks(1, holder=Holder("lively")) == 1)
        wait_for(lambda: feed.stats().state == "cold")
    lively.publish(stored(2, 2, 1))
    wait_for(lambda: feed.blocks(1, 2, holder=Holder("lively")) == 2)
    stuck.publish(stored(5, 5))
    wait_for(lambda: feed.blocks(5) == 1)


def test_malformed_frames_are_counted_and_the_stream_goes_on(feed: Feed, engines: Make) -> None:
    engine = engines()
    feed.follow(engine)
    engine.publish(stored(1, 1))
    engine.send_frames(b"kv")
    engine.send_frames(b"kv", b"short", b"payload")
    engine.batches.append(b"\xc1 no msgpack")
    engine.send(1, engine.batches[-1])
    engine.publish(stored(2, 2, 1), {"type": "BlockStored"}, {"type": "Unheard"})
    wait_for(lambda: feed.blocks(1, 2) == 2)
    stats = feed.stats()
    assert (stats.malformed_frames, stats.malformed_events, stats.unknown_events) == (3, 1, 1)
    assert (stats.state, stats.batches, stats.events, stats.gaps) == ("warm", 3, 2, 0)


def test_messages_without_topic_and_of_other_topics(feed: Feed, engines: Make) -> None:
    engine = engines()
    feed.follow(engine)
    engine.publish(stored(1, 1), topic=None)
    wait_for(lambda: feed.blocks(1) == 1)
    feed.source.remove_stream(HOLDER)
    feed.follow(engine, topic="kv@")
    engine.publish(stored(2, 2, 1), topic=b"other")
    engine.publish(stored(3, 3, 2), topic=b"kv@host")
    wait_for(lambda: feed.blocks(1, 2, 3) == 3)


def test_a_removed_stream_leaves_nothing_and_may_come_back(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    feed.follow(engine)
    feed.source.remove_stream(HOLDER)
    assert feed.blocks(1) == 0
    assert feed.source.stream_stats() == []
    engine.publish(stored(2, 2, 1))
    feed.follow(engine)
    assert feed.blocks(1, 2) == 2


def test_an_unregistered_holder_does_not_stop_the_thread(feed: Feed, engines: Make) -> None:
    engine = engines()
    feed.follow(engine)
    feed.index.unregister(HOLDER)
    engine.publish(stored(1, 1))
    wait_for(lambda: feed.stats().batches == 1)
    feed.follow(engine)
    assert feed.blocks(1) == 1


def test_more_messages_than_one_turn_takes(
    feed: Feed, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn leaves messages unread, and nothing new arrives that would tell of them."""
    monkeypatch.setattr(zmq_source, "MESSAGES_PER_TURN", 3)
    busy, calm = engines(), engines()
    for number in range(50):
        busy.publish(stored(100 + number, number, 99 + number if number else None))
    feed.follow(busy)
    feed.follow(calm, Holder("calm"))
    wait_for(lambda: feed.blocks(*range(50)) == 50)
    for number in range(50, 100):
        busy.publish(stored(100 + number, number, 99 + number))
    calm.publish(stored(1, 1))
    wait_for(lambda: feed.blocks(*range(100)) == 100)
    wait_for(lambda: feed.blocks(1, holder=Holder("calm")) == 1)
    assert (feed.stats().batches, feed.stats().events, feed.stats().gaps) == (100, 100, 0)


def test_a_fault_of_ours_puts_one_stream_in_doubt_and_spares_the_others(
    feed: Feed, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = engines(), engines()
    feed.follow(broken)
    feed.follow(sound, Holder("sound"))
    broken.publish(stored(1, 1))
    wait_for(lambda: feed.blocks(1) == 1)
    apply_payloads = StreamIngest.apply_payloads

    def fail(ingest: StreamIngest, payloads: list[bytes]) -> Any:
        if any(b"marked" in payload for payload in payloads):
            raise RuntimeError("a fault")
        return apply_payloads(ingest, payloads)

    monkeypatch.setattr(StreamIngest, "apply_payloads", fail)
    broken.publish({"type": "marked"})
    wait_for(lambda: feed.stats().state == "cold")
    assert feed.blocks(1) == 0
    sound.publish(stored(2, 2))
    wait_for(lambda: feed.blocks(2, holder=Holder("sound")) == 1)
    broken.publish(stored(3, 3))
    wait_for(lambda: feed.blocks(3) == 1)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 8192, reason="too few open files")
def test_hundreds_of_streams(feed: Feed, engines: Make) -> None:
    """More sockets than the library allows by default."""
    engine = engines(replayable=False)
    holders = [Holder("engine", rank) for rank in range(600)]
    for holder in holders:
        feed.source.add_stream(engine.config(holder))
    wait_for(lambda: all(each.state != "connecting" for each in feed.source.stream_stats()))

    def everyone_has_it() -> bool:
        engine.publish(stored(1, 1))  # again, until the last subscription is there
        return min(feed.blocks(1, holder=holder) for holder in holders) == 1

    wait_for(everyone_has_it)


def test_ranks_are_streams_of_their_own(feed: Feed, engines: Make) -> None:
    first, second = engines(), engines()
    feed.follow(first, Holder("engine", 0))
    feed.follow(second, Holder("engine", 1))
    second.publish(stored(1, 1))
    wait_for(lambda: feed.blocks(1, holder=Holder("engine", 1)) == 1)
    assert feed.blocks(1, holder=Holder("engine", 0)) == 0


def test_an_engine_that_is_not_there_yet(feed: Feed, engines: Make) -> None:
    engine = engines()
    config = engine.config()
    engine.close()
    feed.source.add_stream(config)
    assert feed.stats().state == "connecting"
    again = engines(like=engine)
    again.publish(stored(1, 1))
    wait_for(lambda: feed.blocks(1) == 1)


def test_a_bad_endpoint_is_no_end_of_the_thread(feed: Feed, engines: Make) -> None:
    feed.source.add_stream(StreamConfig(Holder("bad"), "tiny", "nonsense", None))
    feed.follow(engines())
    assert feed.stats(Holder("bad")).state == "connecting"


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


def test_a_cold_stream_is_warm_again_when_its_engine_has_cleared_its_cache(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    engine.publish(stored(2, 2))
    engine.first_kept = 1
    feed.follow(engine)
    assert (feed.stats().state, feed.blocks(2)) == ("cold", 1)
    engine.publish({"type": "AllBlocksCleared"}, stored(3, 3))
    wait_for(lambda: feed.blocks(3) == 1)
    assert feed.blocks(2) == 0
    wait_for(lambda: feed.stats().state == "warm")


def test_a_bad_endpoint_stays_without_effect_when_it_is_asked_again(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    replay_endpoint = engine.config().replay_endpoint
    feed.source.add_stream(StreamConfig(Holder("bad"), "tiny", "nonsense", replay_endpoint))
    feed.source.resync(Holder("bad"))
    feed.follow(engine)
    assert engine.requests == [0]
    assert feed.stats(Holder("bad")).state == "connecting"


def test_a_bad_replay_endpoint_makes_a_stream_cold(feed: Feed, engines: Make) -> None:
    engine = engines()
    feed.source.add_stream(dataclasses.replace(engine.config(), replay_endpoint="nonsense"))
    wait_for(lambda: feed.stats().state == "cold")
    wait_for(lambda: [engine.publish(stored(1, 1)), feed.blocks(1)][1] == 1)


def test_one_stream_remains_of_many_that_are_added_at_once(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    threads = [threading.Thread(target=feed.source.add_stream, args=(engine.config(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: feed.stats().state == "warm")
    engine.publish({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, stored(2, 2))
    wait_for(lambda: feed.blocks(2) == 1)
    assert feed.blocks(1) == 0, "it was stored once"
    assert len(feed.source.stream_stats()) == 1


def test_a_holder_that_comes_back_without_its_stream_is_cold(feed: Feed, engines: Make) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    feed.follow(engine)
    feed.index.unregister(HOLDER)
    engine.publish(stored(2, 2))
    wait_for(lambda: feed.stats().state == "cold")


def test_after_the_end_nothing_is_followed(feed: Feed, engines: Make) -> None:
    engine = engines()
    feed.source.close()
    feed.source.add_stream(engine.config())
    feed.source.remove_stream(HOLDER)
    assert feed.source.stream_stats() == []
