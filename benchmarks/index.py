"""The cache index alone, and beside the RadixTree of NVIDIA Dynamo 1.6.1 where that can be imported.

Excluded: sockets, HTTP, tokenization, compilation, making the input. Both are called from Python on one
thread; rates are also given per CPU second, because Dynamo's tree works on a thread of its own. Its binding
takes events as JSON, so its figures contain parsing; ours takes arrays here, and
``frames_blocks_per_cpu_s`` has everything from vLLM's msgpack frames on. Growth from empty is part of every
store figure but ``store_expected_*``, where the index was told before how many blocks would come, as
`conductor serve` tells it what its engines have room for. Latencies are over single calls, the best of a few
rounds, which on a shared machine is the figure of the quiet machine; ratios come from one run. A ratio is null
where Dynamo is missing: ``pip install --target FOLDER --no-deps ai-dynamo-runtime==1.6.1``, then
``PYTHONPATH=FOLDER``.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from workloads.warming import WARM_S  # isort: split

from workloads.fleet import DOCUMENT_BLOCKS, Stored, Workload
from workloads.large_index import large_index
from workloads.radix_trees import Dynamo, Ours, find_dynamo
from workloads.timing import Figures, latencies_us, touch_memory

from cache_index import CacheIndex, Holder, StreamIngest, sequence_hashes

PROMPT_TOKENS = 131_072
EVENTS_AT_ONCE = 2000  # encoded, untimed, before they are applied
CHURN_BLOCKS = 4096


def applied_s(index: Ours | Dynamo, encoded: Sequence[Any]) -> NDArray[np.float64]:
    """Seconds by the clock, and CPU seconds of all threads."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    index.apply(encoded)
    return np.array([time.perf_counter() - begin_s, time.process_time() - begin_cpu_s])


def rates(name: str, count: int, seconds: NDArray[np.float64]) -> Figures:
    by_clock, by_cpu = (count / seconds).tolist()
    return {f"{name}_per_s": by_clock, f"{name}_per_cpu_s": by_cpu}


# --- beside the peer ---------------------------------------------------------------------------------


def stored_s(index: Ours | Dynamo, workload: Workload) -> tuple[int, NDArray[np.float64]]:
    """Store the fleet's blocks; how many they are, and what that took."""
    store_s, blocks, batch = np.zeros(2), 0, []
    for event in workload.events():
        batch.append(index.encode_store(event))
        blocks += len(event.hashes)
        if len(batch) == EVENTS_AT_ONCE:
            store_s += applied_s(index, batch)
            batch.clear()
    return blocks, store_s + applied_s(index, batch)


def expected_figures(workers: int, sequences: int, blocks: int) -> Figures:
    """The store of `fleet_figures` again, by an index that was made ready for so many blocks."""
    ours = Ours(workers)
    ours.index.expect(blocks)
    while ours.index.reclaim():
        pass
    blocks, seconds = stored_s(ours, Workload(workers, sequences))
    return rates("store_expected_blocks", blocks, seconds)


def fleet_figures(index: Ours | Dynamo, workers: int, sequences: int, calls: int) -> Figures:
    """Store, match and remove of the fleet's traffic. Makes the same input for any index."""
    workload = Workload(workers, sequences)
    figures: Figures = {}
    blocks, store_s = stored_s(index, workload)
    figures |= rates("store_blocks", blocks, store_s)
    figures["stored_blocks"] = blocks

    for length in (64, 256, 1024, DOCUMENT_BLOCKS):
        for name, queries in workload.queries(length, 50).items():
            encoded = [index.encode_query(each) for each in queries]
            p50_us, p99_us = latencies_us(index.match, encoded, calls)
            figures[f"match_{name}_{length}_p50_us"] = p50_us
            figures[f"match_{name}_{length}_p99_us"] = p99_us
            figures[f"match_{name}_{length}_deepest"] = max(map(index.deepest, encoded))

    singles, removals = [], []
    for worker, _, tail in workload.sampled:
        grown, parent = workload.words(16), int(tail[-1])
        for i in range(16):
            singles.append(index.encode_store(Stored(worker, parent, grown[i : i + 1])))
            parent = int(grown[i])
        removals += [index.encode_remove(worker, grown[i : i + 1]) for i in reversed(range(16))]
    figures |= rates("store_single_events", len(singles), applied_s(index, singles))
    figures |= rates("remove_single_events", len(removals), applied_s(index, removals))
    chains = [index.encode_remove(worker, tail[::-1].copy()) for worker, _, tail in workload.sampled]
    tails = sum(len(tail) for _, _, tail in workload.sampled)
    figures |= rates("remove_blocks", tails, applied_s(index, chains))
    return figures


def churn_figures(index: Ours | Dynamo, branches: int) -> Figures:
    """A chain that stays, matched before and after branches of it come and go."""
    workload = Workload(8, 1)
    base = workload.words(CHURN_BLOCKS)
    index.apply([index.encode_store(Stored(worker, None, base)) for worker in range(8)])
    query = [index.encode_query(base)]
    before_us, _ = latencies_us(index.match, query, 200)
    places = np.random.default_rng(3).integers(0, CHURN_BLOCKS - 1, branches).tolist()
    stored = [Stored(i % 8, int(base[place]), workload.words(64)) for i, place in enumerate(places)]
    for start in range(0, branches, EVENTS_AT_ONCE):
        index.apply([index.encode_store(event) for event in stored[start : start + EVENTS_AT_ONCE]])
    for start in range(0, branches, EVENTS_AT_ONCE):
        some = stored[start : start + EVENTS_AT_ONCE]
        index.apply([index.encode_remove(event.worker, event.hashes[::-1].copy()) for event in some])
    after_us, _ = latencies_us(index.match, query, 200)
    return {
        "churn_match_before_us": before_us,
        "churn_match_after_us": after_us,
        "churn_slowdown": after_us / before_us,
    }


def compared(ours: Figures, theirs: Figures | None) -> Figures:
    """Ratios to the peer, above 1 where ours is better."""

    def ratio(name: str, *, inverse: bool = False, than: str | None = None) -> float | None:
        mine, other = ours[name], theirs[than or name] if theirs is not None else None
        if mine is None or other is None:
            return None
        return other / mine if inverse else mine / other

    p50 = [ratio(name, inverse=True) for name in ours if name.endswith("_p50_us")]
    p99 = [ratio(name, inverse=True) for name in ours if name.endswith("_p99_us")]
    known_p50, known_p99 = ([each for each in ratios if each is not None] for ratios in (p50, p99))
    same = theirs is None or all(ours[name] == theirs[name] for name in ours if name.endswith("_deepest"))
    if not same:
        raise AssertionError("the two indexes disagree about the depth of a match")
    return {
        "store_ratio_vs_dynamo": ratio("store_blocks_per_s"),
        "store_cpu_ratio_vs_dynamo": ratio("store_blocks_per_cpu_s"),
        "store_expected_ratio_vs_dynamo": ratio("store_expected_blocks_per_s", than="store_blocks_per_s"),
        "store_single_ratio_vs_dynamo": ratio("store_single_events_per_s"),
        "store_single_cpu_ratio_vs_dynamo": ratio("store_single_events_per_cpu_s"),
        "remove_ratio_vs_dynamo": ratio("remove_blocks_per_s"),
        "remove_cpu_ratio_vs_dynamo": ratio("remove_blocks_per_cpu_s"),
        "remove_single_ratio_vs_dynamo": ratio("remove_single_events_per_s"),
        "remove_single_cpu_ratio_vs_dynamo": ratio("remove_single_events_per_cpu_s"),
        "match_p50_ratio_vs_dynamo_min": min(known_p50, default=None),
        "match_p99_ratio_vs_dynamo_min": min(known_p99, default=None),
        "churn_ratio_vs_dynamo": ratio("churn_match_after_us", inverse=True),
    }


def best_of(rounds: Sequence[Figures]) -> Figures:
    """The best of each figure: the highest rate, the lowest latency."""
    best: Figures = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        known = [value for value in values if value is not None]
        best[name] = (min if name.endswith(("_us", "_slowdown")) else max)(known)
    return best


def measure_alone(name: str, quick: bool) -> Figures:
    """Fleet and churn for one of the two indexes, in this process."""
    workers, sequences = (64, 200) if quick else (64, 2000)
    calls, branches = (300, 1500) if quick else (1000, 3000)
    touch_memory(workers * sequences * 30_000)

    def make(count: int) -> Ours | Dynamo:
        return Ours(count) if name == "ours" else Dynamo(find_dynamo())

    figures = fleet_figures(make(workers), workers, sequences, calls)
    gc.collect()
    if name == "ours":
        figures |= expected_figures(workers, sequences, int(figures["stored_blocks"] or 0))
    return figures | churn_figures(make(8), branches)


def beside_dynamo(quick: bool) -> Figures:
    """Ours and theirs in turns, each time in a fresh process, whose memory nobody has used before."""
    names = ["ours"] if find_dynamo() is None else ["ours", "dynamo"]
    rounds: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(2):
        for name in names:
            command = [sys.executable, __file__, "--alone", name, *(["--quick"] if quick else [])]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rounds[name].append(json.loads(output))
    ours = best_of(rounds["ours"])
    theirs = best_of(rounds["dynamo"]) if "dynamo" in rounds else None
    figures = ours | compared(ours, theirs)
    for name, value in (theirs or {}).items():
        figures[f"dynamo_{name}"] = value
    return figures


# --- from tokens and frames --------------------------------------------------------------------------


def hashing() -> Figures:
    tokens = np.random.default_rng(5).integers(0, 150_000, PROMPT_TOKENS, dtype=np.uint32)
    figures: Figures = {}
    for block_size in (16, 64, 512):
        p50_us, _ = latencies_us(lambda size: sequence_hashes(tokens, size), [block_size], 100)
        figures[f"hash_131k_tokens_block_{block_size}_ms"] = p50_us / 1e3
    return figures


def frames(random: np.random.Generator, batches: int) -> tuple[list[bytes], int]:
    """vLLM payloads: per step 128 prefill blocks in one event, 16 decode blocks, and as many removals."""
    encoded, operations = [], 0
    resident: list[int] = []
    for step in range(batches):
        gone, resident = resident[:144], resident[144:]
        events: list[dict[str, object]] = [
            {"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU"} for each in gone
        ]
        for blocks in (128, *[1] * 16):
            hashes = random.integers(1, 1 << 63, blocks).tolist()
            event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
            event |= {"token_ids": random.integers(0, 150_000, 16 * blocks).tolist(), "block_size": 16}
            events.append(event | {"lora_id": None, "medium": "GPU", "lora_name": None})
            resident += reversed(hashes)
        operations += len(gone) + 144
        encoded.append(msgspec.msgpack.encode([float(step), events, 0]))
    return encoded, operations


def ingesting(batches: int) -> Figures:
    encoded, operations = frames(np.random.default_rng(6), batches)
    best = 0.0
    for _ in range(3):
        index = CacheIndex()
        index.register(Holder("engine"))
        stream = StreamIngest(index, Holder("engine"), "model")
        begin_s = time.process_time()
        for start in range(0, len(encoded), 16):
            stream.apply_payloads(encoded[start : start + 16])
        best = max(best, operations / (time.process_time() - begin_s))
    return {"frames_blocks_per_cpu_s": best}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="smaller index, fewer calls: within 50 s")
    parser.add_argument(
        "--blocks", type=int, help="blocks in the large index (default 50 million, quick: 4 million)"
    )
    parser.add_argument("--alone", choices=("ours", "dynamo"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure_alone(options.alone, options.quick)))
        return
    blocks = options.blocks or (4_000_000 if options.quick else 50_000_000)
    figures: Figures = {"warm_s": WARM_S}
    touch_memory(min(blocks * 200, 4 << 30))
    figures |= ingesting(300 if options.quick else 1_000)
    figures |= beside_dynamo(options.quick)
    figures |= large_index(options.quick, blocks)
    figures |= hashing()
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = "-" if value is None else f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"
        print(f"{name:<58}{shown:>16}")


if __name__ == "__main__":
    main()
