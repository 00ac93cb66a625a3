"""The cache index alone: hashing, store, remove, match, and ingest from vLLM payloads.

Excluded: sockets, HTTP, tokenization, compilation. Rates are over wall time on one thread; latencies are
over single calls from Python. Every figure is the best of a few rounds, which on a shared machine is the
figure of the quiet machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Namespace, StreamIngest, Tier, decode_batch, sequence_hashes, warm

_begin_s = time.perf_counter()
warm()
WARM_S = time.perf_counter() - _begin_s
NAMESPACE = Namespace("model", 16)
PROMPT_TOKENS = 131_072
Figures = dict[str, float]


def best_of(rounds: int, work: Callable[[], int]) -> float:
    """Units per second of the best round; ``work`` returns how many units it did."""
    best = 0.0
    for _ in range(rounds):
        begin_s = time.perf_counter()
        units = work()
        best = max(best, units / (time.perf_counter() - begin_s))
    return best


def latencies_us(calls: int, call: Callable[[], object]) -> tuple[float, float]:
    """p50 and p99 of single calls, best of three rounds each."""
    rounds = []
    for _ in range(3):
        taken = np.empty(calls)
        for i in range(calls):
            begin_s = time.perf_counter()
            call()
            taken[i] = time.perf_counter() - begin_s
        rounds.append(np.percentile(taken, [50, 99]) * 1e6)
    p50, p99 = np.min(rounds, axis=0)
    return float(p50), float(p99)


def words(random: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return random.integers(1, 1 << 64, count, dtype=np.uint64)


def hashing(random: np.random.Generator) -> Figures:
    tokens = random.integers(0, 150_000, PROMPT_TOKENS, dtype=np.uint32)
    figures = {}
    for block_size in (16, 64, 512):
        p50_us, _ = latencies_us(100, lambda size=block_size: sequence_hashes(tokens, size))  # type: ignore[misc]
        figures[f"hash_131k_tokens_block_{block_size}_ms"] = p50_us / 1e3
    figures["hash_tokens_per_s"] = PROMPT_TOKENS / figures["hash_131k_tokens_block_16_ms"] * 1e3
    return figures


def filled(
    random: np.random.Generator, holders: int, blocks: int
) -> tuple[CacheIndex, list[Holder], Figures]:
    """An index of sessions of 128 blocks, one holder each, built with all growth included."""
    index = CacheIndex()
    fleet = [Holder(f"instance-{number}") for number in range(holders)]
    for holder in fleet:
        index.register(holder)
    sessions = words(random, blocks).reshape(-1, 128)
    slowest_s = 0.0
    begin_s = time.perf_counter()
    for number, session in enumerate(sessions):
        call_s = time.perf_counter()
        index.store(fleet[number % holders], Tier.DEVICE, NAMESPACE, session)
        slowest_s = max(slowest_s, time.perf_counter() - call_s)
    store_s = time.perf_counter() - begin_s
    stats = index.stats()
    figures = {
        f"store_new_{holders}_holders_blocks_per_s": blocks / store_s,
        f"store_slowest_call_{holders}_holders_ms": slowest_s * 1e3,
        f"bytes_per_residency_{holders}_holders": stats.bytes / stats.residencies,
    }
    removed = sessions[: len(sessions) // 4]
    begin_s = time.perf_counter()
    for number, session in enumerate(removed):
        index.remove(fleet[number % holders], Tier.DEVICE, NAMESPACE, session)
    figures[f"remove_{holders}_holders_blocks_per_s"] = removed.size / (time.perf_counter() - begin_s)
    return index, fleet, figures


def matching(random: np.random.Generator, holders: int, blocks: int, calls: int) -> Figures:
    index, fleet, figures = filled(random, holders, blocks)
    hot, session, long_session = words(random, 64), words(random, 1024), words(random, 8192)
    with_hot_head = np.concatenate([hot, words(random, 960)])
    for holder in fleet:
        index.store(holder, Tier.DEVICE, NAMESPACE, hot)
    for holder in fleet[:3]:
        for chain in (session, long_session, with_hot_head):
            index.store(holder, Tier.DEVICE, NAMESPACE, chain)
    drains = words(random, 1024)
    for number, holder in enumerate(fleet):
        index.store(holder, Tier.DEVICE, NAMESPACE, drains[: 1 + number * 1023 // holders])
    queries = {
        "hot_prefix_64": hot,
        "session_1024": session,
        "hot_head_session_1024": with_hot_head,
        "session_8192": long_session,
        "a_drain_per_holder_1024": drains,
        "miss_1024": words(random, 1024),
    }
    for name, query in queries.items():
        p50_us, p99_us = latencies_us(calls, lambda query=query: index.match(NAMESPACE, query))  # type: ignore[misc]
        figures[f"match_{name}_{holders}_holders_p50_us"] = p50_us
        figures[f"match_{name}_{holders}_holders_p99_us"] = p99_us
    begin_s = time.perf_counter()
    index.clear(fleet[0])
    figures[f"clear_{holders}_holders_us"] = (time.perf_counter() - begin_s) * 1e6
    return figures


def payloads(random: np.random.Generator, batches: int) -> tuple[list[bytes], int]:
    """Steady churn: per step 128 prefill blocks in one event, 16 decode blocks, and as many removals."""
    encoded, operations = [], 0
    resident: list[int] = []
    for step in range(batches):
        events: list[dict[str, object]] = []
        for engine_hash in resident[:144]:
            events.append({"type": "BlockRemoved", "block_hashes": [engine_hash], "medium": "GPU"})
        operations += len(resident[:144])
        resident = resident[144:]
        for blocks in (128, *[1] * 16):
            hashes = words(random, blocks).tolist()
            tokens = random.integers(0, 150_000, 16 * blocks).tolist()
            event = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": tokens,
            }
            events.append({**event, "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None})
            resident += hashes
            operations += blocks
        encoded.append(msgspec.msgpack.encode([float(step), events, 0]))
    return encoded, operations


def ingest(random: np.random.Generator, batches: int) -> Figures:
    encoded, operations = payloads(random, batches)

    def apply_all() -> int:
        index = CacheIndex()
        index.register(Holder("engine"))
        stream = StreamIngest(index, Holder("engine"), "model")
        for payload in encoded:
            stream.apply(decode_batch(payload))
        return operations

    def decode_all() -> int:
        for payload in encoded:
            decode_batch(payload)
        return operations

    return {
        "decode_block_operations_per_s": best_of(3, decode_all),
        "ingest_block_operations_per_s": best_of(3, apply_all),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="smaller index, fewer calls: within 50 s")
    parser.add_argument(
        "--blocks", type=int, help="blocks in the index (default 10 million, quick: 1 million)"
    )
    options = parser.parse_args()
    blocks = (options.blocks or (1_000_000 if options.quick else 10_000_000)) // 128 * 128
    calls = 1_000 if options.quick else 5_000

    figures: Figures = {"warm_s": WARM_S, "index_blocks": blocks}
    random = np.random.default_rng(7)
    figures |= hashing(random)
    for holders in (64, 1_000):
        figures |= matching(random, holders, blocks, calls)
    figures |= ingest(random, 300 if options.quick else 1_000)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:<58}{value:>16,.3f}" if value < 1000 else f"{name:<58}{value:>16,.0f}")


if __name__ == "__main__":
    main()
