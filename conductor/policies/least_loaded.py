"""The `least_loaded` and `least_requests` policies, which know nothing of the cache."""

from __future__ import annotations

from conductor.policies.candidates import Candidates, Choice
from conductor.policies.pairing import choose_apart, least_of, requests_of


class LeastLoaded:
    """Fewest prompt tokens that pending prefills still have to compute, then fewest requests. No parameters."""

    name = "least_loaded"

    def choose(self, candidates: Candidates) -> Choice | None:
        by_load = least_of(candidates, candidates.pending_tokens, requests_of(candidates))
        return choose_apart(candidates, by_load, by_load)


class LeastRequests:
    """Fewest requests, as most gateways count load (SMG 1.13's in-flight count). No parameters."""

    name = "least_requests"

    def choose(self, candidates: Candidates) -> Choice | None:
        by_requests = least_of(candidates, requests_of(candidates))
        return choose_apart(candidates, by_requests, by_requests)
