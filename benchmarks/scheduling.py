"""How long a placement takes: match the prompt in the index, estimate every instance, choose.

One process, no HTTP, no tokenization. Half the instances prefill and half decode; every prefill instance holds part
of one of eight documents, and up to a thousand requests are under way. Prompts are 6,000 tokens as sequence hashes;
`with_hashing` has them as token ids; `place` also reserves and records. Then requests that arrive together: summed
cost of the joint assignment against one by one, and what it takes. Where `ai-dynamo-runtime` is importable (``pip
install --target FOLDER --no-deps ai-dynamo-runtime==1.6.1``, then ``PYTHONPATH=FOLDER``), its SelectionService
selects by hashes over as many workers with the same caches, in the same run: `decision` beside its ``select``,
`place` beside its ``select_and_reserve``. It chooses one worker, so in this comparison ours are all mixed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from workloads.selection_service import Tokens, latencies_us

from cache_index import CacheIndex, Namespace, Tier, sequence_hashes
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.joint import assign
from conductor.placement import Objectives, PlacementRequest, Role, Usage
from conductor.policies import make_policy
from conductor.scheduler import Scheduler

BLOCK = 16
PROMPT_TOKENS = 6_000
DOCUMENTS = 8
UNDER_WAY = 1_000
NOTHING: Tokens = np.empty(0, np.uint32)


def make_scheduler(instances: int, policy: str = "slo", role: Role | None = None) -> Scheduler:
    """All up; half prefill and half decode instances, unless all have one role."""
    cluster = Cluster()
    for i in range(instances):
        cluster.add(
            make_instance(
                instance_id=f"i{i}",
                url=f"http://10.{i // 62500}.{i // 250 % 250}.{i % 250}:8000",
                role=role or (Role.PREFILL if i % 2 == 0 else Role.DECODE),
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
            )
        )
    scheduler = Scheduler(cluster, CacheIndex(), make_policy(policy), Objectives(), SuspensionPolicy())
    for instance in cluster:
        facts = EngineFacts((ServedModel("m"),), block_size=BLOCK, publishes_events=True)
        scheduler.instance_up(instance.instance_id, facts)
    return scheduler


def make_documents(tokens: int) -> list[Tokens]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 32_000, tokens, dtype=np.uint32) for _ in range(DOCUMENTS)]


def held_blocks(holders: int) -> list[tuple[int, int]]:
    """Document and number of blocks of each holder."""
    generator = np.random.default_rng(1)
    return [(i % DOCUMENTS, int(generator.integers(1, PROMPT_TOKENS // BLOCK + 1))) for i in range(holders)]


def fill(scheduler: Scheduler, documents: list[Tokens]) -> None:
    """Give every instance that prefills the beginning of a document."""
    namespace = Namespace(model="m", block_size=BLOCK)
    holders = [instance.ranks[0].holder for instance in scheduler.cluster if instance.role is not Role.DECODE]
    for holder, (document, blocks) in zip(holders, held_blocks(len(holders)), strict=True):
        hashes = sequence_hashes(documents[document], BLOCK)
        scheduler.index.store(holder, Tier.DEVICE, namespace, hashes[:blocks])


def make_request(document: Tokens, *, as_hashes: bool) -> PlacementRequest:
    return PlacementRequest(
        "r",
        "m",
        NOTHING if as_hashes else document,
        len(document),
        hashes=sequence_hashes(document, BLOCK) if as_hashes else None,
        hashes_block_size=BLOCK if as_hashes else None,
    )


def decide(
    instances: int, decisions: int, *, as_hashes: bool = True, reserve: bool = False, role: Role | None = None
) -> NDArray[np.float64]:
    """Microseconds of each of ``decisions``, with `UNDER_WAY` requests in progress; placed too if ``reserve``."""
    documents = make_documents(PROMPT_TOKENS)
    scheduler = make_scheduler(instances, role=role)
    fill(scheduler, documents)
    requests = [make_request(document, as_hashes=as_hashes) for document in documents]
    durations_us = np.empty(decisions)
    under_way: list[str] = []
    gc.collect()
    gc.freeze()
    for i in range(-UNDER_WAY, decisions):
        now_s = i * 1e-3
        request = requests[i % DOCUMENTS]
        if not reserve:
            started_ns = time.perf_counter_ns()
            scheduler.consider(request, now_s)
            elapsed_ns = time.perf_counter_ns() - started_ns
        started_ns = time.perf_counter_ns()
        placement = scheduler.place(request, now_s)
        if reserve:
            elapsed_ns = time.perf_counter_ns() - started_ns
        if i >= 0:
            durations_us[i] = elapsed_ns / 1e3
        under_way.append(placement.placement_id)
        # A prefill ends with every arrival, and an answer.
        if len(under_way) > UNDER_WAY // 2:
            scheduler.prefill_finished(under_way[-UNDER_WAY // 2], now_s)
        if len(under_way) > UNDER_WAY:
            finished = under_way.pop(0)
            scheduler.first_token(finished, now_s)
            scheduler.finished(finished, now_s, Usage())
    return durations_us


def quantiles(durations_us: NDArray[np.float64]) -> tuple[float, float]:
    """p50 and p99, each the least of ten segments: the figures of the quiet machine."""
    segments = durations_us[len(durations_us) % 10 :].reshape(10, -1)
    p50, p99 = np.quantile(segments, [0.5, 0.99], axis=1).min(axis=1)
    return round(float(p50), 1), round(float(p99), 1)


def together(batch: int, instances: int, rounds: int) -> dict[str, float]:
    """Summed cost of ``batch`` simultaneous requests, jointly against one by one, and what solving takes."""
    documents = make_documents(PROMPT_TOKENS)
    scheduler = make_scheduler(instances, role=Role.MIXED)
    fill(scheduler, documents)
    generator = np.random.default_rng(batch)
    ratios, milliseconds = [], []
    for _ in range(rounds):
        candidates = []
        for _ in range(batch):
            document = documents[generator.integers(DOCUMENTS)][: int(generator.integers(200, PROMPT_TOKENS))]
            record = scheduler.consider(make_request(document, as_hashes=True), 0.0)
            assert record.candidates is not None
            candidates.append(record.candidates)
        started_s = time.perf_counter()
        joint = assign(candidates)
        milliseconds.append((time.perf_counter() - started_s) * 1e3)
        behind_s = np.zeros(instances)
        apart_s = 0.0
        for c in candidates:
            costs = c.ttft_s + c.inflicted_s + c.eviction_s + behind_s
            rank = int(costs.argmin())
            apart_s += float(costs[rank])
            behind_s[rank] += c.prefill_s[rank]
        assert joint is not None
        ratios.append(joint.cost_s / apart_s)
    return {
        "cost_ratio": round(float(np.mean(ratios)), 4),
        "p50_ms": round(float(np.median(milliseconds)), 3),
    }


def beside_dynamo(instances: int, calls: int, *, reserve: bool) -> NDArray[np.float64] | None:
    """Its latencies, None where it cannot be imported."""
    documents = make_documents(PROMPT_TOKENS)
    held = [(documents[document], blocks) for document, blocks in held_blocks(instances)]
    try:
        return asyncio.run(latencies_us(held, documents, BLOCK, calls, reserve=reserve, under_way=UNDER_WAY))
    except ImportError:
        return None


KINDS = {
    "decision": {},
    "with_hashing": {"as_hashes": False},
    "place": {"reserve": True},
}


def measure(*, quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"benchmark": "scheduling", "prompt_tokens": PROMPT_TOKENS}
    counts = (5_000, 5_000, 5_000, 1_000) if quick else (20_000,) * 4
    decisions = dict(zip((4, 64, 1_000, 10_000), counts, strict=True))
    for kind, options in KINDS.items():
        for instances, count in decisions.items():
            durations_us = decide(instances, count, **options)
            for name, figure in zip(("p50", "p99"), quantiles(durations_us), strict=True):
                result.setdefault(f"{kind}_{name}_us", {})[str(instances)] = figure
            if kind == "place":
                per_s = round(1e6 / float(durations_us.mean()))
                result.setdefault("placements_per_s", {})[str(instances)] = per_s
    for batch, instances in ((16, 16), (64, 64), (64, 1_000)):
        figures = together(batch, instances, 5 if quick else 30)
        result.setdefault("together", {})[f"{batch}x{instances}"] = figures
    result["p50_ratio_vs_dynamo"] = result["p99_ratio_vs_dynamo"] = None
    for kind in ("decision", "place"):
        for instances in (64, 512) if quick else (64, 1_000):
            theirs = beside_dynamo(instances, 1_000 if quick else 4_000, reserve=kind == "place")
            if theirs is None:
                continue
            ours = decide(instances, 2_000 if quick else 10_000, reserve=kind == "place", role=Role.MIXED)
            for name, peer, own in zip(("p50", "p99"), quantiles(theirs), quantiles(ours), strict=True):
                result.setdefault(f"dynamo_{kind}_{name}_us", {})[str(instances)] = peer
                ratio = round(peer / own, 2)
                result.setdefault(f"{kind}_{name}_ratios_vs_dynamo", {})[str(instances)] = ratio
                if kind == "decision":
                    key = f"{name}_ratio_vs_dynamo"
                    result[key] = min(ratio, result[key] or ratio)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer decisions; ends within 50 s")
    options = parser.parse_args()
    result = measure(quick=options.quick)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        for key, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name + (' ' + key if key else ''):<40} {figure}")


if __name__ == "__main__":
    main()
