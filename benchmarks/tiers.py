"""What a tier of bounded room reuses when it keeps blocks by learned value, beside LRU, S3-FIFO and Belady.

Every request of a workload goes through one cache. Hit rates are those of blocks, looked up one by one; what
`RetainedBlocks` knows of the future is nothing: the model learns from each request as it comes, from the first one
on. With ``--traces`` the directory of Mooncake's published traces: 5,860 blocks of 512 tokens for the conversation
and the synthetic trace. Generated workloads get room for a tenth of their blocks.

Then the first workload's first requests are simulated on the shipped cluster h100-4-tiers with the tier planner off
and on, and the planner's CPU time is taken at 1,000 instances, whose host tiers are full.

With ``--hints`` something else is measured: what it brings when each request tells whether its prompt will be used
again, and is right about that more or less often. The model is told the hints as kinds of requests, not what they
mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `simulator` is the package, not the script here

from cache_index import Holder, Namespace, Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.placement import Objectives, Usage
from conductor.policies import make_policy
from conductor.reuse import RetainedBlocks, ReuseModel
from conductor.tier_planner import PlannerSettings, TierPlanner
from simulator.cluster import BLOCK_TOKENS, ClusterSpec, make_scheduler, uniform
from simulator.cluster.layout import MODEL
from simulator.cluster.simulation import placement_request
from simulator.cluster.tier_actions import can_do, sites_of
from simulator.experiments.clusters import find_cluster
from simulator.experiments.point import simulate
from simulator.experiments.workload import Load, requests_at
from simulator.report import summary
from simulator.workloads import (
    TraceRecord,
    belady_hits,
    block_accesses,
    generate,
    lru_hits,
    next_uses,
    read_mooncake,
)

TRACE_BLOCKS = 5_860  # of a node's DRAM
TRACES = ("conversation_trace", "synthetic_trace")
LRU_IS_BEST = ("generated api", "generated burst")  # no gap to close
HINTS_RIGHT = (0.6, 0.7, 0.8, 0.9, 1.0)
CHATS_FROM_S = 300.0
GENERATED = ("chat", "coding", "agent", "rag", "api", "burst")


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    records: Sequence[TraceRecord]
    capacity_blocks: int


def traces(directory: Path, quick: bool) -> list[Workload]:
    names = TRACES[:1] if quick else TRACES
    return [Workload(n, list(read_mooncake(directory / f"{n}.jsonl")), TRACE_BLOCKS) for n in names]


def generated(kind: str, requests: int) -> Workload:
    """About four requests a second, so that sessions overlap."""
    records = generate(kind, requests, 4.0, seed=0)
    unique = len(set(block_accesses(records)))
    return Workload(f"generated {kind}", records, max(64, unique // 10))


def s3_fifo_hits(accesses: Sequence[int], capacity_blocks: int) -> int:
    """S3-FIFO (Yang et al., SOSP 2023): a tenth for what is new, and names of what left it unused."""
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: OrderedDict[int, None] = OrderedDict()
    uses: dict[int, int] = {}
    small_blocks = max(1, capacity_blocks // 10)
    hits = 0
    for block in accesses:
        if block in uses:
            hits += 1
            uses[block] = min(3, uses[block] + 1)
            continue
        while len(uses) >= capacity_blocks:
            if len(small) >= small_blocks or not main:
                candidate = small.popleft()
                if uses[candidate] > 1:
                    main.append(candidate)
                    uses[candidate] = 0
                    continue
                ghosts[candidate] = None
                if len(ghosts) > capacity_blocks - small_blocks:
                    ghosts.popitem(last=False)
            else:
                candidate = main.popleft()
                if uses[candidate] > 0:
                    main.append(candidate)
                    uses[candidate] -= 1
                    continue
            del uses[candidate]
        (main if block in ghosts else small).append(block)
        ghosts.pop(block, None)
        uses[block] = 0
    return hits


@dataclass(frozen=True, slots=True)
class Planned:
    hits: int
    prefix_hits: int
    observe_us: float
    keep_us: float


def planned(workload: Workload, kinds: Sequence[int] | None = None) -> Planned:
    """Hits of a cache that keeps by learned value, and the CPU time a request costs it."""
    model = ReuseModel(workload.records[0].block_tokens)
    cache = RetainedBlocks(workload.capacity_blocks, model)
    hits = prefix_hits = observe_ns = keep_ns = 0
    for record, kind in zip(workload.records, kinds or repeat(0), strict=kinds is not None):
        prompt = np.array(record.hash_ids, np.uint64)
        hits += sum(block in cache for block in record.hash_ids)
        prefix_hits += cache.cached_prefix(prompt)
        started_ns = time.thread_time_ns()
        model.observe(prompt, record.arrival_s, kind)
        observed_ns = time.thread_time_ns()
        cache.keep(prompt, record.arrival_s)
        keep_ns += time.thread_time_ns() - observed_ns
        observe_ns += observed_ns - started_ns
    each_us = 1e3 * len(workload.records)
    return Planned(hits, prefix_hits, observe_ns / each_us, keep_ns / each_us)


def used_again(records: Sequence[TraceRecord]) -> list[bool]:
    """Of each request, whether the block halfway through what its prompt brings is ever used again."""
    brings: dict[int, int] = {}  # the last request with that block there
    known: set[int] = set()
    found = [False] * len(records)
    for number, record in enumerate(records):
        blocks = record.hash_ids
        for block in blocks:
            if block in brings:
                found[brings.pop(block)] = True
        matched = next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
        known.update(blocks)
        if blocks:
            brings[blocks[min((matched + len(blocks)) // 2, max(len(blocks) - 3, 0))]] = number
    return found


def hinted(workload: Workload) -> dict[str, Any]:
    """The share of the gap that is closed by hints which are right so often."""
    truth, source = used_again(workload.records), np.random.default_rng(0)
    accesses, capacity = block_accesses(workload.records), workload.capacity_blocks
    lru, belady = lru_hits(accesses, capacity), belady_hits(accesses, capacity, next_uses(accesses))
    shares = {"none": (planned(workload).hits - lru) / (belady - lru)}
    for right in HINTS_RIGHT:
        told = (np.array(truth) == (source.random(len(truth)) < right)).astype(int).tolist()
        shares[f"{right:.0%}"] = (planned(workload, told).hits - lru) / (belady - lru)
    return {"workload": workload.name, "gap_closed": {of: round(share, 3) for of, share in shares.items()}}


def evaluate(workload: Workload, quick: bool) -> dict[str, Any]:
    accesses, capacity = block_accesses(workload.records), workload.capacity_blocks

    def rate(hits: int) -> float:
        return round(hits / len(accesses), 4)

    ours = planned(workload)
    lru = lru_hits(accesses, capacity)
    belady = belady_hits(accesses, capacity, next_uses(accesses))
    result = {
        "workload": workload.name,
        "requests": len(workload.records),
        "capacity_blocks": capacity,
        "lru_hit_rate": rate(lru),
        "planner_hit_rate": rate(ours.hits),
        "planner_prefix_hit_rate": rate(ours.prefix_hits),
        "belady_hit_rate": rate(belady),
        "gap_closed": round((ours.hits - lru) / (belady - lru), 3) if belady > lru else None,
        "observe_us": round(ours.observe_us, 1),
        "keep_us": round(ours.keep_us, 1),
    }
    if not quick:
        result["s3_fifo_hit_rate"] = rate(s3_fifo_hits(accesses, capacity))
    return result


def simulated(workload: Workload, requests: int, *, plans: bool) -> dict[str, float]:
    """Times to first token of the workload's first requests on the shipped cluster with little memory."""
    setup = find_cluster("h100-4-tiers")
    if plans:
        setup = setup.with_settings([("scheduling.tier_planner.actions", "all")])
    cluster = setup.make()
    found = simulate(cluster, requests_at(list(workload.records[:requests]), Load()))
    ttft = summary(found, cluster.scheduling.objectives_s())["time_to_first_token"]
    return {"mean_ttft_s": round(ttft["avg"] / 1e3, 4), "p90_ttft_s": round(ttft["p90"] / 1e3, 4)}


def planner_cores(instances: int, most_requests_per_s: float, seconds: int) -> tuple[float, float]:
    """CPU seconds a second that plans take, and requests a second: chats over instances with full host tiers."""
    host_blocks = 500
    cluster = ClusterSpec(
        tuple(
            replace(each, tier_tokens={Tier.HOST: host_blocks * BLOCK_TOKENS})
            for each in uniform(str(instances), LLAMA_8B_H100).instances
        )
    )
    scheduler = make_scheduler(cluster, make_policy("least_loaded"), Objectives())
    index = scheduler.index
    planner = TierPlanner(
        scheduler.cluster, index, sites_of(cluster), can_do, PlannerSettings(), id_prefix="t"
    )
    scheduler.on_placed = planner.placed
    namespace = Namespace(MODEL, BLOCK_TOKENS)
    # From the middle of a long workload: at its ends there are few sessions.
    records = [
        msgspec.structs.replace(record, arrival_s=record.arrival_s - CHATS_FROM_S)
        for record in generate("chat", round(600 * most_requests_per_s), most_requests_per_s, seed=1)
        if CHATS_FROM_S <= record.arrival_s < CHATS_FROM_S + seconds
    ]
    asked = requests_at(records, Load()).requests
    # Full tiers: blocks of prompts that nobody remembers.
    filler = np.arange(1, host_blocks + 1, dtype=np.uint64) << np.uint64(20)
    for number, spec in enumerate(cluster.instances):
        index.store(Holder(spec.name), Tier.HOST, namespace, filler + np.uint64(number))
    next_s, cpu_ns = 1.0, 0
    for request in asked:
        while request.arrival_s >= next_s:
            begun_ns = time.thread_time_ns()
            planner.plan(next_s)
            cpu_ns += time.thread_time_ns() - begun_ns
            next_s += 1.0
        placement = scheduler.place(placement_request(request), request.arrival_s)
        index.store(Holder(placement.prefill.instance_id), Tier.HOST, namespace, request.hashes)
        scheduler.finished(placement.placement_id, request.arrival_s, Usage(request.prompt_tokens, 1, 0))
    return cpu_ns / 1e9 / max(next_s - 1.0, 1.0), len(asked) / seconds


def print_hinted(results: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"benchmark": "tiers --hints", "results": results}))
        return
    for number, result in enumerate(results):
        if not number:
            print(
                f"{'gap closed by hints right in':>28}" + "".join(f"{of:>8}" for of in result["gap_closed"])
            )
        print(
            f"{result['workload']:>28}" + "".join(f"{part:>8.0%}" for part in result["gap_closed"].values())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, help="directory with Mooncake's conversation and synthetic traces"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="one workload, LRU and Belady only")
    parser.add_argument("--hints", action="store_true", help="only what hints of reuse would bring")
    options = parser.parse_args()
    workloads = traces(options.traces, options.quick) if options.traces else []
    kinds = GENERATED if not options.quick else () if workloads else GENERATED[:1]
    workloads += [generated(kind, 2_000 if options.quick else 6_000) for kind in kinds]
    warm_up = generated("chat", 200)
    planned(
        Workload(warm_up.name, warm_up.records, 64)
    )  # kernels are compiled or loaded before anything is timed
    if options.hints:
        print_hinted([hinted(each) for each in workloads if each.name not in LRU_IS_BEST], options.json)
        return
    results = [evaluate(workload, options.quick) for workload in workloads]
    few = 1_500 if options.quick else 6_000
    times = {
        when: simulated(workloads[0], few, plans=plans) for when, plans in (("off", False), ("on", True))
    }
    for name in ("mean_ttft_s", "p90_ttft_s"):
        results[0][name] = {when: figures[name] for when, figures in times.items()}
    cores, requests_per_s = planner_cores(1_000, 200.0, 20 if options.quick else 60)
    results[0]["planner_cores_1000_instances"] = round(cores, 4)
    results[0]["planner_requests_per_s"] = round(requests_per_s)
    if options.json:
        print(json.dumps({"benchmark": "tiers", **results[0], "results": results}))
        return
    print(
        f"{'':>22}{'blocks':>8}{'LRU':>8}{'S3-FIFO':>9}{'learned':>9}{'Belady':>8}{'gap':>7}"
        f"{'observe us':>12}{'keep us':>9}"
    )
    for r in results:
        gap = "-" if r["gap_closed"] is None else f"{r['gap_closed']:.0%}"
        print(
            f"{r['workload']:>22}{r['capacity_blocks']:>8}{r['lru_hit_rate']:>8.3f}"
            f"{r.get('s3_fifo_hit_rate', float('nan')):>9.3f}"
            f"{r['planner_hit_rate']:>9.3f}{r['belady_hit_rate']:>8.3f}{gap:>7}{r['observe_us']:>12.1f}"
            f"{r['keep_us']:>9.1f}"
        )
    first = results[0]
    for name in ("mean_ttft_s", "p90_ttft_s"):
        off, on = first[name]["off"], first[name]["on"]
        print(f"{name} of its first {few} requests, simulated: planner off {off}, on {on}")
    print(
        f"planner at 1,000 instances and {first['planner_requests_per_s']} requests/s: "
        f"{first['planner_cores_1000_instances']:.3f} of a core"
    )


if __name__ == "__main__":
    main()
