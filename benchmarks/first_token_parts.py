"""What the mean TTFT of `slo` consists of beyond its bound, on the conversation trace close to saturation.

    python benchmarks/first_token_parts.py --traces FOLDER

The cluster is that of the experiment near-saturation. Own work is a prompt alone on an idle instance; the rest is
waiting for other prompts, before the first step and in the steps shared with them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `simulator` is the package, not the script here

import msgspec
import numpy as np

from conductor.costs import InstanceClass
from simulator.bounds import bounds
from simulator.cluster import Request, Simulated
from simulator.cluster.cluster_file import ClusterFile
from simulator.experiments.clusters import SHIPPED_CLUSTERS, find_cluster
from simulator.experiments.point import simulate
from simulator.experiments.workload import Load, Requests, Workload, records_once, requests_at
from simulator.workloads import Selection

SPEEDS: Final = (6.0, 8.0)
GRID_S: Final = 3.0  # the trace's arrivals are rounded to so much
QUEUE: Final = "scheduling.admission.queue"


def setup(**settings: object) -> ClusterFile:
    profile = {"count": 8, "profile": "../profiles/fast-decode-8b.yaml"}
    source = find_cluster("h100-8", None, SHIPPED_CLUSTERS).with_settings(
        [
            ("instances", [profile]),
            ("scheduling.objectives", {"ttft_s": 2, "tbt_s": 0.05, "tbt_share": 1}),
            *((f"{QUEUE}.{key}", value) for key, value in settings.items()),
        ]
    )
    return source.make()


def alone_s(speed: InstanceClass, tokens: int, cached: int) -> float:
    """A prompt behind so many cached tokens, step by step."""
    seconds = 0.0
    while cached < tokens:
        reached = min(cached + speed.chunk_tokens, tokens)
        step_s = speed.prefill_s_per_token * (reached - cached)
        step_s += speed.prefill_s_per_token_squared * (reached**2 - cached**2)
        step_s += speed.prefill_base_s if reached == tokens else 0.0
        seconds += max(step_s, speed.decode_base_s)
        cached = reached
    return seconds


def lru_tokens(requests: Iterable[Request], block_tokens: int, blocks: int) -> dict[int, int]:
    """Cached tokens of each request, by number, in one cache of so many blocks."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = {}
    for request in requests:
        hashes = request.hashes.tolist()
        usable = hashes[: (request.prompt_tokens - 1) // block_tokens]
        hit = next((i for i, block in enumerate(usable) if block not in cache), len(usable))
        found[request.number] = hit * block_tokens
        for block in reversed(hashes):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found


def one_queue_s(jobs: Sequence[tuple[float, float]], servers: int) -> float:
    """Mean response of (arrival, work) where any server takes the shortest job that waits."""
    free_s = [0.0] * servers
    waiting: list[tuple[float, float]] = []
    total_s, now_s, arrived = 0.0, 0.0, 0
    for _ in jobs:
        now_s = max(now_s, heapq.heappop(free_s))
        if not waiting:
            now_s = max(now_s, jobs[arrived][0])
        while arrived < len(jobs) and jobs[arrived][0] <= now_s:
            arrival_s, work_s = jobs[arrived]
            heapq.heappush(waiting, (work_s, arrival_s))
            arrived += 1
        work_s, arrival_s = heapq.heappop(waiting)
        heapq.heappush(free_s, now_s + work_s)
        total_s += now_s + work_s - arrival_s
    return total_s / len(jobs)


def spread(workload: Requests, grid_s: float) -> Requests:
    """Arrivals anywhere between two points of the grid that they were rounded to."""
    random = Random(1)
    later = [
        msgspec.structs.replace(r, arrival_s=r.arrival_s + random.random() * grid_s)
        for r in workload.requests
    ]
    later.sort(key=lambda r: r.arrival_s)
    numbered = [msgspec.structs.replace(r, number=number) for number, r in enumerate(later)]
    return Requests(numbered, workload.block_tokens)


def own_ms(run: Simulated, speed: InstanceClass) -> float:
    return 1e3 * float(np.mean([alone_s(speed, r.prompt_tokens, r.cached_tokens or 0) for r in run.results]))


def figures(run: Simulated, cluster: ClusterFile) -> dict[str, float]:
    """Of a run in which everybody was served; *slow* are those that missed the TBT objective."""
    objectives, results = cluster.scheduling.objectives_s(), run.results
    ttft_ms = 1e3 * float(np.mean([r.ttft_s for r in results]))
    slow = [r.output_tokens for r in results if r.itl_s > objectives.tbt_s]
    good = sum(r.ttft_s <= objectives.ttft_s and not r.itl_s > objectives.tbt_s for r in results)
    own = own_ms(run, cluster.cluster.instances[0].instance_class)
    return {
        "mean_ttft_ms": round(ttft_ms, 1),
        "own_work_ms": round(own, 1),
        "waiting_ms": round(ttft_ms - own, 1),
        "reuse_ratio": sum(r.cached_tokens or 0 for r in results) / sum(r.prompt_tokens for r in results),
        "good_ratio": good / len(results),
        "late": sum(r.ttft_s > objectives.ttft_s for r in results),
        "slow": len(slow),
        "slow_median_tokens": float(np.median(slow)) if slow else 0.0,
    }


def bound_ms(cluster: ClusterFile, workload: Requests) -> float:
    """The least mean TTFT of any scheduler."""
    objectives = cluster.scheduling.objectives_s()
    bound = bounds(cluster.cluster, workload.requests, objectives, block_tokens=workload.block_tokens)
    return round(1e3 * bound.mean_ttft_s, 1)


def compare(workload: Requests, times: float) -> dict[str, Any]:
    """The figures of every case at one speed, beside the bound and the ideals."""
    base = setup()
    speed, servers = base.cluster.instances[0].instance_class, len(base.cluster.instances)
    large = tuple(replace(i, kv_tokens=10 * i.kv_tokens) for i in base.cluster.instances)
    cases: Mapping[str, tuple[ClusterFile, Requests]] = {
        "as it is": (base, workload),
        "caches ten times as large": (
            replace(base, cluster=replace(base.cluster, instances=large)),
            workload,
        ),
        "arrivals off the grid": (base, spread(workload, GRID_S / times)),
        "waiting room": (setup(capacity=1000), workload),
        "waiting room, shortest first": (setup(capacity=1000, ageing=0.1), workload),
    }
    found: dict[str, Any] = {"speed": times, "cases": {}}
    hits: dict[int, int] = {}
    for name, (cluster, requests) in cases.items():
        run = simulate(cluster, requests)
        found["cases"][name] = figures(run, cluster) | {"bound_ms": bound_ms(cluster, requests)}
        hits = hits or {r.number: r.cached_tokens or 0 for r in run.results}
    blocks = sum(i.kv_tokens for i in base.cluster.instances) // workload.block_tokens
    lru = lru_tokens(workload.requests, workload.block_tokens, blocks)
    unlimited = lru_tokens(workload.requests, workload.block_tokens, 1 << 60)
    found["one_lru_reuse_ratio"] = sum(lru.values()) / sum(r.prompt_tokens for r in workload.requests)
    for name, cached in (("one_queue_its_hits_ms", hits), ("one_queue_all_hits_ms", unlimited)):
        jobs = [(r.arrival_s, alone_s(speed, r.prompt_tokens, cached[r.number])) for r in workload.requests]
        found[name] = round(1e3 * one_queue_s(jobs, servers), 1)
    return found


def show(found: Mapping[str, Any]) -> None:
    print(f"x{found['speed']:g}")
    for name, of in found["cases"].items():
        print(
            f"  {name:30} {of['mean_ttft_ms']:4.0f} ms, {of['mean_ttft_ms'] / of['bound_ms']:.2f} of the bound: "
            f"own work {of['own_work_ms']:3.0f}, waiting {of['waiting_ms']:3.0f}; reuse {of['reuse_ratio']:5.1%}; "
            f"good {of['good_ratio']:6.2%}, late {of['late']}, slow {of['slow']}, half of these with at most "
            f"{of['slow_median_tokens']:.0f} tokens"
        )
    print(f"  one LRU cache of that size for all: reuse {found['one_lru_reuse_ratio']:.1%}")
    print(
        f"  one queue for all instances, shortest first: {found['one_queue_its_hits_ms']:.0f} ms with as "
        f"many hits, {found['one_queue_all_hits_ms']:.0f} with nothing computed twice"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="2,000 requests at x6")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    arguments = parser.parse_args()
    selection = Selection(limit=2000) if arguments.quick else Selection()
    records = records_once(Workload(arguments.traces / "conversation_trace.jsonl", selection=selection))
    speeds = SPEEDS[:1] if arguments.quick else SPEEDS
    found = [compare(requests_at(records, Load(speed=times)), times) for times in speeds]
    if arguments.json:
        print(json.dumps({"speeds": found}))
        return
    for each in found:
        show(each)


if __name__ == "__main__":
    main()
