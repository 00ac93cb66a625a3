"""Saving and loading the cache index, and what matching notices of it.

Every block is distinct, has one holder and an engine's name besides, which is the most that a residency takes.
Excluded: streams, sockets, the start of a process. The disk is that of the temporary folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Namespace, Tier, load, save

NAMESPACE = Namespace("model", 16)
CHAIN_BLOCKS = 256
ROUNDS = 3


def filled(blocks: int) -> tuple[CacheIndex, list[NDArray[np.uint64]]]:
    """An index of chains of CHAIN_BLOCKS, and some of them."""
    index, rng, kept = CacheIndex(), np.random.default_rng(1), []
    holders = [Holder(f"engine-{number}") for number in range(8)]
    for holder in holders:
        index.register(holder)
    for number in range(blocks // CHAIN_BLOCKS):
        chain = rng.integers(1, 1 << 63, CHAIN_BLOCKS, dtype=np.uint64)
        index.store_linked(holders[number % 8], Tier.DEVICE, NAMESPACE, chain, chain ^ np.uint64(5))
        if number % 100 == 0:
            kept.append(chain)
    return index, kept


class Matching:
    """Matches on a thread of its own; the longest of them is what a save does to others."""

    def __init__(self, index: CacheIndex, chains: list[NDArray[np.uint64]]) -> None:
        self.longest_s = 0.0
        self._index = index
        self._chains = chains
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Matching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.0005):
            begin_s = time.perf_counter()
            self._index.match(NAMESPACE, self._chains[number % len(self._chains)])
            self.longest_s = max(self.longest_s, time.perf_counter() - begin_s)
            number += 1


def measure(blocks: int) -> dict[str, float]:
    """The best of ROUNDS."""
    index, chains = filled(blocks)
    figures: dict[str, float] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            figures[name] = min(value, figures.get(name, value))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        for _ in range(ROUNDS):
            with Matching(index, chains) as matching:
                report = save(index, path)
            note(save_s=report.took_s, locked_s=report.locked_s, longest_match_s=matching.longest_s)
            note(bytes_per_block=report.file_bytes / index.stats().blocks)
            begin_s = time.perf_counter()
            load(path)
            note(load_s=time.perf_counter() - begin_s)
    return {f"{name}_{blocks // 1_000_000}M_blocks": value for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="one and four million blocks: within 50 s")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for millions in (1, 4) if options.quick else (1, 4, 16):
        figures |= measure(millions * 1_000_000)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:<40}{value:>12,.4f}")


if __name__ == "__main__":
    main()
