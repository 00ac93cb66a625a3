"""Choosing the prefill rank and the decode rank one after the other, as the gateways do: never jointly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conductor.costs import Floats, Ints
from conductor.policies.candidates import Candidates, Choice, Flags, Tokens

# Chooses one rank among the flagged ones, of which there is at least one.
Pick = Callable[[Flags], int]


@dataclass(frozen=True, slots=True)
class Pools:
    """Who can take the request: in a pair, where the partner must exist, or whole."""

    prefill: Flags
    decode: Flags
    whole: Flags


def pools_of(c: Candidates) -> Pools:
    """Ranks by role, less those that the request does not fit into and those without a partner."""
    prefill, decode = c.can_prefill & c.fits, c.can_decode & c.fits
    protocol = c.protocol
    if len(protocol) and protocol.min() != protocol.max():
        names = int(protocol.max()) + 1
        prefills = np.bincount(protocol[prefill], minlength=names) > 0
        decodes = np.bincount(protocol[decode], minlength=names) > 0
        prefill, decode = prefill & decodes[protocol], decode & prefills[protocol]
    elif not (prefill.any() and decode.any()):
        prefill = decode = np.zeros(len(prefill), np.bool_)
    return Pools(prefill, decode, c.is_mixed & c.fits)


def partners(c: Candidates, pool: Flags, rank: int) -> Flags:
    """Those of the pool that ``rank`` can hand off to, or be handed off from."""
    paired: Flags = pool & (c.protocol == c.protocol[rank])
    return paired


def choose_apart(c: Candidates, pick_prefill: Pick, pick_decode: Pick) -> Choice | None:
    """The prefill rank by one rule; unless it is mixed and keeps the request, the decode rank by another."""
    pools = pools_of(c)
    first = pools.prefill | pools.whole
    if not first.any():
        return None
    prefill = pick_prefill(first)
    if pools.whole[prefill]:
        return Choice(prefill, prefill)
    return Choice(prefill, pick_decode(partners(c, pools.decode, prefill)))


def least_of(c: Candidates, *keys: Floats | Ints | Tokens) -> Pick:
    """Picks by the smallest first key, ties by the next, at last to the rank placed on least."""

    def pick(allowed: Flags) -> int:
        indices = np.flatnonzero(allowed)
        for key in (*keys, c.placements):
            indices = smallest(key, indices)
        return int(indices[0])

    return pick


def smallest(key: Floats | Ints | Tokens, indices: Ints) -> Ints:
    """Those of ``indices``, at least one, whose key is the smallest up to rounding."""
    if len(indices) == 1:
        return indices
    keys = key[indices]
    lowest = keys.min()
    ties: Ints = indices[keys <= lowest + 1e-12 * max(1.0, abs(float(lowest)))]
    return ties


def requests_of(c: Candidates) -> Ints:
    """Requests placed on each rank that have not ended.

    A mixed rank counts a request as a decode from the start, so its pending prefills are among its decodes.
    """
    requests: Ints = np.maximum(c.pending_prefills, c.active_decodes)
    return requests
