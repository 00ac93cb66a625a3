"""An index of millions of residencies at 1,000 holders: memory, growth, loss of a holder, and matching."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence

import numpy as np
from workloads.fleet import DOCUMENT_BLOCKS, Hashes
from workloads.timing import Figures, latencies_us, resident_bytes

from cache_index import CacheIndex, Holder, Namespace, Tier

NAMESPACE = Namespace("model", 16)
LONGEST = 62_500  # blocks of a million tokens


def filled(index: CacheIndex, fleet: Sequence[Holder], blocks: int, *, linked: bool) -> Figures:
    """Sessions of 128 blocks, one holder each, all growth included."""
    random = np.random.default_rng(7)
    name = "linked" if linked else "plain"
    taken, longest_cpu_s, fullest = [], 0.0, 0.0
    before = resident_bytes()
    clock, cpu_clock = time.perf_counter, time.thread_time
    sessions = np.empty((2048, 128), np.uint64)
    for start in range(0, blocks // 128, 2048):
        sessions[:] = random.integers(1, 1 << 64, sessions.shape, dtype=np.uint64)
        keys = sessions + np.uint64(1)
        for number, session in enumerate(sessions):
            holder = fleet[(start + number) % len(fleet)]
            begin_cpu_s, begin_s = cpu_clock(), clock()
            if linked:
                index.store_linked(holder, Tier.DEVICE, NAMESPACE, session, keys[number])
            else:
                index.store(holder, Tier.DEVICE, NAMESPACE, session)
            taken.append(clock() - begin_s)
            longest_cpu_s = max(longest_cpu_s, cpu_clock() - begin_cpu_s)
        stats = index.stats()
        if start * 128 >= blocks // 2:
            fullest = max(fullest, stats.bytes / stats.residencies)
    return {
        f"residencies_{name}": stats.residencies,
        f"store_new_{name}_blocks_per_s": 128 * len(taken) / sum(taken),
        f"growth_slowest_call_{name}_ms": max(taken) * 1e3,
        f"growth_slowest_call_{name}_cpu_ms": longest_cpu_s * 1e3,
        f"bytes_per_residency_{name}_worst": fullest,
        f"bytes_per_residency_{name}": stats.bytes / stats.residencies,
        f"resident_bytes_per_residency_{name}": (resident_bytes() - before) / stats.residencies,
    }


def large_index(quick: bool, blocks: int) -> Figures:
    """Memory, growth, loss of a holder, and matching with 1,000 holders."""
    fleet = [Holder(f"instance-{number}") for number in range(1000)]
    index = CacheIndex()
    for holder in fleet:
        index.register(holder)
    figures = filled(index, fleet, blocks // 2, linked=True)
    del index
    gc.collect()
    index = CacheIndex()
    for holder in fleet:
        index.register(holder)
    figures |= filled(index, fleet, blocks, linked=False)
    figures["bytes_per_residency"] = figures["bytes_per_residency_plain"]
    figures |= matching(index, fleet, 1000 if quick else 5000)
    figures |= matching_while_storing(index, fleet, 2.0 if quick else 5.0)
    begin_s = time.perf_counter()
    index.clear(fleet[0])
    figures["holder_loss_us"] = (time.perf_counter() - begin_s) * 1e6
    return figures


def matching(index: CacheIndex, fleet: Sequence[Holder], calls: int) -> Figures:
    random = np.random.default_rng(8)

    def words(count: int) -> Hashes:
        return random.integers(1, 1 << 64, count, dtype=np.uint64)

    def store(holder: Holder, hashes: Hashes) -> None:
        index.store(holder, Tier.DEVICE, NAMESPACE, hashes)

    hot = words(64)
    sessions = {length: [words(length) for _ in range(50)] for length in (256, 1024, 8192)}
    longest, drains = words(LONGEST), words(DOCUMENT_BLOCKS)
    for holder in fleet:
        store(holder, hot)
    for number in range(3):
        store(fleet[number], longest)
        for each in sessions.values():
            for i, session in enumerate(each):
                store(fleet[(7 * i + 131 * number) % len(fleet)], session)
    for number in range(512):
        store(fleet[number], drains[: DOCUMENT_BLOCKS // 512 * (number + 1)])
    queries: dict[str, list[Hashes]] = {
        "hot_prefix_64": [hot],
        **{f"session_{length}": each for length, each in sessions.items()},
        "prompt_62500": [longest],
        "prompt_62500_known_to_40000": [np.concatenate([longest[:40_000], words(LONGEST - 40_000)])],
        "miss_1024": [words(1024) for _ in range(50)],
    }
    figures: Figures = {}

    def match(query: Hashes) -> object:
        return index.match(NAMESPACE, query)

    for name, some in queries.items():
        figures[f"match_{name}_1000_holders_p50_us"], figures[f"match_{name}_1000_holders_p99_us"] = (
            latencies_us(match, some, calls)
        )
    for percentile in ("p50", "p99"):
        ending = f"_1000_holders_{percentile}_us"
        worst = [each for name, each in figures.items() if name.endswith(ending) and each is not None]
        figures[f"match_{percentile}_us_1000_holders"] = max(worst)
    figures["match_512_drains_8192_p50_us"], figures["match_512_drains_8192_p99_us"] = latencies_us(
        match, [drains], calls // 5
    )

    for each in sessions.values():  # 2 % of what the sessions' holders have goes away at random
        for number in range(3):
            for i, session in enumerate(each):
                lost = session[random.random(len(session)) < 0.02]
                index.remove(fleet[(7 * i + 131 * number) % len(fleet)], Tier.DEVICE, NAMESPACE, lost)
    holes = [session for each in sessions.values() for session in each]
    figures["match_holes_p50_us"], figures["match_holes_p99_us"] = latencies_us(match, holes, calls)
    figures["match_62500_beside_holes_p50_us"], figures["match_62500_beside_holes_p99_us"] = latencies_us(
        match, [longest], calls
    )
    return figures


def matching_while_storing(index: CacheIndex, fleet: Sequence[Holder], seconds: float) -> Figures:
    """Latency of matches while another thread stores a million blocks per second."""
    random = np.random.default_rng(9)
    prompt = random.integers(1, 1 << 64, 1024, dtype=np.uint64)
    index.store(fleet[0], Tier.DEVICE, NAMESPACE, prompt)
    chains = random.integers(1, 1 << 64, (4096, 512), dtype=np.uint64)
    stored, done = 0, threading.Event()

    def store() -> None:
        nonlocal stored
        begin_s = time.perf_counter()
        while not done.is_set():
            index.store(fleet[stored // 512 % 1000], Tier.DEVICE, NAMESPACE, chains[stored // 512 % 4096])
            stored += 512
            ahead_s = stored / 1e6 - (time.perf_counter() - begin_s)
            if ahead_s > 0:
                time.sleep(ahead_s)

    thread = threading.Thread(target=store)
    begin_s = time.perf_counter()
    thread.start()
    taken = []
    while time.perf_counter() - begin_s < seconds:
        call_s = time.perf_counter()
        index.match(NAMESPACE, prompt)
        taken.append(time.perf_counter() - call_s)
        time.sleep(0.0002)
    done.set()
    thread.join()
    p50, p99 = np.percentile(taken, [50, 99]) * 1e6
    return {
        "match_while_storing_p50_us": float(p50),
        "match_while_storing_p99_us": float(p99),
        "stored_meanwhile_blocks_per_s": stored / (time.perf_counter() - begin_s),
    }
