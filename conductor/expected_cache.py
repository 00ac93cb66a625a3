"""What prefills under way will leave in their engines' caches, so that a burst of sharers can land together.

An engine works off its prefills in order: a prompt placed behind another one that shares its beginning finds it
cached when its turn comes. Engines report blocks only once they are computed, so until then the expectation is kept
here, every eighth block of each prompt: a sequence hash stands for everything before it. Of these marks nobody asks
for most. Somebody whose prompt begins alike is compared with each of a few prompts; those of a crowd are indexed.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Namespace, Tier
from cache_index.kernel_set import compiled
from conductor.costs.held import RAISE_BY_PROMPT, raise_by_prompt, raise_levels
from conductor.placement import Hashes

STRIDE = 8
FEW = 8  # prompts that begin alike


class _Expectation(msgspec.Struct, frozen=True, gc=False):
    holder: Holder
    row: int  # of the holder in the index
    namespace: Namespace
    hashes: Hashes
    first: int  # of the marks, as the index keys it

    @property
    def marks(self) -> Hashes:
        return self.hashes[STRIDE - 1 :: STRIDE]


class _Alike(msgspec.Struct):
    """Prompts of one first mark."""

    open: int = 0
    unmarked: dict[str, _Expectation] = {}  # of these, not indexed, by placement


class ExpectedCache:
    """Prompts that are being prefilled, by placement."""

    def __init__(self, index: CacheIndex) -> None:
        self._index = index
        self._marks = CacheIndex()
        self._rows = np.zeros(16, np.int64)  # of the marks' index -> of the real one
        self._open: dict[str, _Expectation] = {}
        self._alike: dict[int, _Alike] = {}  # by first mark
        self._raise_by_prompt = compiled(raise_by_prompt, *RAISE_BY_PROMPT)

    def expect(self, placement_id: str, holder: Holder, namespace: Namespace, hashes: Hashes) -> None:
        """``holder`` is about to compute a prompt."""
        if len(hashes) < STRIDE:
            return
        row = self._index.holder_id(holder)
        if row is None:
            row = self._index.register(holder)  # or matches would have no row for it
        first = hashes.item(STRIDE - 1) ^ namespace.domain
        expectation = _Expectation(holder, row, namespace, hashes, first)
        alike = self._alike.get(first)
        if alike is None:
            alike = self._alike[first] = _Alike()
        alike.open += 1
        alike.unmarked[placement_id] = self._open[placement_id] = expectation

    def ended(self, placement_id: str) -> None:
        """The prefill ended, one way or the other: what it left is the engine's to report."""
        expectation = self._open.pop(placement_id, None)
        if expectation is None:
            return
        alike = self._alike[expectation.first]
        alike.open -= 1
        if not alike.open:
            del self._alike[expectation.first]
        if alike.unmarked.pop(placement_id, None) is None:
            self._marks.remove(expectation.holder, Tier.DEVICE, expectation.namespace, expectation.marks)

    def forget(self, holder: Holder) -> None:
        """The holder is gone, and its row may be given away."""
        for placement_id in [p for p, expectation in self._open.items() if expectation.holder == holder]:
            self.ended(placement_id)
        self._marks.unregister(holder)

    @property
    def holders(self) -> int:
        """Whose marks were ever indexed, and who are not forgotten."""
        return len(self._marks.registered()[1])

    def raise_levels(self, levels: NDArray[np.int32], namespace: Namespace, hashes: Hashes) -> None:
        """Count what is expected as held: ``levels`` [holder row, tier] are blocks as the index matched."""
        if len(hashes) < STRIDE:
            return
        alike = self._alike.get(hashes.item(STRIDE - 1) ^ namespace.domain)
        if alike is None:
            return
        unmarked = alike.unmarked
        if alike.open > FEW:
            for expectation in unmarked.values():
                self._mark(expectation)
            unmarked.clear()
        for expectation in unmarked.values():
            self._raise_by_prompt(levels, expectation.row, hashes, expectation.hashes, STRIDE)
        if alike.open > len(unmarked):
            expected = self._marks.match(namespace, hashes[STRIDE - 1 :: STRIDE])
            raise_levels(levels, expected, self._rows, STRIDE)

    def _mark(self, expectation: _Expectation) -> None:
        holder = expectation.holder
        row = self._marks.register(holder)
        if row >= len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(row + 1, np.int64)])
        self._rows[row] = expectation.row
        self._marks.store(holder, Tier.DEVICE, expectation.namespace, expectation.marks)
