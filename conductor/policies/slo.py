"""The `slo` policy: both objectives at once, by estimated TTFT and TBT of the whole placement."""

from __future__ import annotations

import numpy as np

from conductor.costs import Floats
from conductor.policies.candidates import Candidates, Choice, least

# A placement that misses an objective loses to every placement that meets it.
_MISSED = 1e3


class Slo:
    """Minimise TTFT and TBT, each as a fraction of its objective, a missed objective counting above all.

    Scores of a pair are a sum of a term of the prefill rank and a term of the decode rank, so the best pair is
    found without building the matrix of pairs.
    """

    name = "slo"

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        ttft_s = c.ttft_s
        whole = least(self._score(c, ttft_s), c.is_mixed, c.placements)
        prefill = least(ttft_s, c.can_prefill, c.placements)
        if prefill is None:
            return None if whole is None else Choice(whole, whole)
        pair_score = self._score(c, ttft_s[prefill] + c.hand_off_s)
        decode = least(pair_score, c.can_decode, c.placements)
        if decode is None:
            return None if whole is None else Choice(whole, whole)
        if whole is not None and self._score(c, ttft_s)[whole] <= pair_score[decode]:
            return Choice(whole, whole)
        return Choice(prefill, decode)

    @staticmethod
    def _score(c: Candidates, ttft_s: Floats) -> Floats:
        ttft, tbt = ttft_s / c.ttft_objective_s, c.tbt_s / c.tbt_objective_s
        missed = (ttft > 1.0).astype(np.float64) + (tbt > 1.0)
        score: Floats = ttft + tbt + _MISSED * missed
        return score
