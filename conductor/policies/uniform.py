"""The `random` policy."""

from __future__ import annotations

import numpy as np

from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import choose_apart
from conductor.policies.parameters import whole_number


class Random:
    """Uniformly at random, prefill and decode rank each: the floor that every other policy has to beat.

    ``seed`` of the generator: 0.
    """

    name = "random"

    def __init__(self, *, seed: int = 0) -> None:
        self._generator = np.random.default_rng(whole_number("seed", seed))

    def choose(self, candidates: Candidates) -> Choice | None:
        return choose_apart(candidates, self._pick, self._pick)

    def _pick(self, allowed: Flags) -> int:
        indices = np.flatnonzero(allowed)
        return int(indices[self._generator.integers(len(indices))])
