"""The `preble` policy: exploit a cached prefix, or explore."""

from __future__ import annotations

import numpy as np

from conductor.costs import Floats
from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import choose_apart, least_of
from conductor.policies.parameters import number, whole_number
from conductor.policies.work_window import WorkWindow


class Preble:
    """E2: where most of the prompt is cached, the least loaded of those that cached most; else the cheapest rank.

    Source: Preble, arXiv 2407.00023, and its code (`multi_node/global_scheduler_with_time.py`). When the longest
    match exceeds the rest of the prompt, exploit: of the ranks that have it, the one with least load L. Else
    explore: the rank with the least L + M + P. L is the work placed there within ``window_s`` (180): seconds to
    prefill what was not cached, and to decode the answers. M is what the eviction to make room for this prompt
    would cost. P is the time to prefill what is not cached.

    When, after ``rebalance_after_requests`` (50), the rank to exploit is the most loaded one and its load
    exceeds ``rebalance_ratio`` (15) times the least, the least loaded takes the request (and thereby a copy of
    the prefix). Both values are those of the code.

    Approximated: M, for which Preble looks at the cached nodes that would go, assumes as its code does that the
    cache is full and as many tokens go as this prompt adds; they are taken to be needed again as often as
    tokens of prompts placed on the rank within the window were cached there, and recomputed without a prefix.
    The work of an answer is its predicted length times the predicted step. Redirecting single requests stands
    for moving nodes; replication of a subtree whose queueing time doubles is left out. Pairs, which Preble does
    not know: the decode rank is the one with least load. A choice counts as placed.
    """

    name = "preble"

    def __init__(
        self,
        *,
        window_s: float = 180.0,
        rebalance_ratio: float = 15.0,
        rebalance_after_requests: int = 50,
    ) -> None:
        self._window = WorkWindow(number("window_s", window_s, least=1e-3, most=1e9), amounts=3)
        self._rebalance_ratio = number("rebalance_ratio", rebalance_ratio, least=1.0)
        self._rebalance_after = whole_number("rebalance_after_requests", rebalance_after_requests)
        self._placed = 0

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        load_s, cached, prompts = self._window.sums(c.now_s, c.rows)
        prefill_s = c.compute_s(c.overlap_tokens)
        reuse = cached / np.maximum(prompts, 1.0)
        eviction_s = reuse * _recompute_s(c)
        by_load = least_of(c, load_s)
        by_cost = least_of(c, load_s + eviction_s + prefill_s)

        def pick_prefill(allowed: Flags) -> int:
            longest = int(c.overlap_tokens[allowed].max())
            if longest <= c.prompt_tokens - longest:
                return by_cost(allowed)
            exploited = by_load(allowed & (c.overlap_tokens == longest))
            return self._rebalanced(exploited, load_s, by_load(allowed), float(load_s[allowed].max()))

        choice = choose_apart(c, pick_prefill, by_load)
        if choice is not None:
            prefill, decode = choice.prefill, choice.decode
            overlap = int(c.overlap_tokens[prefill])
            self._window.add(c.now_s, int(c.rows[prefill]), prefill_s[prefill], overlap, c.prompt_tokens)
            self._window.add(c.now_s, int(c.rows[decode]), c.output_tokens * c.tbt_s[decode], 0, 0)
            self._placed += 1
        return choice

    def _rebalanced(self, exploited: int, load_s: Floats, lightest: int, most_s: float) -> int:
        if self._placed < self._rebalance_after or load_s[exploited] < most_s:
            return exploited
        return lightest if most_s > self._rebalance_ratio * load_s[lightest] else exploited


def _recompute_s(c: Candidates) -> Floats:
    """Seconds to compute as many tokens as this prompt would add to each rank's cache, without a prefix."""
    tokens = (c.prompt_tokens - c.overlap_tokens).astype(np.float64)
    seconds: Floats = c.prefill_terms[0] * tokens + c.prefill_terms[1] * tokens * tokens
    return seconds
