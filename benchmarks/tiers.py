"""What a tier of bounded room reuses when it keeps blocks by learned value, beside LRU, S3-FIFO and Belady.

Every request of a workload goes through one cache. Hit rates are those of blocks, looked up one by one; what
`RetainedBlocks` knows of the future is nothing: the model learns from each request as it comes, from the first one
on. With ``--traces`` the directory of Mooncake's published traces: 5,860 blocks of 512 tokens for the conversation
and the synthetic trace. Generated workloads get room for a tenth of their blocks.

Then the first workload's first requests are simulated on the shipped cluster h100-4-tiers with the tier planner off
and on, and the planner's CPU time is taken at 1,000 instances, whose host tiers are full: chats fill them, what is
ordered is carried out, and engines drop what was used longest ago where that is not enough.

With ``--hints`` something else is measured: what it brings when each request tells whether its prompt will be used
again, and is right about that more or less often. The model is told the hints as kinds of requests, not what they
mean.
"""

from __future__ import annotations

import argparse
import gc
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

from cache_index import CacheIndex, Holder, Namespace, Tier
from conductor.actions import ActionKind, TierAction
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
HOST_BLOCKS, FEW_HOST_BLOCKS = 200, 60  # of each of the instances for which plans are timed
FILLED_BY = 0.25  # requests a block: chats have six blocks, some of which are there already
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


class HostTiers:
    """What engines do: keep what they compute, drop what was used longest ago when full, drop what is ordered."""

    def __init__(self, index: CacheIndex, namespace: Namespace, capacity_blocks: int) -> None:
        self._index = index
        self._namespace = namespace
        self._capacity_blocks = capacity_blocks
        self._kept: dict[str, OrderedDict[int, None]] = {}

    def store(self, instance_id: str, hashes: Sequence[int]) -> None:
        kept = self._kept.setdefault(instance_id, OrderedDict())
        new = [block for block in hashes if block not in kept]
        for block in reversed(hashes):  # ends go before beginnings
            kept[block] = None
            kept.move_to_end(block)
        gone = [kept.popitem(last=False)[0] for _ in range(len(kept) - self._capacity_blocks)]
        holder = Holder(instance_id)
        self._index.store(holder, Tier.HOST, self._namespace, np.array(new, np.uint64))
        self._index.remove(holder, Tier.HOST, self._namespace, np.array(gone, np.uint64))

    def carry_out(self, action: TierAction) -> None:
        if action.kind is not ActionKind.EVICT or action.prefix is None:
            return
        kept = self._kept[action.target.holder.instance_id]
        asked = action.prefix.hashes[action.start : action.stop].tolist()
        gone = [block for block in asked if kept.pop(block, 0) is None]
        self._index.remove(action.target.holder, Tier.HOST, self._namespace, np.array(gone, np.uint64))


@dataclass(frozen=True, slots=True)
class PlannerTime:
    requests_per_s: float
    cores: float  # CPU seconds a second
    drops_per_s: float  # orders to drop: tiers were full


def chats_at_rate(requests: int, requests_per_s: float) -> list[TraceRecord]:
    """At even times, from the middle of a workload twice as long: at its ends there are few sessions."""
    middle = generate("chat", 2 * requests, requests_per_s, seed=1)[requests // 2 :][:requests]
    return [
        msgspec.structs.replace(each, arrival_s=number / requests_per_s) for number, each in enumerate(middle)
    ]


def planner_time(instances: int, requests_per_s: float, host_blocks: int, seconds: int) -> PlannerTime:
    """Of chats over instances, in the ``seconds`` after their host tiers have filled."""
    cluster = ClusterSpec(
        tuple(
            replace(each, tier_tokens={Tier.HOST: host_blocks * BLOCK_TOKENS})
            for each in uniform(str(instances), LLAMA_8B_H100).instances
        )
    )
    scheduler = make_scheduler(cluster, make_policy("least_loaded"), Objectives())
    planner = TierPlanner(
        scheduler.cluster, scheduler.index, sites_of(cluster), can_do, PlannerSettings(), id_prefix="t"
    )
    scheduler.on_placed = planner.placed
    tiers = HostTiers(scheduler.index, Namespace(MODEL, BLOCK_TOKENS), host_blocks)
    filling = round(FILLED_BY * instances * host_blocks)
    fill_s = filling / requests_per_s
    records = chats_at_rate(filling + round(seconds * requests_per_s), requests_per_s)
    asked = requests_at(records, Load()).requests
    gc.collect()
    gc.freeze()  # as `conductor serve` does once it is up: the workload is none of the planner's garbage
    next_s, cpu_ns, timed, dropped = 1.0, 0, 0, 0
    for request in asked:
        while request.arrival_s >= next_s:
            begun_ns = time.thread_time_ns()
            actions = planner.plan(next_s)
            if next_s > fill_s:
                cpu_ns += time.thread_time_ns() - begun_ns
                dropped += sum(action.kind is ActionKind.EVICT for action in actions)
            for action in actions:
                tiers.carry_out(action)
            next_s += 1.0
        timed += request.arrival_s > fill_s
        placement = scheduler.place(placement_request(request), request.arrival_s)
        tiers.store(placement.prefill.instance_id, request.hashes.tolist())
        scheduler.finished(placement.placement_id, request.arrival_s, Usage(request.prompt_tokens, 1, 0))
    gc.unfreeze()
    return PlannerTime(timed / seconds, cpu_ns / 1e9 / seconds, dropped / seconds)


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
    parser.add_argument(
        "--requests-per-s",
        type=float,
        nargs="+",
        default=[200.0],
        metavar="RATE",
        help="at which the planner is timed (%(default)s)",
    )
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
    plans = [
        planner_time(
            1_000, rate, FEW_HOST_BLOCKS if options.quick else HOST_BLOCKS, 10 if options.quick else 60
        )
        for rate in options.requests_per_s
    ]
    results[0]["planner_cores_1000_instances"] = round(plans[0].cores, 4)
    results[0]["planner_requests_per_s"] = round(plans[0].requests_per_s)
    results[0]["planner"] = [
        {
            "requests_per_s": round(each.requests_per_s),
            "cores": round(each.cores, 4),
            "drops_per_s": round(each.drops_per_s),
        }
        for each in plans
    ]
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
    for each in plans:
        print(
            f"planner at 1,000 instances and {each.requests_per_s:.0f} requests/s: {each.cores:.3f} of a core, "
            f"{each.drops_per_s:.0f} drops/s"
        )


if __name__ == "__main__":
    main()
