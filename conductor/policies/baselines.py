"""Policies to compare with: the simplest published ones, each ignoring something that `slo` weighs."""

from __future__ import annotations

import random
from itertools import count

import numpy as np

from conductor.costs import Floats
from conductor.policies.candidates import Candidates, Choice, Flags, least


def _choose_by(c: Candidates, prefill_key: Floats, decode_key: Floats) -> Choice | None:
    """Prefill rank and decode rank each by its own key, as the gateways do: never jointly."""
    prefill = least(prefill_key, c.can_prefill | c.is_mixed, c.placements)
    if prefill is None:
        return None
    if c.is_mixed[prefill]:
        return Choice(prefill, prefill)
    decode = least(decode_key, c.can_decode, c.placements)
    return None if decode is None else Choice(prefill, decode)


def _load(c: Candidates) -> Floats:
    """Pending prefill seconds, then requests."""
    load: Floats = c.queue_s + 1e-6 * (c.pending_prefills + c.active_decodes)
    return load


class LeastLoaded:
    """Least pending prefill work, then fewest requests; knows nothing of the cache."""

    name = "least_loaded"

    def choose(self, candidates: Candidates) -> Choice | None:
        return _choose_by(candidates, _load(candidates), candidates.active_decodes.astype(np.float64))


class PrefixMatch:
    """Longest matched prefix, ties by load; decode in turn (Mooncake's open example proxy).

    Collapses when every request shares a first block.
    """

    name = "prefix_match"

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        key = -c.overlap_tokens.astype(np.float64) + 1e-3 * _load(c)
        return _choose_by(c, key, c.placements.astype(np.float64))


class RoundRobin:
    """Each rank in turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, candidates: Candidates) -> Choice | None:
        turn = next(self._turns)
        return _choose_by(
            candidates,
            _rotated(candidates.can_prefill | candidates.is_mixed, turn),
            _rotated(candidates.can_decode, turn),
        )


def _rotated(allowed: Flags, turn: int) -> Floats:
    """Keys that make the allowed rank number ``turn`` (modulo their number) the smallest."""
    keys = np.full(len(allowed), np.inf)
    indices = np.flatnonzero(allowed)
    if len(indices):
        keys[indices] = (np.arange(len(indices)) - turn) % len(indices)
    return keys


class Random:
    """Uniformly at random."""

    name = "random"

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random(0)

    def choose(self, candidates: Candidates) -> Choice | None:
        n = len(candidates.ranks)
        return _choose_by(
            candidates,
            np.array([self._random.random() for _ in range(n)]),
            np.array([self._random.random() for _ in range(n)]),
        )
