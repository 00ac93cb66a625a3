"""How fast clusters are simulated, scheduler included, beside Dynamo's offline replay of the same trace.

Every measurement is a process of its own, which imports, warms up with 100 requests, and then reads the trace and
simulates it: the CPU seconds of these two are counted, and the peak of its memory. Eight mixed instances of the
class llama-3.1-8b-h100 with 524,288 tokens of KV memory each under `slo`; ``tiers`` adds host and disk tiers to
each and a remote pool for all, and transfers that stream layer by layer. The trace is Mooncake's conversation trace
from ``--traces FOLDER`` (conversation_trace.jsonl), else a generated one of 12,000 requests at its rate. Dynamo
(`ai-dynamo-runtime`, where it can be imported) replays the same file on eight aggregated workers of as much memory
with its own timing model and its KV router, and again with a native host tier.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # where `simulator` is the package, and not this file

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Speed
from conductor.placement import Objectives
from conductor.policies import make_policy
from simulator.cluster import (
    ClusterSimulation,
    ClusterSpec,
    PoolSpec,
    Request,
    Simulated,
    make_scheduler,
    requests_of,
    uniform,
)
from simulator.workloads import TraceRecord, faster, generate, mooncake_line, read_mooncake

TRACE = "conversation_trace.jsonl"
REQUESTS, REQUESTS_PER_S = 12_000, 3.4
KV_TOKENS = 524_288
HOST_TOKENS, DISK_TOKENS, POOL_TOKENS = 2_000_000, 8_000_000, 30_000_000
DYNAMO_BLOCK = 16


def cluster_of(instances: int, *, tiers: bool) -> ClusterSpec:
    plain = uniform(str(instances), LLAMA_8B_H100, kv_tokens=KV_TOKENS)
    if not tiers:
        return plain
    own = {Tier.HOST: HOST_TOKENS, Tier.DISK: DISK_TOKENS}
    return ClusterSpec(
        tuple(replace(each, tier_tokens=own, streams_layers=True) for each in plain.instances),
        pools=(PoolSpec("pool", Tier.REMOTE, POOL_TOKENS, Speed(bytes_per_s=100e9, latency_s=1e-3)),),
    )


def simulate(cluster: ClusterSpec, requests: list[Request], *, step_by_step: bool = False) -> Simulated:
    scheduler = make_scheduler(cluster, make_policy("slo"), Objectives())
    return ClusterSimulation(scheduler, cluster, step_by_step=step_by_step).run(requests)


def one_simulation(trace: Path, instances: int, *, tiers: bool, limit: int, speed: float) -> dict[str, Any]:
    """What one process measures of itself."""
    cluster = cluster_of(instances, tiers=tiers)
    simulate(cluster, list(requests_of(generate("chat", 100, REQUESTS_PER_S, seed=0))))
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    requests = list(requests_of(faster(head(read_mooncake(trace), limit), speed)))
    simulated = simulate(cluster, requests)
    cpu_s, wall_s = time.process_time() - begun_cpu_s, time.perf_counter() - begun_s
    digest = hashlib.sha256()
    for result in simulated.results:
        digest.update(repr(result).encode())
    return {
        "requests": len(requests),
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "requests_per_cpu_s": round(len(requests) / cpu_s),
        "engine_runs": simulated.engine_runs,
        "results": digest.hexdigest()[:16],
    }


def one_dynamo(trace: Path, *, host_tier: bool) -> dict[str, Any]:
    from dynamo.llm import KvRouterConfig
    from dynamo.replay import run_trace_replay

    engine = {
        "backend": "vllm",
        "block_size": DYNAMO_BLOCK,
        "num_gpu_blocks": KV_TOKENS // DYNAMO_BLOCK,
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": 256,
        "worker_type": "aggregated",
    }
    if host_tier:
        engine["native_host_offload"] = {"num_host_blocks": HOST_TOKENS // DYNAMO_BLOCK}
        engine["kv_cache_bytes_per_token"] = LLAMA_8B_H100.kv_bytes_per_token
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    report = run_trace_replay(
        str(trace),
        router_mode="kv_router",
        router_config=KvRouterConfig(),
        trace_block_size=512,
        replay_mode="offline",
        extra_engine_args={"engine": engine},
        num_workers=8,
    )
    cpu_s, wall_s = time.process_time() - begun_cpu_s, time.perf_counter() - begun_s
    requests = sum(1 for _ in trace.open())
    kept = {name: value for name, value in report.summary.items() if "ttft" in name or "request" in name}
    results = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return {
        "requests": requests,
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "requests_per_cpu_s": round(requests / cpu_s),
        "results": results,
    }


def head(records: Iterator[TraceRecord], limit: int) -> Iterator[TraceRecord]:
    for number, record in enumerate(records):
        if limit and number == limit:
            return
        yield record


def in_own_process(*arguments: str) -> dict[str, Any]:
    """Run this script for one measurement."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DYN_LOG": "error"},  # Dynamo would write a line for each decision
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def generated_trace(path: Path, requests: int, requests_per_s: float) -> Path:
    with path.open("wb") as file:
        for record in generate("chat", requests, requests_per_s, seed=0):
            file.write(mooncake_line(record))
    return path


def beside_single_steps(requests: int) -> dict[str, Any]:
    """The closed form and the steps that it stands for, on the same requests, the scheduler's work in both."""
    workload = list(requests_of(generate("chat", requests, 3 * REQUESTS_PER_S, seed=1)))
    cluster = cluster_of(8, tiers=True)
    simulate(cluster, workload[:100])  # loads the kernels
    begun_s = time.process_time()
    fast = simulate(cluster, workload)
    between_s = time.process_time()
    slow = simulate(cluster, workload, step_by_step=True)
    ttft_s = {result.number: result.ttft_s for result in slow.results}
    return {
        "requests": requests,
        "runs": fast.engine_runs,
        "steps": slow.engine_runs,
        "speedup": round((time.process_time() - between_s) / (between_s - begun_s), 2),
        "worst_ttft_difference_s": max(abs(r.ttft_s - ttft_s[r.number]) for r in fast.results),
    }


def measure(*, quick: bool, traces: Path | None, dynamo: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = traces / TRACE if traces is not None else None
        if trace is None or not trace.exists():
            trace = generated_trace(Path(folder, "trace.jsonl"), REQUESTS, REQUESTS_PER_S)
        limit = "4000" if quick else "0"
        first = in_own_process("plain", str(trace), "8", limit, "1")
        again = in_own_process("plain", str(trace), "8", limit, "1")
        tiers = in_own_process("tiers", str(trace), "8", limit, "1")
        result: dict[str, Any] = {
            "benchmark": "simulator",
            "trace": trace.name if traces is not None else "generated",
            "requests_per_cpu_s": max(first["requests_per_cpu_s"], again["requests_per_cpu_s"]),
            "ratio_vs_dynamo": None,
            "peak_mb": first["peak_mb"],
            "identical_reruns": first["results"] == again["results"],
            "plain": first,
            "tiers": tiers,
            "tiers_cost": round(tiers["cpu_s"] / min(first["cpu_s"], again["cpu_s"]), 2),
            "closed_form": beside_single_steps(500 if quick else 3_000),
            "dynamo": None,
            "scaling": {},
        }
        if dynamo:
            compared = trace
            if quick:
                compared = Path(folder, "head.jsonl")
                with trace.open() as lines, compared.open("w") as file:
                    file.writelines(line for _, line in zip(range(4_000), lines, strict=False))
            peers = [in_own_process("dynamo", str(compared)) for _ in range(1 if quick else 2)]
            best = max(peer["requests_per_cpu_s"] for peer in peers)
            result["dynamo"] = {
                "plain": peers[0],
                "identical_reruns": None if quick else peers[0]["results"] == peers[1]["results"],
                "host_tier": None if quick else in_own_process("dynamo-host", str(compared)),
            }
            result["ratio_vs_dynamo"] = round(result["requests_per_cpu_s"] / best, 2)
        for instances, requests in ((8, 10_000),) if quick else SCALES:
            rate = REQUESTS_PER_S * instances / 8
            scaled = generated_trace(Path(folder, "scaled.jsonl"), requests, rate)
            result["scaling"][f"{instances} instances, {requests} requests"] = in_own_process(
                "plain", str(scaled), str(instances), "0", "1"
            )
    return result


SCALES = ((8, 10_000), (8, 100_000), (8, 1_000_000), (64, 100_000), (1_000, 100_000), (1_000, 1_000_000))


def one(arguments: list[str]) -> None:
    kind, trace, *rest = arguments
    if kind.startswith("dynamo"):
        measured = one_dynamo(Path(trace), host_tier=kind == "dynamo-host")
    else:
        instances, limit, speed = rest
        measured = one_simulation(
            Path(trace), int(instances), tiers=kind == "tiers", limit=int(limit), speed=float(speed)
        )
    measured["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(measured))


def dynamo_is_there() -> bool:
    check = [sys.executable, "-c", "import dynamo.replay"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer requests; ends within 50 s")
    parser.add_argument("--traces", type=Path, help=f"folder with {TRACE}")
    options = parser.parse_args()
    result = measure(quick=options.quick, traces=options.traces, dynamo=dynamo_is_there())
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        for key, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name + (' ' + key if key else ''):<50} {figure}")


if __name__ == "__main__":
    main()
