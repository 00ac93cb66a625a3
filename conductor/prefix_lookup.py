"""What is cached of a prompt, asked once per placement: the seam between scheduling and the cache index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Namespace, PromptMatcher, sequence_hashes
from conductor.expected_cache import STRIDE, ExpectedCache
from conductor.placement import Hashes, PlacementRequest
from conductor.roster import CacheGroup
from conductor.shared_pools import SharedPool, SharedPools

Levels = NDArray[np.int32]


def hashes_of(request: PlacementRequest, block_size: int) -> Hashes | None:
    """Sequence hashes of a prompt's full blocks; None where neither they nor the tokens are known.

    Those of one request are computed once per block size.
    """
    hashes, tokens = request.known_hashes.get(block_size), request.tokens
    if hashes is not None and len(hashes) == len(tokens) // block_size:
        return hashes
    if request.hashes is not None:
        return request.hashes if request.hashes_block_size == block_size else None
    if not len(tokens):
        return None
    hashes = request.known_hashes[block_size] = sequence_hashes(
        tokens, block_size, cache_salt=request.cache_salt
    )
    return hashes


class PrefixLookup(Protocol):
    """Longest cached prefixes of a request's prompt."""

    def levels(self, request: PlacementRequest, group: CacheGroup) -> Levels | None:
        """Matched blocks [holder row of the index, tier], as `CacheIndex.match`; None when nothing can be said."""
        ...

    def prefill_begins(
        self, placement_id: str, request: PlacementRequest, group: CacheGroup, holder: Holder
    ) -> None:
        """The prompt was placed: it will be in ``holder``'s cache when what is placed behind it begins."""
        ...

    def prefill_ended(self, placement_id: str) -> None:
        """It is cached, or it never will be: from now on only what the engine reports counts."""
        ...

    def holder_left(self, holder: Holder) -> None:
        """The holder leaves the cluster: nothing placed there will be cached."""
        ...


class IndexLookup:
    """The live index, what instances can load from ``pools``, and what prefills under way will add."""

    def __init__(
        self, index: CacheIndex, matcher: PromptMatcher | None = None, pools: Sequence[SharedPool] = ()
    ) -> None:
        self._matcher = matcher or PromptMatcher(index)
        self._pools = SharedPools(index, pools) if pools else None
        self._expected = ExpectedCache(index)
        self.prefill_ended = self._expected.ended

    def levels(self, request: PlacementRequest, group: CacheGroup) -> Levels | None:
        namespace = group.namespace
        if request.cache_tenant != namespace.tenant:
            namespace = namespace_of(request, group)
        tokens, block_size, salt = request.tokens, namespace.block_size, request.cache_salt
        hashes = request.known_hashes.get(block_size)
        if request.hashes is None and (0 if hashes is None else len(hashes)) < len(tokens) // block_size:
            hashes, levels = self._matcher.match_tokens(namespace, tokens, cache_salt=salt, known=hashes)
            request.known_hashes[block_size] = hashes
        else:
            hashes = hashes_of(request, block_size)
            if hashes is None:
                return None
            levels = self._matcher.match(namespace, tokens, cache_salt=salt, hashes=hashes)
        if self._pools is not None:
            self._pools.raise_levels(levels)
        if len(hashes) >= STRIDE:
            self._expected.raise_levels(levels, namespace, hashes)
        return levels

    def prefill_begins(
        self, placement_id: str, request: PlacementRequest, group: CacheGroup, holder: Holder
    ) -> None:
        if request.hashes is None and len(request.tokens) < STRIDE * group.namespace.block_size:
            return  # nothing is expected of so few blocks
        hashes = hashes_of(request, group.namespace.block_size)
        if hashes is not None:
            self._expected.expect(placement_id, holder, namespace_of(request, group), hashes)

    def holder_left(self, holder: Holder) -> None:
        self._expected.forget(holder)


def namespace_of(request: PlacementRequest, group: CacheGroup) -> Namespace:
    """Under which a request's blocks stand in the index: those of a tenant are its own."""
    if request.cache_tenant == group.namespace.tenant:
        return group.namespace
    return replace(group.namespace, tenant=request.cache_tenant)
