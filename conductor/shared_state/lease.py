"""Who leads: a lease that one replica holds at a time, and a token that grows with every new holder.

The holder counts its time from *before* it asked, and gives up a tenth early; the store counts from when it
answered. So the holder's time has passed before anybody else can be granted the lease. No clock of its own: time
comes in as seconds of the replica's monotonic clock.

A store that lost its data, or that is another server than before, may have forgotten a lease that is still held.
It therefore grants no new one for the length of a lease; only who still holds one may put it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

MARGIN = 0.1  # of a lease, given up early
RENEWALS = 3  # in the time of a lease


@dataclass(frozen=True, slots=True)
class Question:
    """``token`` is the one held, 0 to apply; ``floor`` is the highest that this replica has heard of."""

    token: int
    floor: int


@dataclass(frozen=True, slots=True)
class Answer:
    """``token`` is the one granted, 0 for none; ``leader`` holds the lease now, "" nobody."""

    token: int
    leader: str
    highest: int


class Lease:
    """One replica's end of it."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.leader = ""  # as last heard
        self.highest = 0  # token ever heard of
        self.terms = 0  # times that it was granted here
        self._token = 0
        self._until_s = -inf
        self._due_s = -inf

    def token(self, now_s: float) -> int:
        """The one held now; 0 when none is."""
        return self._token if now_s < self._until_s else 0

    def is_due(self, now_s: float) -> bool:
        """Whether to ask now."""
        return now_s >= self._due_s

    def question(self, now_s: float) -> Question:
        """What to ask, at the moment when it is sent."""
        self._due_s = now_s + self.lease_s / RENEWALS
        return Question(self.token(now_s), self.highest)

    def answered(self, question: Question, asked_s: float, answer: Answer) -> None:
        """``asked_s`` is when the question was made. No answer is no news."""
        self.highest = max(self.highest, answer.highest, answer.token)
        self.leader = answer.leader
        if not answer.token:
            self._token, self._until_s = 0, -inf
            return
        if answer.token != self._token:
            self.terms += 1
        self._token = answer.token
        self._until_s = asked_s + self.lease_s * (1.0 - MARGIN)

    def unanswered(self) -> None:
        """Ask again as soon as that is possible."""
        self._due_s = -inf

    def given_up(self) -> None:
        """It is not held any more, as far as this replica goes."""
        self._token, self._until_s = 0, -inf
