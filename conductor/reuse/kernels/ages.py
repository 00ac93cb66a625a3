"""Bins of age: how long ago something was used."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from cache_index.kernel_set import inlined
from conductor.reuse.kernels.layout import AGE_BINS, AGE_EDGES_S


@inlined
def age_bin(age_s):
    """The bin of an age; AGE_BINS for what is older than all."""
    at = 0
    while at < AGE_BINS and age_s >= AGE_EDGES_S[at + 1]:
        at += 1
    return at


@inlined
def within_bin(age_s, at):
    """The share of a bin that has gone by at that age."""
    return (age_s - AGE_EDGES_S[at]) / (AGE_EDGES_S[at + 1] - AGE_EDGES_S[at]) if at < AGE_BINS else 1.0
