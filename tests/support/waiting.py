"""Waiting for what other threads and processes do, without a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

WITHIN_S = 45.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)
