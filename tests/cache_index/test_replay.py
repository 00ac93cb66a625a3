"""The sequencer alone, against an engine that lives in a few lines here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index.replay import (
    CONFIRM_AFTER_S,
    LONG_REPLAY,
    MAX_WAITING,
    REPLAY_TIMEOUT_S,
    Position,
    Sequencer,
)


class Subject:
    """A sequencer that keeps what it applied since the last clear."""

    def __init__(self, *, replayable: bool = True) -> None:
        self.applied: list[bytes] = []
        self.clears = 0
        self.asked: list[int] = []
        self.replayable = replayable
        self.sequencer = Sequencer(self.applied.append, self._clear, self._request)

    def _clear(self) -> None:
        self.clears += 1
        self.applied.clear()

    def _request(self, first: int) -> bool:
        if self.replayable:
            self.asked.append(first)
        return self.replayable

    def answer(self, engine: list[bytes], first_kept: int = 0) -> None:
        """Let the engine answer the requests that are open, one after the other."""
        while self.asked:
            first = self.asked.pop()
            self.asked.clear()
            for sequence in range(max(first, first_kept), len(engine)):
                self.sequencer.replayed(sequence, engine[sequence], 0.0)
                if self.asked:
                    break
            else:
                self.sequencer.replay_ended(0.0)


def batches(engine: str, count: int) -> list[bytes]:
    return [f"{engine}{number}".encode() for number in range(count)]


def test_catches_up_on_connection() -> None:
    subject, engine = Subject(), batches("a", 5)
    assert subject.sequencer.state == "connecting"
    subject.sequencer.connected(0.0)
    assert subject.sequencer.state == "connecting"
    assert subject.asked == [0]
    subject.answer(engine)
    assert subject.applied == engine
    assert subject.sequencer.state == "warm"
    assert subject.sequencer.last_sequence == 4


def test_the_first_replay_is_not_over_with_its_first_batch() -> None:
    subject, engine = Subject(), batches("a", 2)
    subject.sequencer.connected(0.0)
    subject.sequencer.replayed(0, engine[0], 0.0)
    assert subject.sequencer.state == "connecting"
    subject.sequencer.replayed(1, engine[1], 0.0)
    subject.sequencer.replay_ended(0.0)
    assert subject.sequencer.state == "warm"


def test_live_batches_wait_for_the_replay() -> None:
    subject, engine = Subject(), batches("a", 7)
    subject.sequencer.connected(0.0)
    for sequence in (4, 5, 6):
        subject.sequencer.live(sequence, engine[sequence], 0.0)
    assert subject.applied == []
    subject.answer(engine[:6])
    assert subject.applied == engine


def test_a_batch_that_came_by_replay_is_not_applied_again() -> None:
    subject, engine = Subject(), batches("a", 6)
    subject.sequencer.connected(0.0)
    subject.answer(engine)
    subject.sequencer.live(5, engine[5], 0.0)
    assert subject.applied == engine
    assert subject.clears == 0
    subject.sequencer.live(6, b"a6", 0.0)
    assert subject.applied == [*engine, b"a6"]


def test_a_gap_is_closed_from_the_last_batch_on() -> None:
    subject, engine = Subject(), batches("a", 9)
    subject.sequencer.connected(0.0)
    subject.answer(engine[:4])
    subject.sequencer.live(7, engine[7], 0.0)
    assert subject.asked == [3]
    subject.sequencer.live(8, engine[8], 0.0)
    subject.answer(engine[:8])
    assert subject.applied == engine
    assert (subject.sequencer.gaps, subject.clears, subject.sequencer.state) == (1, 0, "warm")


def test_a_gap_that_the_engine_cannot_close_makes_it_cold() -> None:
    subject, engine = Subject(), batches("a", 9)
    subject.sequencer.connected(0.0)
    subject.answer(engine[:4])
    subject.sequencer.live(7, engine[7], 0.0)
    subject.answer(engine[:8], first_kept=6)
    assert subject.applied == engine[6:8]
    assert (subject.sequencer.gaps, subject.clears, subject.sequencer.state) == (1, 1, "cold")
    subject.sequencer.live(8, engine[8], 0.0)
    assert subject.applied == engine[6:9]


def test_an_engine_that_keeps_nothing_makes_it_cold() -> None:
    subject, engine = Subject(), batches("a", 9)
    subject.sequencer.connected(0.0)
    subject.answer(engine[:4])
    subject.sequencer.live(7, engine[7], 0.0)
    subject.answer(engine[:8], first_kept=100)
    assert subject.applied == engine[7:8]
    assert (subject.sequencer.gaps, subject.sequencer.state) == (1, "cold")


def test_joining_an_engine_that_no_longer_has_its_beginning() -> None:
    subject, engine = Subject(), batches("a", 9)
    subject.sequencer.connected(0.0)
    subject.answer(engine, first_kept=3)
    assert subject.applied == engine[3:]
    assert subject.sequencer.state == "cold"


def test_without_replay_a_stream_is_warm_only_from_its_first_batch() -> None:
    late, early = Subject(replayable=False), Subject(replayable=False)
    for subject in (late, early):
        subject.sequencer.connected(0.0)
        assert subject.sequencer.state == "cold"
    late.sequencer.live(5, b"a5", 0.0)
    early.sequencer.live(0, b"a0", 0.0)
    assert (late.applied, late.sequencer.state) == ([b"a5"], "cold")
    assert (early.applied, early.sequencer.state) == ([b"a0"], "warm")
    early.sequencer.live(2, b"a2", 0.0)
    assert (early.applied, early.sequencer.state) == ([b"a2"], "cold")


def test_a_replay_without_answer_is_given_up() -> None:
    subject, engine = Subject(), batches("a", 9)
    subject.sequencer.connected(0.0)
    subject.sequencer.live(7, engine[7], 1.0)
    subject.sequencer.tick(REPLAY_TIMEOUT_S - 0.1)
    assert subject.applied == []
    subject.sequencer.tick(REPLAY_TIMEOUT_S)
    assert subject.applied == [engine[7]]
    assert (subject.sequencer.deadline_s, subject.sequencer.state) == (None, "cold")
    assert not subject.sequencer.replaying
    subject.sequencer.replayed(0, engine[0], 6.0)
    assert subject.applied == [engine[7]]


def test_an_answer_puts_the_deadline_off() -> None:
    subject, engine = Subject(), batches("a", 3)
    subject.sequencer.connected(0.0)
    subject.sequencer.replayed(0, engine[0], 4.0)
    subject.sequencer.tick(REPLAY_TIMEOUT_S)
    assert subject.sequencer.deadline_s == 4.0 + REPLAY_TIMEOUT_S


def test_what_was_dropped_in_the_middle_of_a_replay_is_asked_for_again() -> None:
    subject, engine = Subject(), batches("a", 9)
    subject.sequencer.connected(0.0)
    for sequence in (0, 1, 2, 6):
        subject.sequencer.replayed(sequence, engine[sequence], 0.0)
    assert subject.asked == [0, 2]
    subject.answer(engine)
    assert (subject.applied, subject.clears, subject.sequencer.gaps) == (engine, 0, 1)
    assert subject.sequencer.state == "warm"


def test_a_replay_that_breaks_off_is_asked_for_again_while_that_brings_something() -> None:
    subject, engine = Subject(), batches("a", 9)
    now_s = 0.0
    subject.sequencer.connected(now_s)
    for sequence in range(3):
        subject.sequencer.replayed(sequence, engine[sequence], now_s)
    now_s += REPLAY_TIMEOUT_S
    subject.sequencer.tick(now_s)
    assert subject.asked == [0, 2]
    assert subject.applied == engine[:3]
    subject.sequencer.replayed(2, engine[2], now_s)  # and no more
    subject.sequencer.tick(now_s + REPLAY_TIMEOUT_S)
    assert subject.applied == []
    assert subject.sequencer.state == "cold"


def test_the_end_of_a_long_replay_may_be_missing() -> None:
    subject, engine = Subject(), batches("a", 4 * LONG_REPLAY)
    now_s = 0.0
    subject.sequencer.connected(now_s)
    for brought in (LONG_REPLAY, 3 * LONG_REPLAY, len(engine)):
        subject.answer(engine[:brought])
        assert subject.applied == engine[:brought]
        now_s += CONFIRM_AFTER_S
        subject.sequencer.tick(now_s)
        assert subject.asked == [brought - 1]
    subject.answer(engine)
    subject.sequencer.tick(now_s + CONFIRM_AFTER_S)
    assert subject.asked == []
    assert subject.sequencer.deadline_s is None


def test_a_step_back_is_a_restart() -> None:
    subject, old, new = Subject(), batches("a", 6), batches("b", 3)
    subject.sequencer.connected(0.0)
    subject.answer(old[:3])
    for sequence in (3, 4, 5):
        subject.sequencer.live(sequence, old[sequence], 0.0)
    subject.sequencer.live(2, new[2], 0.0)
    assert subject.applied == []
    subject.answer(new)
    assert subject.applied == new
    assert subject.sequencer.state == "warm"


@pytest.mark.parametrize("published", [0, 2, 6, 9])
def test_a_restart_is_noticed_on_reconnection(published: int) -> None:
    """However far the new engine has come, also when it stands at or beyond the old one's number."""
    subject, old, new = Subject(), batches("a", 6), batches("b", published)
    subject.sequencer.connected(0.0)
    subject.answer(old)
    subject.sequencer.disconnected()
    assert subject.sequencer.state == "connecting"
    subject.sequencer.connected(1.0)
    subject.answer(new)
    assert subject.applied == new
    assert (subject.clears, subject.sequencer.state) == (1, "warm")


def test_a_reconnection_to_the_same_engine_keeps_everything() -> None:
    subject, engine = Subject(), batches("a", 6)
    subject.sequencer.connected(0.0)
    subject.answer(engine[:4])
    subject.sequencer.disconnected()
    subject.sequencer.connected(1.0)
    subject.answer(engine)
    assert subject.applied == engine
    assert (subject.clears, subject.sequencer.state) == (0, "warm")


def test_some_time_after_a_connection_it_asks_once_more() -> None:
    """A batch that came between the answer and the start of the live stream would else stay unknown."""
    subject, engine = Subject(), batches("a", 5)
    subject.sequencer.connected(0.0)
    subject.answer(engine[:4])
    subject.sequencer.tick(CONFIRM_AFTER_S - 0.1)
    assert subject.asked == []
    subject.sequencer.tick(CONFIRM_AFTER_S)
    assert subject.asked == [3]
    subject.answer(engine)
    assert (subject.applied, subject.clears, subject.sequencer.state) == (engine, 0, "warm")
    assert subject.sequencer.deadline_s is None


def test_quiet_replays_do_not_count_against_a_later_gap() -> None:
    subject, engine = Subject(), batches("a", 4)
    for now_s in (0.0, 10.0, 20.0):
        subject.sequencer.connected(now_s)
        subject.answer(engine[:0])
        subject.sequencer.tick(now_s + CONFIRM_AFTER_S)
        subject.answer(engine[:0])
    subject.sequencer.live(3, engine[3], 30.0)
    subject.answer(engine)
    assert (subject.applied, subject.clears, subject.sequencer.state) == (engine, 0, "warm")


def test_resync_starts_over() -> None:
    subject, engine = Subject(), batches("a", 6)
    subject.sequencer.connected(0.0)
    subject.answer(engine[:4])
    subject.sequencer.resync(1.0)
    assert (subject.applied, subject.asked) == ([], [0])
    subject.answer(engine)
    assert (subject.applied, subject.sequencer.state) == (engine, "warm")


def test_what_waits_is_bounded() -> None:
    subject = Subject()
    subject.sequencer.connected(0.0)
    for sequence in range(MAX_WAITING + 1):
        subject.sequencer.live(sequence + 3, b"", 0.0)
    assert len(subject.applied) == MAX_WAITING + 1
    assert subject.sequencer.deadline_s is None


@given(
    steps=st.lists(
        st.sampled_from(
            ["publish", "publish", "lose", "restart", "reconnect", "answer", "timeout", "trim", "resume"]
        ),
        max_size=60,
    )
)
@settings(max_examples=300, deadline=None)
def test_never_out_of_order_and_never_silently_incomplete(steps: list[str]) -> None:
    """After any history: what is applied is a gapless run of the engine's batches, and a stream that
    calls itself warm has all of them."""
    subject, engine, generation, kept, now_s = Subject(), [], 0, 0, 0.0
    subject.sequencer.connected(now_s)
    for step in steps:
        if step in ("publish", "lose"):
            engine.append(f"{generation}-{len(engine)}".encode())
            if step == "publish":
                subject.sequencer.live(len(engine) - 1, engine[-1], now_s)
        elif step == "restart":
            engine, generation, kept = [], generation + 1, 0
            subject.sequencer.disconnected()
            subject.sequencer.connected(now_s)
        elif step == "reconnect":
            subject.sequencer.disconnected()
            subject.sequencer.connected(now_s)
        elif step == "answer":
            subject.answer(engine, kept)
        elif step == "timeout":
            subject.asked.clear()
            now_s += 2 * REPLAY_TIMEOUT_S
            subject.sequencer.tick(now_s)
        elif step == "resume":  # in another process, which connects at once
            position = subject.sequencer.position
            subject = Subject() if position is None else resumed(subject, position, now_s + 30.0)
            subject.sequencer.connected(now_s)
        else:
            kept = len(engine)
    subject.answer(engine, kept)
    subject.sequencer.tick(now_s + 2 * REPLAY_TIMEOUT_S)  # of a request that a timeout step lost
    subject.answer(engine, kept)
    engine.append(b"last")
    subject.sequencer.live(len(engine) - 1, engine[-1], now_s)
    subject.answer(engine, kept)
    run = [each for each in subject.applied if each in engine]
    assert run == engine[len(engine) - len(run) :]
    if subject.sequencer.state == "warm":
        assert subject.applied == engine
    assert not subject.sequencer.replaying


def resumed(subject: Subject, position: Position, by_s: float = 30.0) -> Subject:
    """A later process, whose index has what the earlier one had applied."""
    later = Subject(replayable=subject.replayable)
    later.applied += subject.applied
    later.sequencer.resume(position, by_s)
    return later


def stopped(engine: list[bytes], *, first_kept: int = 0) -> tuple[Subject, Position]:
    subject = Subject()
    subject.sequencer.connected(0.0)
    subject.answer(engine, first_kept)
    position = subject.sequencer.position
    assert position is not None
    return subject, position


def test_a_later_process_continues_where_the_earlier_one_stopped() -> None:
    engine = batches("a", 9)
    later = resumed(*stopped(engine[:4]))
    assert later.sequencer.state == "connecting"
    later.sequencer.connected(1.0)
    assert (later.asked, later.sequencer.state) == ([3], "connecting")
    later.sequencer.live(8, engine[8], 1.0)
    later.answer(engine)
    assert (later.applied, later.clears, later.sequencer.state) == (engine, 0, "warm")


def test_with_nothing_new_it_is_warm_and_can_be_resumed_again() -> None:
    engine = batches("a", 4)
    later = resumed(*stopped(engine))
    assert later.sequencer.position == Position(3, later.sequencer.position.last_digest, True)  # type: ignore[union-attr]
    later.sequencer.connected(1.0)
    later.answer(engine)
    assert (later.applied, later.clears, later.sequencer.state) == (engine, 0, "warm")
    again = resumed(later, later.sequencer.position)  # type: ignore[arg-type]
    again.sequencer.connected(2.0)
    again.answer(engine)
    assert (again.applied, again.clears) == (engine, 0)


@pytest.mark.parametrize("published", [0, 2, 4, 9])
def test_a_restarted_engine_is_noticed_after_a_resume(published: int) -> None:
    later = resumed(*stopped(batches("a", 4)))
    new = batches("b", published)
    later.sequencer.connected(1.0)
    later.answer(new)
    assert (later.applied, later.clears, later.sequencer.state) == (new, 1, "warm")


def test_an_engine_that_no_longer_has_the_last_batch_is_read_from_where_it_begins() -> None:
    engine = batches("a", 9)
    later = resumed(*stopped(engine[:4]))
    later.sequencer.connected(1.0)
    later.answer(engine, first_kept=6)
    assert (later.applied, later.clears, later.sequencer.state) == (engine[6:], 1, "cold")


def test_an_incomplete_stream_stays_incomplete() -> None:
    engine = batches("a", 9)
    later = resumed(*stopped(engine[:6], first_kept=3))
    later.sequencer.connected(1.0)
    later.answer(engine)
    assert (later.applied, later.clears, later.sequencer.state) == (engine[3:], 0, "cold")


def test_an_engine_that_does_not_come_in_time_is_forgotten() -> None:
    engine = batches("a", 4)
    later = resumed(*stopped(engine), by_s=30.0)
    assert later.sequencer.deadline_s == 30.0
    later.sequencer.tick(29.9)
    assert later.applied == engine
    later.sequencer.tick(30.0)
    assert (later.applied, later.sequencer.position, later.sequencer.deadline_s) == ([], None, None)
    later.sequencer.connected(40.0)
    later.answer(engine)
    assert (later.applied, later.sequencer.state) == (engine, "warm")


def test_an_engine_that_does_not_answer_after_a_resume_is_forgotten() -> None:
    later = resumed(*stopped(batches("a", 4)))
    later.sequencer.connected(1.0)
    later.sequencer.tick(1.0 + REPLAY_TIMEOUT_S)
    assert (later.applied, later.sequencer.state) == ([], "cold")


def test_there_is_no_position_without_content() -> None:
    subject = Subject()
    assert subject.sequencer.position is None
    subject.sequencer.connected(0.0)
    subject.answer(batches("a", 3))
    subject.sequencer.doubt()
    assert subject.sequencer.position is None
    subject.sequencer.live(3, b"a3", 0.0)
    position = subject.sequencer.position
    assert position is not None
    assert (position.last_sequence, position.complete) == (3, False)


def test_a_stream_is_complete_from_the_moment_its_engine_tells_that_it_is_empty() -> None:
    subject = Subject()
    subject.sequencer.connected(0.0)
    subject.answer(batches("a", 9), first_kept=3)
    assert subject.sequencer.state == "cold"
    subject.sequencer.emptied()
    assert subject.sequencer.state == "warm"
    subject.sequencer.live(12, b"a12", 0.0)
    subject.answer(batches("a", 13), first_kept=12)
    assert subject.sequencer.state == "cold"
