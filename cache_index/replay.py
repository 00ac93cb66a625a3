"""The order of one stream's batches: gaps, replays and restarts. No sockets, no clock of its own.

Batches carry a sequence number. Live ones come in order but may be missing; the engine's replay gives
its last batches again. Every replay asks from the *last batch that was applied*: if the engine answers
with that very batch, it is the same engine and what follows continues it. If the batch differs, or the
engine has not even that many, it was restarted, and what is known of its cache is void.

While a replay runs, live batches wait. A gap that a replay cannot close, and a replay that fails, void
the stream's residencies; the stream is then *cold*: usable, but known to be incomplete.

An engine's ROUTER socket drops what exceeds its high-water mark, 1,000 messages unless it is set. So the middle of
a long replay may be missing, or its end. It is asked for again from where it broke off for as long as that brings
something, and once more after a long one has ended.

A position is what a later process needs to continue: the last batch's number, and a digest of it, by which
the engine's replay is recognised as that of the same engine.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

REPLAY_TIMEOUT_S = 5.0  # without a sign of life
MAX_WAITING = 100_000  # live batches kept during a replay
MAX_ATTEMPTS = 2  # replays in a row that bring nothing new
LONG_REPLAY = 500  # batches: of more some may have been dropped on the way
CONFIRM_AFTER_S = 1.0  # a batch may fall between the replay's answer and the start of the live stream
DIGEST_BYTES = 16

StreamState = Literal["connecting", "warm", "cold"]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a stream has been applied; ``complete``: nothing is missing up to there."""

    last_sequence: int
    last_digest: bytes  # of that batch's payload
    complete: bool


class Sequencer:
    """Decides what to apply. Effects go through the three callbacks.

    ``apply(payload)`` applies a batch, ``clear()`` voids all residencies, ``request_replay(first)``
    asks the engine for its batches from ``first`` on and says whether it can be asked at all; a new
    request makes answers to earlier ones void.
    """

    def __init__(
        self,
        apply: Callable[[bytes], None],
        clear: Callable[[], None],
        request_replay: Callable[[int], bool],
    ) -> None:
        self._apply = apply
        self._clear = clear
        self._request_replay = request_replay
        self._next: int | None = 0  # None: whatever comes next
        self._last_payload: bytes | None = None  # of batch _next - 1, if it was applied since the last void
        self._last_digest: bytes | None = None  # instead of it, until something was applied after `resume`
        self._resume_by_s: float | None = None  # until the first connection after `resume`
        self._last_live = -1
        self._complete = False  # everything since the engine's start, or since its last clear by us
        self._connected = False
        self._was_connected = False
        self._settled = False  # the first replay has ended, or none is needed
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._deadline_s: float | None = None  # set while a replay runs
        self._confirm_at_s: float | None = None
        self._answered = False  # the running replay brought a batch
        self._brought = 0  # new ones that it brought
        self._attempts = 0
        self._gap_counted = False
        self.gaps = 0
        self.replays = 0
        self.batches = 0

    @property
    def state(self) -> StreamState:
        if not self._connected or (self._deadline_s is not None and not self._settled):
            return "connecting"
        return "warm" if self._complete else "cold"

    @property
    def was_connected(self) -> bool:
        return self._was_connected

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last batch applied, -1 before the first."""
        return -1 if self._next is None else self._next - 1

    @property
    def position(self) -> Position | None:
        """Where to continue what was applied; None when nothing is."""
        if self._next is None or not self._has_last:
            return None
        digest = self._last_digest if self._last_payload is None else _digest(self._last_payload)
        assert digest is not None
        return Position(self._next - 1, digest, self._complete)

    @property
    def deadline_s(self) -> float | None:
        """When ``tick`` has something to do, None when nothing is due."""
        if self._resume_by_s is not None:
            return self._resume_by_s
        return self._confirm_at_s if self._deadline_s is None else self._deadline_s

    @property
    def replaying(self) -> bool:
        return self._deadline_s is not None

    def resume(self, position: Position, by_s: float) -> None:
        """Before the first connection: what is known was applied up to there by an earlier process.

        It is void when there is no connection by then; the first replay shows whether it is the same engine.
        """
        self._next, self._last_digest = position.last_sequence + 1, position.last_digest
        self._complete = position.complete
        self._resume_by_s = by_s

    def connected(self, now_s: float) -> None:
        """The live stream is up, for the first time or again: anything may have been missed."""
        self._resume_by_s = None
        if self._was_connected:
            self._waiting.clear()  # perhaps of another engine; what this one has published, it replays
        self._connected = self._was_connected = True
        self._attempts = 0
        self._replay(now_s)
        self._confirm_at_s = now_s + CONFIRM_AFTER_S if self.replaying else None

    def disconnected(self) -> None:
        self._connected = False

    def resync(self, now_s: float) -> None:
        """Forget everything and ask for all that the engine still has."""
        self._resume_by_s = None
        self._void()
        self._next = 0
        self._last_live = -1
        self._waiting.clear()
        self._attempts = 0
        self._replay(now_s)

    def doubt(self) -> None:
        """What was applied may be wrong: void it, and continue with what comes."""
        self._void()
        if self._resume_by_s is not None:  # nothing has come yet
            self._resume_by_s = None
            self._next = 0

    def emptied(self) -> None:
        """The engine has told, in the last batch applied or before, that its cache was empty then."""
        self._complete = True

    def live(self, sequence: int, payload: bytes, now_s: float) -> None:
        """A batch of the live stream."""
        if self._deadline_s is None:
            self._take(sequence, payload, now_s)
            return
        self._waiting.append((sequence, payload))
        if len(self._waiting) > MAX_WAITING:
            self._give_up(now_s)

    def replayed(self, sequence: int, payload: bytes, now_s: float) -> None:
        """A batch of the running replay."""
        if self._deadline_s is None:
            return
        self._deadline_s = now_s + REPLAY_TIMEOUT_S
        known = self._next or 0
        unproven = not self._answered and self._has_last
        if sequence == known - 1 and unproven:
            self._answered = True
            if not self._is_last(payload):
                self._restarted(now_s)
            return
        if sequence < known:
            return
        if sequence > known and self._answered:
            self._count_gap()
            self._replay(now_s)
            return
        self._answered = True
        self._brought += 1
        if sequence > known or unproven:  # the engine no longer has what is missing, or what is known
            self._void()
        if sequence > known:
            self._count_gap()
        elif sequence == 0:
            self._complete = True
        self._accept(sequence, payload)

    def replay_ended(self, now_s: float) -> None:
        """The engine has sent all it has."""
        if self._deadline_s is None:
            return
        if not self._answered and self._has_last:
            self._restarted(now_s)
            return
        self._deadline_s = None
        self._settled = True
        if self._brought >= LONG_REPLAY:
            self._confirm_at_s = now_s + CONFIRM_AFTER_S
        if self._next == 0:
            self._complete = True  # the engine has not published anything yet
        self._drain(now_s)
        if not self.replaying:
            self._attempts = 0

    def tick(self, now_s: float) -> None:
        """Give up a replay whose deadline has passed; ask once more some time after a connection."""
        if self._resume_by_s is not None:
            if now_s >= self._resume_by_s:
                self.doubt()
        elif self._deadline_s is not None:
            if now_s >= self._deadline_s and self._brought:
                self._replay(now_s)
            elif now_s >= self._deadline_s:
                self._give_up(now_s)
        elif self._confirm_at_s is not None and now_s >= self._confirm_at_s:
            self._confirm_at_s = None
            if self._complete or self._brought >= LONG_REPLAY:
                self._replay(now_s)

    def _take(self, sequence: int, payload: bytes, now_s: float) -> None:
        if sequence <= self._last_live:
            self._last_live = -1
            self._waiting.appendleft((sequence, payload))
            self._restarted(now_s)
            return
        if self._next is None or sequence == self._next:
            self._last_live = sequence
            if sequence == 0:
                self._complete = True
            self._accept(sequence, payload)
        elif sequence > self._next:
            self._count_gap()
            self._waiting.appendleft((sequence, payload))
            self._replay(now_s)
        else:
            self._last_live = sequence  # came by replay before

    def _accept(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        self._last_payload, self._last_digest = payload, None
        self._attempts = 0
        self._gap_counted = False
        self.batches += 1
        self._apply(payload)

    def _count_gap(self) -> None:
        """A gap is tried several times before it is closed or given up, but counts once."""
        self.gaps += not self._gap_counted
        self._gap_counted = True

    def _drain(self, now_s: float) -> None:
        while self._waiting and self._deadline_s is None:
            sequence, payload = self._waiting.popleft()
            self._take(sequence, payload, now_s)

    def _restarted(self, now_s: float) -> None:
        """Another engine speaks. What waits is its own from its last step back on."""
        self._void()
        self._next = 0
        self._last_live = -1
        self._waiting = _after_last_step_back(self._waiting)
        if self._waiting and self._waiting[0][0] == 0:
            self._deadline_s = None
            self._settled = True
            self._drain(now_s)
        else:
            self._replay(now_s)

    def _replay(self, now_s: float) -> None:
        self._attempts += 1
        asked = max((self._next or 0) - self._has_last, 0)
        if self._attempts > MAX_ATTEMPTS or not self._request_replay(asked):
            self._give_up(now_s)
            return
        self.replays += 1
        self._answered = False
        self._brought = 0
        self._deadline_s = now_s + REPLAY_TIMEOUT_S

    def _give_up(self, now_s: float) -> None:
        """Continue with what comes, without what was missed."""
        self._deadline_s = None
        self._confirm_at_s = None
        self._attempts = 0
        self._settled = True
        self._void()
        self._next = None
        self._last_live = -1
        self._drain(now_s)

    def _void(self) -> None:
        self._clear()
        self._complete = False
        self._last_payload = self._last_digest = None

    @property
    def _has_last(self) -> bool:
        return self._last_payload is not None or self._last_digest is not None

    def _is_last(self, payload: bytes) -> bool:
        if self._last_payload is not None:
            return payload == self._last_payload
        return _digest(payload) == self._last_digest


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def _after_last_step_back(waiting: deque[tuple[int, bytes]]) -> deque[tuple[int, bytes]]:
    kept: deque[tuple[int, bytes]] = deque()
    for sequence, payload in waiting:
        if kept and sequence <= kept[-1][0]:
            kept.clear()
        kept.append((sequence, payload))
    return kept
