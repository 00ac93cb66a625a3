"""The `round_robin` policy, and turns for policies that use them for one of the two legs."""

from __future__ import annotations

import numpy as np

from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import choose_apart


class Turns:
    """Picks rank after rank, in the order of the candidates."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, allowed: Flags) -> int:
        indices = np.flatnonzero(allowed)
        turn, self._next = self._next % len(indices), self._next + 1
        return int(indices[turn])


class RoundRobin:
    """Each rank in turn, prefill and decode ranks apart. No parameters."""

    name = "round_robin"

    def __init__(self) -> None:
        self._prefill_turns, self._decode_turns = Turns(), Turns()

    def choose(self, candidates: Candidates) -> Choice | None:
        return choose_apart(candidates, self._prefill_turns, self._decode_turns)
