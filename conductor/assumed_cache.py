"""What instances without KV events are taken to hold: what was routed to them, corrected by what they report."""

from __future__ import annotations

import msgspec

from cache_index import ApproximateResidency, CacheIndex, Holder
from cache_index.assumed_runs import LastUsed
from conductor.cluster import EngineFacts
from conductor.explanation import PlacementRecord
from conductor.placement import Usage
from conductor.prefix_lookup import hashes_of, namespace_of


class _Assumption(msgspec.Struct, frozen=True, gc=False):
    holder: Holder
    block_size: int
    last_used: LastUsed  # of the leading blocks that were assumed before the placement


class AssumedCache:
    """Books of the placements whose prefill instance publishes no events; all others pass it by."""

    def __init__(self, index: CacheIndex) -> None:
        self._residency = ApproximateResidency(index)
        self._predicted = self._residency.predicted
        self._open: dict[str, _Assumption] = {}  # those that an engine could contradict

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

    def placed(self, record: PlacementRecord, now_s: float) -> None:
        """A prompt goes to an instance to be prefilled; what is sent there counts as cached."""
        request, holder, group = record.request, record.prefill.holder, record.cache_group
        if holder not in self._predicted or group is None or not len(request.tokens):
            return
        namespace = group.namespace
        if request.cache_tenant != namespace.tenant:
            namespace = namespace_of(request, group)
        hashes = hashes_of(request, namespace.block_size)
        assert hashes is not None
        last_used = self._residency.assume(holder, namespace, hashes, now_s)
        if last_used.stops:
            self._open[record.placement.placement_id] = _Assumption(holder, namespace.block_size, last_used)

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
        if cached_blocks < len(assumption.last_used) - 1:
            self._residency.evicted(assumption.holder, assumption.last_used[cached_blocks])
