"""How many further attempts the requests of a model may cost."""

from __future__ import annotations


class RetryBudget:
    """A bucket of tokens for each model: every request adds ``ratio`` of one, every further attempt takes one.

    A bucket holds at most ``burst``, and is full at first. So where everything fails, retries add ``ratio`` to the
    load instead of multiplying it. Models must come from a bounded set.
    """

    def __init__(self, ratio: float, burst: float) -> None:
        self._ratio = ratio
        self._burst = burst
        self._tokens: dict[str, float] = {}

    def requested(self, model: str) -> None:
        """A request was placed for the first time."""
        tokens = self._tokens.get(model)
        if tokens != self._burst:
            self._tokens[model] = self._burst if tokens is None else min(tokens + self._ratio, self._burst)

    def take(self, model: str) -> bool:
        """Whether one more attempt may be made."""
        tokens = self._tokens.get(model, self._burst)
        if tokens < 1.0:
            return False
        self._tokens[model] = tokens - 1.0
        return True

    def give_back(self, model: str) -> None:
        """The attempt was not made."""
        self._tokens[model] = min(self._tokens.get(model, self._burst) + 1.0, self._burst)

    def tokens(self) -> dict[str, float]:
        """Left, by model."""
        return dict(self._tokens)
