"""NVIDIA Dynamo's in-process SelectionService with the caches of a benchmark, fed over ZMQ as by its workers."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
_FIRST_PORT = 28_000  # of the workers' event sockets


async def latencies_us(
    held: list[tuple[Tokens, int]],
    queries: list[Tokens],
    block_size: int,
    calls: int,
    *,
    reserve: bool,
    under_way: int,
) -> NDArray[np.float64]:
    """Microseconds of ``select`` by hashes, or of ``select_and_reserve``, with ``under_way`` requests in progress.

    ``held`` gives each worker's document and how many blocks of it. Raises ImportError without
    `ai-dynamo-runtime`, RuntimeError when the caches do not arrive.
    """
    os.environ.setdefault("DYN_LOG", "error")
    from dynamo.llm import SelectionService, compute_block_hash_for_seq

    context = zmq.Context(io_threads=1)
    service = SelectionService(indexer_threads=2)
    sockets = []
    try:
        for worker in range(len(held)):
            socket = context.socket(zmq.PUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            endpoint = f"tcp://127.0.0.1:{_FIRST_PORT + worker}"
            socket.bind(endpoint)
            sockets.append(socket)
            await service.upsert_worker(
                {
                    "worker_id": worker + 1,
                    "model_name": "m",
                    "endpoint": f"http://127.0.0.1:{9000 + worker}",
                    "block_size": block_size,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 65_536,
                    "kv_events_endpoints": {0: endpoint},
                }
            )
        await asyncio.sleep(3.0)  # subscriptions
        for worker, (document, blocks) in enumerate(held):
            sockets[worker].send_multipart(_stored(document, blocks, block_size))
        await _wait_for(service, held[0], block_size)
        asked = []
        for query in queries:
            hashes = _signed(compute_block_hash_for_seq(query.tolist(), block_size))
            asked.append(
                {
                    "model_name": "m",
                    "block_hashes": hashes,
                    "sequence_hashes": hashes,
                    "isl_tokens": len(query),
                }
            )
        durations = np.empty(calls)
        for i in range(-under_way, calls):
            question = asked[i % len(asked)]
            if not reserve and i >= 0:
                started_ns = time.perf_counter_ns()
                await service.select(question)
                durations[i] = (time.perf_counter_ns() - started_ns) / 1e3
            started_ns = time.perf_counter_ns()
            await service.select_and_reserve({**question, "selection_id": f"r{i}"})
            if reserve and i >= 0:
                durations[i] = (time.perf_counter_ns() - started_ns) / 1e3
            if i >= -under_way // 2:
                await service.prefill_complete(f"r{i - under_way // 2}")
            if i >= 0:
                await service.free_reservation(f"r{i - under_way}")
        return durations
    finally:
        service.shutdown()
        for socket in sockets:
            socket.close()
        context.term()


def _signed(hashes: list[int]) -> list[int]:
    signed: list[int] = np.array(hashes, np.uint64).view(np.int64).tolist()
    return signed


def _stored(document: Tokens, blocks: int, block_size: int) -> list[bytes]:
    # The same tokens have the same engine hashes everywhere.
    generator = np.random.default_rng(int(document[0]))
    hashes = generator.integers(1, 1 << 62, len(document) // block_size)[:blocks].tolist()
    tokens = document[: blocks * block_size].tolist()
    event = ["BlockStored", hashes, None, tokens, block_size, None, "GPU", None]
    return [b"kv-events", struct.pack(">q", 0), msgspec.msgpack.encode([time.time(), [event], 0])]


async def _wait_for(service: Any, held: tuple[Tokens, int], block_size: int) -> None:
    document, blocks = held
    answer: dict[str, Any] = {}
    for _ in range(200):
        answer = await service.overlap_scores(
            {"model_name": "m", "token_ids": document[: blocks * block_size].tolist()}
        )
        if answer["workers"][0]["device_blocks"] == blocks:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the SelectionService did not learn its workers' caches: {str(answer)[:300]}")
