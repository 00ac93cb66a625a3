"""What a tier keeps when it keeps by learned value: room is made by dropping what is worth least."""

from __future__ import annotations

from typing import Final

import numpy as np

from conductor.reuse.kernels.layout import Ints, Words
from conductor.reuse.model import ReuseModel

_FREED_AT_ONCE: Final = 128  # a full tier frees one block in so many; half of those are free on average
_VALUE_OF_DEPTH: Final = 1e-14  # hits a block-second: decides between equal values only


class RetainedBlocks:
    """The blocks of a tier of ``capacity_blocks``, ranked by a model that observes the same requests.

    Values change with time, so room is made by valuing everything; a 128th of the tier is freed at once, which
    makes that cost 128 valuations for each stored block. Of equal value, ends of prompts go before beginnings.
    """

    __slots__ = ("_count", "_depths", "_hashes", "_model", "_stored", "capacity_blocks")

    def __init__(self, capacity_blocks: int, model: ReuseModel) -> None:
        """Raises ValueError when there is no room at all."""
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._model = model
        self._stored: set[int] = set()
        self._hashes = np.zeros(capacity_blocks, np.uint64)  # of the stored blocks, the first _count
        self._depths = np.zeros(capacity_blocks, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._stored

    def cached_prefix(self, prompt: Words) -> int:
        """Blocks at the beginning of a prompt that are stored."""
        count = 0
        for block_hash in prompt.tolist():
            if block_hash not in self._stored:
                break
            count += 1
        return count

    def keep(self, prompt: Words, now_s: float) -> list[int]:
        """Store what is worth it of a prompt that the model has observed; returns the blocks dropped for it.

        What ranks below all that is stored is not stored.
        """
        missing: dict[int, int] = {}
        for depth, block_hash in enumerate(prompt.tolist()):
            if block_hash not in self._stored:
                missing.setdefault(block_hash, depth)
        hashes = np.array(list(missing), np.uint64)
        depths = np.array(list(missing.values()), np.int64)
        if self._count + len(hashes) <= self.capacity_blocks:
            self._append(hashes, depths)
            self._stored.update(missing)
            return []
        hashes = np.concatenate([self._hashes[: self._count], hashes])
        depths = np.concatenate([self._depths[: self._count], depths])
        ranks = self._model.retention_values(hashes, now_s) - _VALUE_OF_DEPTH * depths
        surplus = len(hashes) - self.capacity_blocks + self.capacity_blocks // _FREED_AT_ONCE
        stays = np.ones(len(hashes), np.bool_)
        stays[np.argpartition(ranks, surplus - 1)[:surplus]] = False
        gone = hashes[~stays].tolist()
        dropped = [block_hash for block_hash in gone if block_hash in self._stored]
        self._count = 0
        self._append(hashes[stays], depths[stays])
        self._stored.update(missing)
        self._stored.difference_update(gone)
        return dropped

    def _append(self, hashes: Words, depths: Ints) -> None:
        end = self._count + len(hashes)
        self._hashes[self._count : end] = hashes
        self._depths[self._count : end] = depths
        self._count = end
