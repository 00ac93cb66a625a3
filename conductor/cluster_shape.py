"""Clusters in a word: ``8`` is eight mixed instances, ``4p4d`` four that prefill and four that decode."""

from __future__ import annotations

import re

from conductor.placement import Role


def read_cluster_shape(text: str) -> dict[Role, int]:
    """Instances by role, those that prefill first. Raises ValueError for anything else."""
    if re.fullmatch(r"[1-9][0-9]*", text):
        return {Role.MIXED: int(text)}
    pair = re.fullmatch(r"([1-9][0-9]*)p([1-9][0-9]*)d", text)
    if pair is None:
        raise ValueError(
            f"{text!r} is no cluster shape: neither a number of mixed instances (8) nor a split such as 4p4d"
        )
    return {Role.PREFILL: int(pair[1]), Role.DECODE: int(pair[2])}
