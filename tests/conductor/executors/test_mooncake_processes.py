"""A Mooncake store itself, driven by the executor: a real master and nodes over TCP.

Copy tasks need the store's library in this interpreter; the other actions only the master's admin port.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator

import httpx
import numpy as np
import pytest
from mooncake_processes import FOLDER, RealMaster, real_master
from tier_actions import order

from cache_index import Holder, Namespace, Tier
from cache_index.hashing import Hashes
from conductor.actions import ActionKind, ExecutionError, Place, Prefix
from conductor.executors import MooncakeClient, MooncakeExecutor, MooncakeStore, segment_holder

pytestmark = [
    pytest.mark.mooncake,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not (FOLDER / "mooncake_master").exists(), reason="Mooncake is not installed: make test-mooncake"
    ),
]
with_library = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="the store's library is not installed"
)

POOL = "pool-0"
PREFIX = Prefix(Namespace("m", 16), np.arange(0x1000, 0x1006, dtype=np.uint64))
KEYS = [f"0x{name:016x}" for name in range(0x1000, 0x1004)]  # of the first four of its six blocks


def all_named(holder: Holder, namespace: Namespace, hashes: Hashes) -> list[int | None]:
    return list(hashes.tolist())


def segment(name: str) -> Place:
    return Place(segment_holder(POOL, name), Tier.HOST)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMaster]:
    with real_master(tmp_path_factory.mktemp("mooncake")) as started:
        yield started


@pytest.fixture
async def executor(master: RealMaster) -> AsyncIterator[MooncakeExecutor]:
    copies = MooncakeClient(master.rpc) if importlib.util.find_spec("mooncake") else None
    async with httpx.AsyncClient(trust_env=False) as client:
        store = MooncakeStore(master.admin_url, copies=copies)
        yield MooncakeExecutor(client, {POOL: store}, all_named)
    if copies is not None:
        copies.close()


@with_library
async def test_a_prefix_is_copied_to_another_node(master: RealMaster, executor: MooncakeExecutor) -> None:
    with master.node(KEYS), master.node() as target:
        copy = order(ActionKind.REPLICATE, PREFIX, segment(target), source=Place(Holder(POOL), Tier.REMOTE))
        assert executor.can(copy.kind, copy.source, copy.target)
        assert await executor.execute(copy) == 4  # the last two blocks are in no node
        assert [master.replicas(key) for key in KEYS] == [2] * 4


@with_library
async def test_a_prefix_is_moved(master: RealMaster, executor: MooncakeExecutor) -> None:
    names = [f"0x{name:016x}" for name in range(0x2000, 0x2003)]
    prefix = Prefix(Namespace("m", 16), np.arange(0x2000, 0x2003, dtype=np.uint64))
    with master.node(names) as source, master.node() as target:
        move = order(ActionKind.MOVE, prefix, segment(target), source=segment(source), stop=2)
        assert executor.can(move.kind, move.source, move.target)
        assert await executor.execute(move) == 2
        assert master.segment_bytes(target) == 2048
        assert [master.replicas(name) for name in names] == [1] * 3
        with pytest.raises(ExecutionError, match="takes no task"):
            await executor.execute(order(ActionKind.REPLICATE, prefix, segment("nowhere:1")))


async def test_what_is_in_memory_needs_no_promotion(master: RealMaster, executor: MooncakeExecutor) -> None:
    names = [f"0x{name:016x}" for name in range(0x3000, 0x3002)]
    prefix = Prefix(Namespace("m", 16), np.arange(0x3000, 0x3005, dtype=np.uint64))
    with master.node(names):
        promote = order(ActionKind.PREFETCH, prefix, Place(Holder(POOL), Tier.REMOTE))
        assert executor.can(promote.kind, promote.source, promote.target)
        assert await executor.execute(promote) == 2


async def test_a_node_is_drained(master: RealMaster, executor: MooncakeExecutor) -> None:
    names = [f"0x{name:016x}" for name in range(0x4000, 0x4004)]
    with master.node(names) as leaving, master.node():
        drain = order(ActionKind.EVICT, None, segment(leaving))
        assert executor.can(drain.kind, None, drain.target)
        async with asyncio.timeout(60):
            await executor.execute(drain)
        assert [master.replicas(name) for name in names] == [1] * 4
    with pytest.raises(ExecutionError, match="SEGMENT_NOT_FOUND"):
        await executor.execute(order(ActionKind.EVICT, None, segment("nowhere:1")))
