"""How long a placement takes: hash the prompt, match it in the index, estimate, choose, record.

One process, no HTTP. Reports microseconds per decision by number of instances and prompt length, of the minimum
over segments (the quiet-machine figure) and of the 99th percentile of all decisions.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from cache_index import CacheIndex, Namespace, Tier, sequence_hashes
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.costs import LLAMA_8B_H100
from conductor.placement import PlacementRequest, Role, Usage
from conductor.policies import make_policy
from conductor.scheduler import Objectives, Scheduler, SuspensionPolicy

BLOCK = 16


def make_scheduler(instances: int) -> Scheduler:
    """Half prefill and half decode instances; every prefill instance holds some of eight shared documents."""
    cluster = Cluster()
    for i in range(instances):
        cluster.add(
            make_instance(
                instance_id=f"i{i}",
                url=f"http://10.0.{i // 250}.{i % 250}:8000",
                role=Role.PREFILL if i % 2 == 0 else Role.DECODE,
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
            )
        )
    scheduler = Scheduler(
        cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy(), records=100
    )
    for instance in cluster:
        facts = EngineFacts((ServedModel("m"),), block_size=BLOCK, publishes_events=True)
        scheduler.instance_up(instance.instance_id, facts)
    return scheduler


def measure(instances: int, prompt_tokens: int, decisions: int) -> dict[str, Any]:
    scheduler = make_scheduler(instances)
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 32_000, prompt_tokens, dtype=np.uint32) for _ in range(8)]
    namespace = Namespace(model="m", block_size=BLOCK)
    for i, instance in enumerate(scheduler.cluster):
        hashes = sequence_hashes(documents[i % 8], BLOCK)[: generator.integers(1, prompt_tokens // BLOCK)]
        scheduler.index.store(instance.ranks[0].holder, Tier.DEVICE, namespace, hashes)
    durations = np.empty(decisions)
    for i in range(decisions):
        request = PlacementRequest("r", "m", documents[i % 8], prompt_tokens)
        started_ns = time.perf_counter_ns()
        placement = scheduler.place(request, now_s=i * 0.01)
        durations[i] = (time.perf_counter_ns() - started_ns) / 1e3
        # Decodes pile up to a few per instance, as in a cluster at work.
        scheduler.prefill_finished(placement.placement_id, i * 0.01)
        if i % 2:
            scheduler.finished(placement.placement_id, i * 0.01, Usage())
    segments = durations[len(durations) % 10 :].reshape(10, -1)
    return {
        "instances": instances,
        "prompt_tokens": prompt_tokens,
        "decisions": decisions,
        "p50_us": round(float(np.median(segments, axis=1).min()), 1),
        "p99_us": round(float(np.percentile(durations, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer decisions")
    options = parser.parse_args()
    decisions = 400 if options.quick else 4000
    results = [
        measure(instances, tokens, decisions)
        for instances in (4, 64, 1000)
        for tokens in (2_048, 8_192, 131_072)
    ]
    if options.json:
        print(json.dumps({"benchmark": "decision", "results": results}))
        return
    print(f"{'instances':>10} {'prompt tokens':>14} {'p50 us':>9} {'p99 us':>9}")
    for r in results:
        print(f"{r['instances']:>10} {r['prompt_tokens']:>14,} {r['p50_us']:>9.1f} {r['p99_us']:>9.1f}")


if __name__ == "__main__":
    main()
