"""LMCache itself, driven by the executor: real servers with engines attached, over a shared L2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from lmcache_processes import (
    COMMAND,
    MODEL,
    RealServer,
    bench_prompt,
    real_controller,
    real_coordinator,
    real_servers,
    reporting_to,
)
from tier_actions import host, order, prefix_of

from cache_index import CacheIndex, Holder, Tier
from cache_index.lmcache_directory import LMCacheDirectory, server_holder
from conductor.actions import ActionKind, ExecutionError, Place
from conductor.executors import LMCacheControllerExecutor, LMCacheServerExecutor

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not COMMAND.exists(), reason="LMCache is not installed: make test-lmcache"),
]

STORED = 1  # the number of the prompt that the first server's engine stores


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_coordinator(tmp_path_factory.mktemp("coordinator")) as url:
        yield url


@pytest.fixture(scope="module")
def servers(coordinator: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    """The first has had an engine that stored a prompt of four chunks; the second has one, the third never."""
    folder, names = tmp_path_factory.mktemp("lmcache"), ["s1", "s2", "s3"]
    with real_servers(names, folder, *reporting_to(coordinator)) as started:
        started[0].run_engine(STORED, 1100)
        with started[1].engine(7, 512):
            yield started


@pytest.fixture
async def executor(coordinator: str, servers: list[RealServer]) -> AsyncIterator[LMCacheServerExecutor]:
    urls = {server.instance_id: server.url for server in servers}
    async with httpx.AsyncClient(trust_env=False) as client:
        directory = LMCacheDirectory(CacheIndex())
        yield LMCacheServerExecutor(client, directory, urls=urls, coordinator_url=coordinator)


def place(server: RealServer, tier: Tier = Tier.HOST) -> Place:
    return Place(server_holder(server.instance_id), tier)


async def test_a_prefix_comes_from_the_shared_store_into_a_servers_memory(
    servers: list[RealServer], executor: LMCacheServerExecutor
) -> None:
    servers[1].clear_memory()
    prefix = prefix_of(bench_prompt(STORED, 1100), MODEL)  # 1,101 tokens: 68 blocks, 4 chunks
    assert executor.can(ActionKind.PREFETCH, place(servers[1], Tier.DISK), place(servers[1]))
    prefetch = order(ActionKind.PREFETCH, prefix, place(servers[1]), source=place(servers[1], Tier.DISK))
    assert await executor.execute(prefetch) == 64
    assert servers[1].memory_objects() == 4
    assert await executor.execute(prefetch) == 64  # what is there already counts


async def test_what_the_store_does_not_have_is_told(
    servers: list[RealServer], executor: LMCacheServerExecutor
) -> None:
    unknown = prefix_of(range(50_000, 51_024), MODEL)
    assert await executor.execute(order(ActionKind.PREFETCH, unknown, place(servers[1]))) == 0
    longer = prefix_of([*bench_prompt(STORED, 1100), *range(600)], MODEL)
    assert await executor.execute(order(ActionKind.PREFETCH, longer, place(servers[1]))) == 64


async def test_what_is_in_the_store_is_pinned_and_nothing_else(
    coordinator: str, servers: list[RealServer], executor: LMCacheServerExecutor
) -> None:
    prompt, target = bench_prompt(STORED, 1100), place(servers[0], Tier.DISK)
    prefix = prefix_of([*prompt, *range(600)], MODEL)  # six chunks, of which four are stored
    async with asyncio.timeout(30):
        while (done := await executor.execute(order(ActionKind.PIN, prefix, target))) < 64:
            await asyncio.sleep(0.2)  # what the server did has to be told
    assert done == 64
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{coordinator}/cache/pins")).json()["total"] == 4
        assert await executor.execute(order(ActionKind.UNPIN, prefix, target)) == 96
        assert (await client.get(f"{coordinator}/cache/pins")).json()["total"] == 0
    unknown = prefix_of(range(60_000, 61_024), MODEL)
    assert await executor.execute(order(ActionKind.PIN, unknown, target)) == 0


async def test_a_server_without_an_engine_cannot(
    servers: list[RealServer], executor: LMCacheServerExecutor
) -> None:
    prefix = prefix_of(bench_prompt(STORED, 1100), MODEL)
    with pytest.raises(ExecutionError, match="no layout registered") as error:
        await executor.execute(order(ActionKind.PREFETCH, prefix, place(servers[2])))
    assert not error.value.retryable


async def test_chunks_are_dropped_from_memory_and_from_the_store(
    servers: list[RealServer], executor: LMCacheServerExecutor
) -> None:
    servers[0].run_engine(20, 1100)
    prefix = prefix_of(bench_prompt(20, 1100), MODEL)
    assert await executor.execute(order(ActionKind.PREFETCH, prefix, place(servers[1]))) == 64
    before = servers[1].memory_objects()
    tail = order(ActionKind.EVICT, prefix, place(servers[1]), start=20)  # chunk 1 is only in part of it
    assert await executor.execute(tail) == 32
    assert servers[1].memory_objects() == before - 2
    assert await executor.execute(tail) == 0
    stored = order(ActionKind.EVICT, prefix, place(servers[1], Tier.DISK), start=32)
    assert await executor.execute(stored) == 32
    assert await executor.execute(order(ActionKind.PREFETCH, prefix, place(servers[1]))) == 32
    for tier in (Tier.HOST, Tier.DISK):
        head = order(ActionKind.EVICT, prefix, place(servers[1], tier), stop=16)
        assert await executor.execute(head) == 16
    assert await executor.execute(order(ActionKind.PREFETCH, prefix, place(servers[1]))) == 0


async def test_a_whole_memory_is_cleared(servers: list[RealServer], executor: LMCacheServerExecutor) -> None:
    assert servers[0].memory_objects() > 0
    await executor.execute(order(ActionKind.EVICT, None, place(servers[0])))
    assert servers[0].memory_objects() == 0


def test_engines_are_not_its_business(executor: LMCacheServerExecutor, servers: list[RealServer]) -> None:
    assert not executor.can(ActionKind.PREFETCH, None, Place(Holder("s1"), Tier.HOST))
    assert not executor.can(ActionKind.DEMOTE, place(servers[0]), place(servers[0], Tier.DISK))
    assert not executor.can(ActionKind.PIN, None, place(servers[0]))


async def test_a_controller_without_workers_answers_and_refuses(tmp_path: Path) -> None:
    with real_controller(tmp_path) as url:
        async with httpx.AsyncClient(trust_env=False) as client:
            executor = LMCacheControllerExecutor(client, url, {"p0": "lm0", "p1": "lm1"})
            prefix = prefix_of(range(600), MODEL)
            assert await executor.lookup(list(range(600))) == {}
            assert await executor.health("p0") == {}
            for action in (
                order(ActionKind.PIN, prefix, host("p0")),
                order(ActionKind.COMPRESS, prefix, host("p0")),
                order(ActionKind.REPLICATE, prefix, host("p1"), source=host("p0")),
            ):
                with pytest.raises(ExecutionError, match="registered with the controller") as error:
                    await executor.execute(action)
                assert not error.value.retryable
