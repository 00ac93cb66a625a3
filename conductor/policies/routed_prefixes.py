"""A tree of what was routed where: a guess at caches that no events tell of."""

from __future__ import annotations

from collections import OrderedDict

from conductor.placement import Hashes


class RoutedPrefixes:
    """Blocks of the prompts that were routed, by sequence hash, each with the rank that had it last.

    Kept least recently routed first, a block after those that follow it in its prompt, so that what is dropped
    is always a leaf: a block that is here has all blocks before it here.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def match(self, hashes: Hashes) -> tuple[int, int]:
        """How many leading blocks are known, and the row of the rank that had the last of them (-1: none)."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if int(hashes[middle - 1]) in self._rows:
                low = middle
            else:
                high = middle - 1
        return low, self._rows[int(hashes[low - 1])] if low else -1

    def insert(self, hashes: Hashes, row: int, max_blocks: int) -> None:
        """The prompt was routed to the rank of that row; all but ``max_blocks`` blocks are dropped."""
        for block in reversed(hashes.tolist()):
            self._rows[block] = row
            self._rows.move_to_end(block)
        while len(self._rows) > max_blocks:
            self._rows.popitem(last=False)
