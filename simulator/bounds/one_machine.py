"""The whole cluster as one machine as fast as all instances together: what it does best, no cluster does better."""

from __future__ import annotations

import heapq
from math import inf

from conductor.costs import Floats


def least_waiting_s(arrival_s: Floats, work_s: Floats, speed: float) -> float:
    """Sum over jobs of completion less arrival, at best: shortest remaining work first (Schrage, 1968).

    One machine may do what several do side by side one after the other, and be done with each job no later; a
    job that could not use them all is only faster there. ``arrival_s`` ascends. O(n log n).
    """
    left: list[tuple[float, int]] = []  # seconds of the machine, job
    now_s = total_s = 0.0
    arrivals = [*arrival_s.tolist(), inf]
    needs_s = (work_s / speed).tolist()
    for job, need_s in enumerate(needs_s):
        now_s = max(now_s, arrivals[job])
        heapq.heappush(left, (need_s, job))
        while left and now_s < arrivals[job + 1]:
            rest_s, first = heapq.heappop(left)
            if now_s + rest_s > arrivals[job + 1]:
                heapq.heappush(left, (rest_s - (arrivals[job + 1] - now_s), first))
                now_s = arrivals[job + 1]
            else:
                now_s += rest_s
                total_s += now_s - arrivals[first]
    return total_s
