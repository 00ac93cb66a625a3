"""A busy cluster, compressed in time: memory stays as it is, and matches stay exact.

Engines store sessions (a prefix that many share, and a tail of their own) and drop the oldest when they are
full, lose single blocks in mid-chain, reset their caches, and vanish while others come. The population is
constant from the warm-up on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from index_oracle import NAMESPACE
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Tier

ENGINES = 64
SESSIONS = 40  # per engine; fewer than the copies of a block that are counted
GROUPS = 16
PREFIX_BLOCKS, TAIL_BLOCKS = 32, 96
BLOCKS = PREFIX_BLOCKS + TAIL_BLOCKS
ENGINE_KEY = np.uint64(1)  # what an engine calls a block: hash + 1
Hashes = NDArray[np.uint64]


@dataclass(eq=False)
class Session:
    group: int
    hashes: Hashes
    usable: int = BLOCKS  # blocks before the first that was lost


@dataclass(eq=False)
class Engine:
    holder: Holder
    sessions: deque[Session]


class Cluster:
    """The index, and what the engines really have."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.index = CacheIndex()
        self.prefixes = [self._words(PREFIX_BLOCKS) for _ in range(GROUPS)]
        self.names = 0
        self.engines = [self._new_engine() for _ in range(ENGINES)]
        self.gone: deque[Hashes] = deque(maxlen=100)
        self.blocks_stored = 0

    def _words(self, count: int) -> Hashes:
        return self.random.integers(1, (1 << 64) - 1, count, dtype=np.uint64)

    def _new_engine(self) -> Engine:
        self.names += 1
        holder = Holder(f"engine-{self.names}")
        self.index.register(holder)
        return Engine(holder, deque())

    def store(self, engine: Engine) -> None:
        group = int(self.random.integers(GROUPS))
        hashes = np.concatenate([self.prefixes[group], self._words(TAIL_BLOCKS)])
        if self.random.random() < 0.2:  # a session that another engine has as well
            other = self.engines[int(self.random.integers(ENGINES))]
            if other is not engine and other.sessions:
                group, hashes = other.sessions[-1].group, other.sessions[-1].hashes
        if any(session.hashes is hashes for session in engine.sessions):
            return
        self.index.store_linked(engine.holder, Tier.DEVICE, NAMESPACE, hashes, hashes + ENGINE_KEY)
        engine.sessions.append(Session(group, hashes))
        self.blocks_stored += BLOCKS

    def drop_oldest(self, engine: Engine) -> None:
        session = engine.sessions.popleft()
        self.index.remove_linked(engine.holder, Tier.DEVICE, session.hashes[::-1] + ENGINE_KEY)
        self.gone.append(session.hashes)

    def lose_a_block(self, engine: Engine) -> None:
        session = engine.sessions[int(self.random.integers(len(engine.sessions)))]
        place = int(self.random.integers(PREFIX_BLOCKS, session.usable + 1))
        if PREFIX_BLOCKS < place < session.usable:
            lost = session.hashes[place : place + 1] + ENGINE_KEY
            self.index.remove_linked(engine.holder, Tier.DEVICE, lost)
            session.usable = place

    def reset(self, engine: Engine) -> None:
        self.index.clear(engine.holder)
        engine.sessions.clear()

    def replace(self, number: int) -> None:
        self.index.unregister(self.engines[number].holder)
        self.engines[number] = self._new_engine()

    def run(self, blocks: int) -> None:
        """Until so many more blocks were stored."""
        goal = self.blocks_stored + blocks
        while self.blocks_stored < goal:
            number = int(self.random.integers(ENGINES))
            engine = self.engines[number]
            self.store(engine)
            while len(engine.sessions) > SESSIONS:
                self.drop_oldest(engine)
            chance = self.random.random()
            if chance < 0.05 and engine.sessions:
                self.lose_a_block(engine)
            elif chance < 0.051:
                self.reset(engine)
            elif chance < 0.0515:
                self.replace(number)

    def expected(self, engine: Engine, group: int, hashes: Hashes) -> int:
        same_group = [session for session in engine.sessions if session.group == group]
        usable = [session.usable for session in same_group if session.hashes is hashes]
        return max(usable, default=PREFIX_BLOCKS if same_group else 0)

    def check(self, prompts: int) -> None:
        """Prompts that are cached somewhere, and such that were."""
        asked = []
        for _ in range(prompts):
            engine = self.engines[int(self.random.integers(ENGINES))]
            if engine.sessions:
                session = engine.sessions[int(self.random.integers(len(engine.sessions)))]
                asked.append((session.group, session.hashes))
        groups = {prefix[0]: group for group, prefix in enumerate(self.prefixes)}
        asked += [(groups[hashes[0]], hashes) for hashes in list(self.gone)[:prompts]]
        assert asked
        for group, hashes in asked:
            levels = self.index.match(NAMESPACE, hashes)[:, 0]
            for engine in self.engines:
                row = self.index.holder_id(engine.holder)
                assert levels[row] == self.expected(engine, group, hashes)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check_churn(rounds: int, blocks_per_round: int) -> None:
    cluster = Cluster(seed=4)
    cluster.run(4 * ENGINES * SESSIONS * BLOCKS)
    cluster.check(20)
    table_bytes, process_bytes = cluster.index.stats().bytes, resident_bytes()
    for _ in range(rounds):
        cluster.run(blocks_per_round)
        cluster.check(20)
    stats = cluster.index.stats()
    population = sum(len(engine.sessions) for engine in cluster.engines) * TAIL_BLOCKS
    assert stats.residencies < 1.2 * population
    assert stats.blocks < 1.5 * population
    assert stats.bytes <= table_bytes
    assert resident_bytes() < process_bytes + (8 << 20)


def test_churn_leaves_nothing_behind() -> None:
    check_churn(rounds=5, blocks_per_round=400_000)


@pytest.mark.extended
@pytest.mark.slow
def test_half_an_hour_of_a_busy_cluster_leaves_nothing_behind() -> None:
    """20 million blocks stored and as many removed: 64 engines with 2,800 new tokens a second each."""
    check_churn(rounds=20, blocks_per_round=1_000_000)
