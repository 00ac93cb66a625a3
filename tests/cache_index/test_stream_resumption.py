"""A later process goes on with the streams of an index that an earlier one saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_feed import HOLDER, NAMESPACE, Feed, Make, hashes_of, stored
from waiting import wait_for

from cache_index import Tier, load, save, zmq_source


def stop(feed: Feed, path: Path) -> None:
    """What a process does at its end."""
    feed.source.close()
    save(feed.index, path, feed.source.paused)


def start_again(path: Path) -> Feed:
    """What a later process does at its start."""
    loaded = load(path)
    made = Feed(loaded.index)
    made.source.resume(loaded.positions)
    return made


@pytest.fixture
def restarted(feed: Feed, tmp_path: Path) -> Iterator[Callable[[], Feed]]:
    made: list[Feed] = []

    def restart() -> Feed:
        stop(made[-1] if made else feed, tmp_path / "index")
        made.append(start_again(tmp_path / "index"))
        return made[-1]

    yield restart
    for each in made:
        each.source.close()


Restart = Callable[[], Feed]


def test_a_later_process_goes_on_exactly_where_the_earlier_stopped(
    feed: Feed, engines: Make, restarted: Restart
) -> None:
    engine = engines()
    engine.publish(stored(100, 0))
    engine.publish(stored(100, 0))  # a second copy
    engine.publish(stored(101, 1, 100))
    feed.follow(engine)
    later = restarted()
    engine.publish(stored(102, 2, 101))
    later.follow(engine)
    assert later.blocks(0, 1, 2) == 3
    assert (later.stats().state, later.stats().batches, later.stats().last_seq) == ("warm", 1, 3)
    assert engine.requests[:2] == [0, 2]  # a confirmation may follow
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
    feed: Feed, engines: Make, restarted: Restart, published: int
) -> None:
    old = engines()
    old.publish(stored(100, 0))
    old.publish(stored(101, 1, 100))
    feed.follow(old)
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


def test_an_engine_that_cannot_replay_begins_empty(feed: Feed, engines: Make, restarted: Restart) -> None:
    engine = engines(replayable=False)
    feed.follow(engine)
    wait_for(lambda: [engine.publish(stored(1, 1)), feed.blocks(1)][1] == 1)
    later = restarted()
    with later.source.paused() as positions:
        assert positions == []
    later.follow(engine)
    assert later.stats().state == "cold"


def test_a_stream_that_means_something_else_begins_anew(
    feed: Feed, engines: Make, restarted: Restart
) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    feed.follow(engine)
    later = restarted()
    later.follow(engine, tenant="other")
    assert later.blocks(1) == 0
    assert later.stats().state == "warm"
    assert engine.requests[:2] == [0, 0]


@pytest.mark.parametrize("added", [False, True], ids=["never added", "added without its engine"])
def test_what_no_engine_confirms_in_time_is_forgotten(
    feed: Feed, engines: Make, restarted: Restart, monkeypatch: pytest.MonkeyPatch, added: bool
) -> None:
    monkeypatch.setattr(zmq_source, "RESUME_WITHIN_S", 0.3)
    engine = engines()
    engine.publish(stored(1, 1))
    feed.follow(engine)
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
def test_what_is_forgotten_is_not_resumed(feed: Feed, engines: Make, restarted: Restart, forget: str) -> None:
    engine = engines()
    engine.publish(stored(1, 1))
    feed.follow(engine)
    later = restarted()
    getattr(later.source, forget)(HOLDER)
    assert later.blocks(1) == 0
    later.follow(engine)
    assert engine.requests[:2] == [0, 0]
    assert later.blocks(1) == 1


def test_a_snapshot_of_any_moment_leads_to_the_same_index(feed: Feed, engines: Make, tmp_path: Path) -> None:
    """Saved while batches are applied; blocks are stored several times, and removed as often or less."""
    engine, rng = engines(), np.random.default_rng(3)
    feed.follow(engine)
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
            save(feed.index, saved[-1], feed.source.paused)
    last = len(engine.batches) - 1
    wait_for(lambda: feed.stats().last_seq == last)
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


def test_a_replay_longer_than_what_its_socket_queues_is_read_whole(feed: Feed, engines: Make) -> None:
    """The engine's socket drops what exceeds its high-water mark, as vLLM's does."""
    engine = engines()
    for number in range(20_000):
        engine.publish(stored(number, number), lost=True)
    feed.follow(engine)
    wait_for(lambda: feed.stats().last_seq == 19_999)
    assert feed.stats().state == "warm"
    assert all(feed.blocks(token) == 1 for token in range(0, 20_000, 199))
