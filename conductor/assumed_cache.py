"""What instances without KV events are taken to hold: what was routed to them, corrected by what they report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_index import ApproximateResidency, CacheIndex, Holder, sequence_hashes
from conductor.cluster import Cluster, EngineFacts
from conductor.explanation import PlacementRecord
from conductor.placement import Usage
from conductor.roster import cache_namespace


@dataclass(frozen=True, slots=True)
class _Assumption:
    holder: Holder
    block_size: int
    last_used_s: NDArray[np.float64]  # of the leading blocks that were assumed before the placement


class AssumedCache:
    """Books of the placements whose prefill instance publishes no events; all others pass it by."""

    def __init__(self, index: CacheIndex) -> None:
        self._residency = ApproximateResidency(index)
        self._open: dict[str, _Assumption] = {}

    def follow(self, holder: Holder, facts: EngineFacts) -> None:
        """An engine came up: assume for it exactly if it does not tell."""
        if facts.publishes_events:
            self._residency.remove(holder)
        elif facts.kv_capacity_blocks is not None:
            self._residency.add(holder, facts.kv_capacity_blocks)
        else:
            self._residency.add(holder)

    def forget(self, holder: Holder) -> None:
        """The engine is gone, and its cache with it."""
        self._residency.forget(holder)

    def placed(self, record: PlacementRecord, cluster: Cluster, now_s: float) -> None:
        """A prompt goes to an instance of ``cluster`` to be prefilled; what is sent there counts as cached."""
        request, holder = record.request, record.prefill.holder
        if not self._residency.is_predicted(holder) or not len(request.tokens):
            return
        owner = cluster[holder.instance_id]
        size = owner.block_size
        if size is None:
            return
        namespace = cache_namespace(owner, record.placement.model, size, request.cache_tenant)
        hashes = sequence_hashes(request.tokens, namespace.block_size, cache_salt=request.cache_salt)
        last_used_s = self._residency.last_used_s(holder, namespace, hashes)
        self._residency.assume(holder, namespace, hashes, now_s)
        self._open[record.placement.placement_id] = _Assumption(holder, namespace.block_size, last_used_s)

    def ended(self, placement_id: str, usage: Usage | None) -> None:
        """The request ended; the engine's own count of cached tokens corrects what was assumed before it.

        A block that was missing has been computed again by now, but whatever was used no later than it had
        been must be gone too.
        """
        assumption = self._open.pop(placement_id, None)
        if assumption is None or usage is None or usage.cached_tokens is None:
            return
        cached_blocks = usage.cached_tokens // assumption.block_size
        # A fully cached prompt recomputes its last block, so one block fewer is no contradiction.
        if cached_blocks < len(assumption.last_used_s) - 1:
            self._residency.evicted(assumption.holder, float(assumption.last_used_s[cached_blocks]))
