"""Prefix-cache traffic of a fleet, as chains of blocks: what each worker stores, and what is asked.

``workers`` x ``sequences``: each sequence belongs to one of 256 groups (Zipf 1.0) that share a prefix of
16-64 blocks, and has 64-256 blocks in all. A worker stores a group's prefix once, then only tails. On top
eight documents of 8,192 blocks, each on a quarter of the workers, which have it to staggered depth and
store it 512 blocks at a time. Sequences are interleaved over the workers. Everything is seeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

GROUPS = 256
DOCUMENTS = 8
DOCUMENT_BLOCKS = 8192
DOCUMENT_EVENT_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Stored:
    worker: int
    parent: int | None
    hashes: Hashes


class Workload:
    """One seeded fleet; hashes have 63 bits, so that any index can hold them."""

    def __init__(self, workers: int, sequences: int, seed: int = 0) -> None:
        self.workers = workers
        self._sequences = sequences
        self._random = np.random.default_rng(seed)
        self.prefixes = [self.words(int(length)) for length in self._random.integers(16, 65, GROUPS)]
        self.documents = [self.words(DOCUMENT_BLOCKS) for _ in range(DOCUMENTS)]
        self.sampled: list[tuple[int, Hashes, Hashes]] = []  # worker, prefix, tail

    def words(self, count: int) -> Hashes:
        return self._random.integers(1, 1 << 63, count, dtype=np.uint64)

    def events(self) -> Iterator[Stored]:
        """All store events, in order; remembers some sequences in ``sampled``."""
        total = self.workers * self._sequences
        weights = 1 / np.arange(1, GROUPS + 1)
        groups = self._random.choice(GROUPS, total, p=weights / weights.sum())
        lengths = self._random.integers(64, 257, total)
        seen: set[tuple[int, int]] = set()
        every = max(1, total // 1000)
        for number in range(total):
            worker, group = number % self.workers, int(groups[number])
            prefix = self.prefixes[group]
            tail = self.words(max(1, int(lengths[number]) - len(prefix)))
            if (worker, group) not in seen:
                seen.add((worker, group))
                yield Stored(worker, None, prefix)
            yield Stored(worker, int(prefix[-1]), tail)
            if number % every == 0:
                self.sampled.append((worker, prefix, tail))
        yield from self._document_events()

    def _document_events(self) -> Iterator[Stored]:
        holders = max(1, self.workers // 4)
        for number, document in enumerate(self.documents):
            for place in range(holders):
                worker = (number * holders + place) % self.workers
                stop = max(DOCUMENT_EVENT_BLOCKS, DOCUMENT_BLOCKS * (place + 1) // holders)
                for start in range(0, stop, DOCUMENT_EVENT_BLOCKS):
                    parent = int(document[start - 1]) if start else None
                    yield Stored(worker, parent, document[start : min(stop, start + DOCUMENT_EVENT_BLOCKS)])

    def queries(self, blocks: int, count: int) -> dict[str, list[Hashes]]:
        """Prompts of ``blocks`` blocks: sequences that go on, documents, and such that nobody has."""
        sequences = [np.concatenate(self.sampled[i % len(self.sampled)][1:])[:blocks] for i in range(count)]
        return {
            "typical": [np.concatenate([each, self.words(blocks - len(each))]) for each in sequences],
            "long_document": [self.documents[i % DOCUMENTS][:blocks] for i in range(count)],
            "miss": [self.words(blocks) for _ in range(count)],
        }
