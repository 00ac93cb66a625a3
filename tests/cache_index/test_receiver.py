"""The receiver thread: orders, faults, and its end."""

from __future__ import annotations

import threading

from structlog.testing import capture_logs
from waiting import wait_for

from cache_index.receiver import Receiver


class Subject:
    """A receiver that notes what it is called for."""

    def __init__(self) -> None:
        self.turns = 0
        self.ended = threading.Event()
        self.faults = 0
        self.receiver: Receiver[str] = Receiver("test", self._serve, self.ended.set)

    def _serve(self, ready: set[str]) -> int:
        self.turns += 1
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault while serving")
        return 1


def test_orders_are_carried_out_in_turn_those_before_the_start_included() -> None:
    subject, done = Subject(), list[int]()
    for number in range(3):
        subject.receiver.order(lambda number=number: done.append(number))  # type: ignore[misc]
    subject.receiver.start()
    subject.receiver.start()
    for number in range(3, 2000):
        subject.receiver.order(lambda number=number: done.append(number))  # type: ignore[misc]
    wait_for(lambda: len(done) == 2000)
    assert done == list(range(2000))
    subject.receiver.close()
    assert subject.ended.is_set()


def test_faults_stop_neither_orders_nor_serving() -> None:
    subject, done = Subject(), list[str]()

    def fail() -> None:
        raise RuntimeError("a fault in an order")

    with capture_logs() as logs:
        subject.receiver.start()
        subject.receiver.order(fail)
        subject.receiver.order(lambda: done.append("after"))
        wait_for(lambda: bool(done))
        subject.faults = 1
        wait_for(lambda: subject.faults == 0)
        turns = subject.turns
        wait_for(lambda: subject.turns > turns)
        subject.receiver.close()
    assert {each["event"] for each in logs} == {"receiver.order_failed", "receiver.failed"}


def test_after_the_end_orders_are_ignored() -> None:
    subject = Subject()
    subject.receiver.start()
    subject.receiver.close()
    subject.receiver.close()
    subject.receiver.order(lambda: subject.ended.clear())
    subject.receiver.start()
    assert subject.ended.is_set()
    Subject().receiver.close()
