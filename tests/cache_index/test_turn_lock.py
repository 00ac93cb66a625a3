"""A lock for one thread at a time, which each gets in turn."""

from __future__ import annotations

import threading
import time

from cache_index.turn_lock import TurnLock


def test_one_at_a_time_and_again_by_the_same() -> None:
    lock, inside, most, counted = TurnLock(), 0, 0, 0

    def count() -> None:
        nonlocal inside, most, counted
        for _ in range(500):
            with lock, lock:
                inside += 1
                most = max(most, inside)
                before = counted
                time.sleep(0)
                counted = before + 1
                inside -= 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, counted) == (1, 2_000)


def test_who_waits_comes_before_who_has_just_let_it_go() -> None:
    lock, came = TurnLock(), list[str]()

    def wait(coming: threading.Event) -> None:
        coming.set()
        with lock:
            came.append("who waited")

    for _ in range(10):
        coming = threading.Event()
        waiting = threading.Thread(target=wait, args=(coming,))
        with lock:
            waiting.start()
            assert coming.wait(30)
            time.sleep(0.1)  # until it waits for the lock
        with lock:
            came.append("who had it")
        waiting.join()
    assert came == ["who waited", "who had it"] * 10


def test_a_fault_inside_lets_it_go() -> None:
    lock = TurnLock()
    try:
        with lock, lock:
            raise KeyError
    except KeyError:
        pass
    other = threading.Thread(target=lock.__enter__)
    other.start()
    other.join(10)
    assert not other.is_alive()
