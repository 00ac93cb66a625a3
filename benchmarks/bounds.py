"""How near the best possible `slo` comes, and what the bounds cost.

Eight mixed instances, and four with four, of the class llama-3.1-8b-h100 serve generated conversations at three
rates; with ``--traces FOLDER`` also the Mooncake conversation trace (``conversation_trace.jsonl``) at 2, 6 and 8
times its speed. Of each: the bounds, those where decode instances prefill no more than rests of 512 tokens
(``split``), what `slo` gets in the simulator, and the CPU seconds of the bounds. Reading the trace and compiling
kernels is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

from workloads.conversations import conversations

from conductor.catalogue import LLAMA_8B_H100
from conductor.placement import Objectives
from conductor.policies import make_policy
from simulator.bounds import bounds
from simulator.cluster import (
    ClusterSimulation,
    Request,
    make_scheduler,
    requests_of,
    uniform,
)
from simulator.report import summary
from simulator.workloads import read_mooncake

CLUSTERS = ("8", "4p4d")
RATES = (6.0, 18.0, 24.0)
TRACE = "conversation_trace.jsonl"
SPEEDS = (2.0, 6.0, 8.0)
OBJECTIVES = Objectives()
REST_TOKENS = 512  # that `slo` has decode instances prefill


def compare(cluster: str, requests: list[Request]) -> dict[str, Any]:
    """The bounds beside what `slo` gets."""
    gc.collect()
    before_s = time.process_time()
    bound = bounds(uniform(cluster, LLAMA_8B_H100), requests, OBJECTIVES)
    taken_s = time.process_time() - before_s
    split = bounds(uniform(cluster, LLAMA_8B_H100), requests, OBJECTIVES, decode_prefill_tokens=REST_TOKENS)
    spec = uniform(cluster, LLAMA_8B_H100)
    scheduler = make_scheduler(spec, make_policy("slo"), OBJECTIVES)
    found = summary(ClusterSimulation(scheduler, spec).run(requests), OBJECTIVES)
    mean_ttft_s = found["time_to_first_token"]["avg"] / 1e3
    return {
        "requests": len(requests),
        "cpu_s": round(taken_s, 2),
        "mean_ttft_s": {
            "bound": round(bound.mean_ttft_s, 4),
            "split": round(split.mean_ttft_s, 4),
            "slo": round(mean_ttft_s, 4),
        },
        "ttft_argument": bound.ttft_argument,
        "slo_ttft_of_bound": round(mean_ttft_s / bound.mean_ttft_s, 2),
        "good": {
            "bound": round(bound.good_requests / len(requests), 4),
            "split": round(split.good_requests / len(requests), 4),
            "slo": round(found["good_request_fraction"], 4),
        },
        "reuse": {
            "unlimited": round(bound.reuse_ratio_unlimited, 4),
            "capacity": round(bound.reuse_ratio_capacity, 4),
            "slo": round(found["prefix_cache_reused_ratio"], 4),
        },
    }


def measure(*, quick: bool, traces: Path | None) -> dict[str, Any]:
    count = 800 if quick else 12_000
    result: dict[str, Any] = {"benchmark": "bounds"}
    warm_up = list(requests_of(conversations(50, requests_per_s=10.0)))
    compare("8", warm_up)
    for cluster in CLUSTERS:
        for rate in RATES:
            requests = list(requests_of(conversations(count, requests_per_s=rate)))
            result[f"generated {rate:g}/s {cluster}"] = compare(cluster, requests)
    if traces is None or not (traces / TRACE).exists():
        return result
    for cluster in CLUSTERS:
        for speed in SPEEDS:
            records = islice(read_mooncake(traces / TRACE), count if quick else None)
            result[f"conversation x{speed:g} {cluster}"] = compare(cluster, list(requests_of(records, speed)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer requests; ends within 50 s")
    parser.add_argument("--traces", type=Path, help=f"folder with {TRACE}")
    options = parser.parse_args()
    result = measure(quick=options.quick, traces=options.traces)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        for key, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name + (' ' + key if key else ''):<50} {figure}")


if __name__ == "__main__":
    main()
