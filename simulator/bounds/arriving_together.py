"""Requests that arrive at the same instant, more of them than instances: some wait, whatever anybody does.

Each set of requests that arrive together is looked at as if there were no others: those could only make it wait
longer. Its prefills run on one instance at a time each, at most as fast as on the fastest, and no more of them side
by side than instances of that speed would make up the cluster. Shortest first, whenever one of these is free, then
has the least sum of ends (Conway, Maxwell and Miller, 1967), and parting prefills does not lower it (McNaughton,
1959). Steps that hold chunks of several prompts, and any order of chunks, are such parting.
"""

from __future__ import annotations

import heapq

import numpy as np

from conductor.costs import Floats
from simulator.bounds.work import Work


def least_ttft_sum_s(work: Work) -> float:
    """Sum of TTFTs at least; never less than each request's own work."""
    cuts = np.flatnonzero(np.diff(work.arrival_s)) + 1
    prefills, owns = np.split(work.undivided_s, cuts), np.split(work.own_s, cuts)
    sums = (max(_ends_s(p, work.abreast), float(own.sum())) for p, own in zip(prefills, owns, strict=True))
    return sum(sums)


def _ends_s(needs_s: Floats, machines: int) -> float:
    """Sum of the ends of jobs that all begin at 0, shortest first."""
    if len(needs_s) <= machines:
        return float(needs_s.sum())
    free_s = [0.0] * machines
    total_s = 0.0
    for need_s in np.sort(needs_s).tolist():
        end_s = heapq.heappop(free_s) + need_s
        heapq.heappush(free_s, end_s)
        total_s += end_s
    return total_s
