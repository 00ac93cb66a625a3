"""How long calls take, and what memory they leave."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Figures = dict[str, float | None]


def latencies_us(call: Callable[[Any], object], queries: Sequence[Any], calls: int) -> tuple[float, float]:
    """p50 and p99 of single calls, best of three rounds each."""
    rounds = []
    clock = time.perf_counter
    gc.disable()
    for _ in range(3):
        taken = np.empty(calls)
        for i in range(calls):
            query = queries[i % len(queries)]
            begin_s = clock()
            call(query)
            taken[i] = clock() - begin_s
        rounds.append(np.percentile(taken, [50, 99]) * 1e6)
    gc.enable()
    p50, p99 = np.min(rounds, axis=0)
    return float(p50), float(p99)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def touch_memory(size: int) -> None:
    """Have the machine provide memory, so that whoever is measured first does not wait for a hypervisor."""
    np.zeros(size, np.uint8)[::4096] = 1
