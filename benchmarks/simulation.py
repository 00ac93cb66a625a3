"""How fast clusters are simulated: requests per second and per CPU second, scheduler included.

One process. Eight mixed instances and four with four, of the class llama-3.1-8b-h100, serve generated conversations
(Poisson arrivals, shared prefixes, mean answer 340 tokens) under `slo`, `lmetric` and `round_robin`; with
``--traces FOLDER`` also the Mooncake conversation trace (``conversation_trace.jsonl``) at twice its speed. Then the
closed form beside single steps, on the same requests: how much faster, and by how much the worst TTFT differs.
Reading the trace and compiling kernels is not counted.
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
from simulator.cluster import (
    ClusterSimulation,
    Request,
    Simulated,
    make_scheduler,
    requests_of,
    uniform,
)
from simulator.workloads import read_mooncake

POLICIES = ("slo", "lmetric", "round_robin")
CLUSTERS = ("8", "4p4d")
REQUESTS_PER_S = 12.0
TRACE = "conversation_trace.jsonl"
SPEED = 2.0


def simulate(
    requests: list[Request], cluster: str, policy: str, *, step_by_step: bool = False
) -> tuple[Simulated, float, float]:
    """What came out, and the wall and CPU seconds it took."""
    spec = uniform(cluster, LLAMA_8B_H100)
    scheduler = make_scheduler(spec, make_policy(policy), Objectives())
    simulation = ClusterSimulation(scheduler, spec, step_by_step=step_by_step)
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    simulated = simulation.run(requests)
    return simulated, time.perf_counter() - wall_s, time.process_time() - cpu_s


def rates(requests: list[Request], rounds: int) -> dict[str, Any]:
    """By cluster and policy, the best of several rounds: that of the quiet machine."""
    found: dict[str, Any] = {}
    for cluster in CLUSTERS:
        for policy in POLICIES:
            taken = [simulate(requests, cluster, policy)[1:] for _ in range(rounds)]
            found[f"{cluster} {policy}"] = {
                "requests_per_s": round(len(requests) / min(wall_s for wall_s, _ in taken)),
                "requests_per_cpu_s": round(len(requests) / min(cpu_s for _, cpu_s in taken)),
            }
    return found


def beside_single_steps(requests: list[Request]) -> dict[str, Any]:
    """Round robin, so that no decision can depend on rounding."""
    fast, _, fast_s = simulate(requests, "8", "round_robin")
    slow, _, slow_s = simulate(requests, "8", "round_robin", step_by_step=True)
    ttfts_s = {result.number: result.ttft_s for result in slow.results}
    return {
        "engine_runs": fast.engine_runs,
        "engine_steps": slow.engine_runs,
        "requests_per_cpu_s_single_steps": round(len(requests) / slow_s),
        "speedup": round(slow_s / fast_s, 2),
        "worst_ttft_difference_s": max(abs(r.ttft_s - ttfts_s[r.number]) for r in fast.results),
    }


def measure(*, quick: bool, traces: Path | None) -> dict[str, Any]:
    generated = list(requests_of(conversations(2_000 if quick else 10_000, requests_per_s=REQUESTS_PER_S)))
    simulate(generated[:100], "8", "slo")  # compiles, or loads what was compiled
    rounds = 2 if quick else 3
    result: dict[str, Any] = {
        "benchmark": "simulation",
        "generated": {"requests": len(generated), **rates(generated, rounds)},
        "closed_form": beside_single_steps(generated[:1_000] if quick else generated[:4_000]),
        "conversation_trace": None,
    }
    if traces is not None and (traces / TRACE).exists():
        records = islice(read_mooncake(traces / TRACE), 2_000 if quick else None)
        recorded = list(requests_of(records, SPEED))
        result["conversation_trace"] = {"requests": len(recorded), **rates(recorded, rounds)}
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
