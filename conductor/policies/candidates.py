"""What a policy sees of one decision, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conductor.cluster import RankState
from conductor.costs import Floats, Ints

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Estimates for one request over the ranks that serve its model; every array has one entry a rank.

    A *whole* placement prefills and decodes on one mixed rank. A *pair* prefills on one rank and decodes on
    another; any prefill rank may be paired with any decode rank of the same hand-off protocol.
    """

    ranks: Sequence[RankState]
    can_prefill: Flags  # role prefill, a candidate now
    can_decode: Flags  # role decode, a candidate now
    is_mixed: Flags  # role mixed, a candidate now
    prompt_tokens: int
    overlap_tokens: Ints  # usable cached prefix on the device tier
    queue_s: Floats  # until a prefill placed now would start
    prefill_s: Floats  # prefill of what is not cached
    hand_off_s: Floats  # moving what this rank lacks, were it the decode rank of a pair
    tbt_s: Floats  # decode step with this request aboard
    context_tokens: Ints
    pending_prefills: Ints
    active_decodes: Ints
    placements: Ints  # ever placed, to spread ties
    excluded: dict[str, str]  # instance -> why it is no candidate
    ttft_objective_s: float
    tbt_objective_s: float

    @property
    def ttft_s(self) -> Floats:
        """Queue and prefill on each rank, before any hand-off."""
        ttft: Floats = self.queue_s + self.prefill_s
        return ttft


@dataclass(frozen=True, slots=True)
class Choice:
    """Indices into `Candidates.ranks`; equal for a whole placement."""

    prefill: int
    decode: int


class Policy(Protocol):
    """Chooses a pair, or one mixed rank, for one request."""

    @property
    def name(self) -> str: ...

    def choose(self, candidates: Candidates) -> Choice | None:
        """The choice, or None when no placement is possible."""
        ...


def least(key: Floats, allowed: Flags, placements: Ints) -> int | None:
    """Index of the smallest key among the allowed, ties to the rank placed on least; None if none allowed."""
    indices = np.flatnonzero(allowed)
    if not len(indices):
        return None
    keys = key[indices]
    ties = indices[keys <= keys.min() + 1e-12]
    return int(ties[np.argmin(placements[ties])])
