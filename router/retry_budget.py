"""How many further attempts the requests of a model may cost."""

from __future__ import annotations

from collections import defaultdict


class RetryBudget:
    """A bucket of tokens for each model: every request adds ``ratio`` of one, every further attempt takes one.

    A bucket holds at most ``burst``, and is full at first. So where everything fails, retries add ``ratio`` to the
    load instead of multiplying it. Models must come from a bounded set.

    ``requests`` counts those that were placed for the first time; they fill their bucket when it is looked at.
    """

    def __init__(self, ratio: float, burst: float) -> None:
        self.requests: defaultdict[str, int] = defaultdict(int)
        self._ratio = ratio
        self._burst = burst
        self._tokens: dict[str, float] = {}
        self._seen: dict[str, int] = {}  # of the requests

    def take(self, model: str) -> bool:
        """Whether one more attempt may be made."""
        tokens = self._filled(model)
        if tokens < 1.0:
            return False
        self._tokens[model] = tokens - 1.0
        return True

    def give_back(self, model: str) -> None:
        """The attempt was not made."""
        self._tokens[model] = min(self._filled(model) + 1.0, self._burst)

    def tokens(self) -> dict[str, float]:
        """Left, by model."""
        return {model: self._filled(model) for model in self.requests}

    def _filled(self, model: str) -> float:
        requests = self.requests[model]
        added = self._ratio * (requests - self._seen.get(model, 0))
        self._seen[model] = requests
        tokens = self._tokens[model] = min(self._tokens.get(model, self._burst) + added, self._burst)
        return tokens
