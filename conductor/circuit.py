"""What is counted of an instance's requests, and when too many of them have failed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final

_BUCKETS: Final = 10


@dataclass(frozen=True, slots=True)
class SuspensionPolicy:
    """When an instance that answers its health check but fails requests stops being a candidate, and for how long.

    After ``after_failures`` in a row, or when at least ``failure_rate`` of the requests of the last ``window_s``
    failed and there were at least ``min_requests``. The first pause is ``pause_s``, each one that follows within
    ``longest_pause_s`` of the last is twice as long, up to ``longest_pause_s``.
    """

    after_failures: int = 3
    pause_s: float = 10.0
    longest_pause_s: float = 160.0
    failure_rate: float = 0.5
    min_requests: int = 20
    window_s: float = 30.0


@dataclass(slots=True)
class Circuit:
    """What became of one instance's requests lately, and how often it was suspended."""

    failed_in_a_row: int = 0
    suspended_until_s: float = 0.0
    pause_s: float = 0.0  # the last one
    reopened_before_s: float = -inf  # a suspension that begins before then lasts longer than the last
    probe: str | None = None  # the placement that tries it
    suspensions: int = 0
    _counts: deque[list[int]] = field(default_factory=deque)  # bucket, requests, failures of them
    _until_s: float = -inf  # the last bucket's end

    def count(self, now_s: float, window_s: float, *, failed: bool) -> None:
        if now_s >= self._until_s:
            self._begin_bucket(int(now_s * _BUCKETS / window_s), window_s)
        latest = self._counts[-1]
        latest[1] += 1
        if failed:
            latest[2] += 1
            self.failed_in_a_row += 1
        else:
            self.failed_in_a_row = 0

    def _begin_bucket(self, number: int, window_s: float) -> None:
        counts = self._counts
        counts.append([number, 0, 0])
        while counts[0][0] <= number - _BUCKETS:
            counts.popleft()
        self._until_s = (number + 1) * window_s / _BUCKETS

    def lately(self) -> tuple[int, int]:
        """Requests and failures of them, in the window that the last one was counted in."""
        return sum(each[1] for each in self._counts), sum(each[2] for each in self._counts)

    def forget(self) -> None:
        """Count anew."""
        self.failed_in_a_row = 0
        self._counts.clear()
        self._until_s = -inf
