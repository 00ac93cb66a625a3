"""The `aibrix_prefix_cache` policy."""

from __future__ import annotations

from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import choose_apart, least_of, requests_of
from conductor.policies.parameters import number, whole_number


class AibrixPrefixCache:
    """The longest match among ranks that are not overloaded; fewest requests when load is out of balance.

    Source: AIBrix 0.7, routing algorithm `prefix-cache` (`pkg/plugins/gateway/algorithms/prefix_cache.go`), with
    the values of its Helm chart. When max - min requests exceed ``imbalance_abs_count`` (16; 8 in the code), the
    rank with fewest requests. Else the rank with the largest whole percentage of the prompt cached, ties to
    fewer requests, of those whose requests do not exceed mean + ``standard_deviation_factor`` (2; 1 in the
    code) standard deviations; without such a match, fewest requests.

    The algorithm knows no pairs: a decode rank is the one with fewest requests.
    """

    name = "aibrix_prefix_cache"

    def __init__(self, *, imbalance_abs_count: int = 16, standard_deviation_factor: float = 2.0) -> None:
        self._imbalance = whole_number("imbalance_abs_count", imbalance_abs_count)
        self._deviations = number("standard_deviation_factor", standard_deviation_factor, least=0.0)

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        return choose_apart(c, lambda allowed: self._pick(c, allowed), least_of(c, requests_of(c)))

    def _pick(self, c: Candidates, allowed: Flags) -> int:
        requests = requests_of(c)
        compared = requests[allowed]
        if compared.max() - compared.min() > self._imbalance:
            return least_of(c, requests)(allowed)
        percent = 100 * c.overlap_tokens // max(c.prompt_tokens, 1)
        bearable = requests <= compared.mean() + self._deviations * compared.std()
        matched = allowed & (percent > 0) & bearable
        if matched.any():
            return least_of(c, -percent, requests)(matched)
        return least_of(c, requests)(allowed)
