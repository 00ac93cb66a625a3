"""Several streams that tell of one holder, each of its own tiers.

An engine publishes what its device has, a store connector what lies in host memory. When the engine clears
its cache or its stream has a gap, only what *that* stream told is void. A stream that is given a scope of
the index instead of the index itself clears no tiers but its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier


class _Scope:
    """Something that can be cleared, seen through some of its tiers; all else is the thing itself."""

    def __init__(self, whole: Any, tiers: frozenset[Tier]) -> None:
        self._whole = whole
        self._tiers = tiers

    def clear(self, holder: Holder, tier: Tier | None = None) -> None:
        for each in self._tiers if tier is None else self._tiers & {tier}:
            self._whole.clear(holder, each)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _IndexScope(_Scope):
    """An index; streams that apply compiled kernels clear its slots directly."""

    @property
    def _slots(self) -> _Scope:
        return _Scope(self._whole._slots, self._tiers)


def scoped_index(index: CacheIndex, tiers: Iterable[Tier]) -> CacheIndex:
    """The index for one stream among several of the same holder; it clears ``tiers`` only."""
    return cast(CacheIndex, _IndexScope(index, frozenset(tiers)))
