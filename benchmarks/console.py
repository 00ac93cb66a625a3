"""What an open console costs the server: CPU of each answer that the page asks for, by the size of the cluster.

The routes are asked within this process, without sockets, and CPU time is measured: other load on the machine does
not count. ``held_ms`` is the longest time for which one answer keeps requests waiting. Answers that the server
keeps for a second are made anew each time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])

from fastapi import FastAPI

from cache_index import CacheIndex, Holder, Namespace, Tier, VllmEventSource, sequence_hashes
from conductor.cache_rest import make_cache_router
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.placement import Objectives, PlacementRequest, Role, Usage
from conductor.policies import make_policy
from conductor.rank import ReportedLoad
from conductor.rest import make_rest_router
from conductor.scheduler import Scheduler

BLOCK, PROMPT = 16, 2_048
VIEWS = {  # path and seconds between two questions: of the frame, and of each view beside it
    "": (("/v1/cluster", 2.0), ("/v1/problems", 5.0)),
    "cluster": (("/v1/cluster/load", 2.0),),
    "placements": (("/v1/placements?limit=100", 2.0),),
    "prefixes": (("/v1/cache/hot?limit=50", 4.0),),
    "objectives": (("/v1/cluster/history?span_s=300", 5.0),),
    "problems": (("/v1/problems", 3.0), ("/v1/diagnosis", 5.0)),
}


class Clock:
    """Goes on by two seconds at every question, so that no answer is a kept one."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def served(instances: int, clock: Clock) -> FastAPI:
    """The routes over that many instances, which have reported their load and served some requests."""
    cluster, index = Cluster(), CacheIndex()
    for number in range(instances):
        cluster.add(
            make_instance(
                instance_id=f"engine-{number:04}",
                url=f"http://10.1.{number // 250}.{number % 250 + 1}:8000",
                role=(Role.PREFILL, Role.DECODE, Role.MIXED)[number % 3],
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
            )
        )
    suspension = SuspensionPolicy()
    scheduler = Scheduler(cluster, index, make_policy("slo"), Objectives(ttft_s=2.0, tbt_s=0.05), suspension)
    facts = EngineFacts((ServedModel("llama"),), BLOCK, 28_000, publishes_events=True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32_000, PROMPT, dtype=np.uint32)
    for instance in cluster:
        scheduler.instance_up(instance.instance_id, facts)
        index.register(Holder(instance.instance_id))
        hashes = sequence_hashes(tokens[: int(rng.integers(1, PROMPT // BLOCK)) * BLOCK], BLOCK)
        index.store(Holder(instance.instance_id), Tier.DEVICE, Namespace("llama", BLOCK), hashes)
        scheduler.report_load(instance.instance_id, 0, ReportedLoad(3, 1, 0.5, clock()))
    for number in range(200):
        own = tokens.copy()
        own[int(rng.integers(BLOCK, PROMPT)) :] = number
        asked = PlacementRequest(model="llama", tokens=own, prompt_tokens=PROMPT, request_id=str(number))
        placement_id = scheduler.place(asked, clock()).placement_id
        if number % 4:
            scheduler.first_token(placement_id, clock() + 0.1)
            scheduler.finished(placement_id, clock() + 1.1, Usage(PROMPT, 101, 0))
    app = FastAPI()
    app.include_router(make_rest_router(scheduler, clock))
    app.include_router(make_cache_router(index, VllmEventSource(index)))
    return app


async def cost(client: httpx.AsyncClient, path: str, clock: Clock, times: int) -> tuple[float, float, int]:
    """CPU seconds of one answer, client included, the longest that it held the event loop, and its bytes."""
    longest, spent, size = 0.0, 0.0, 0
    for _ in range(times):
        clock.now_s += 2.0
        before_s = time.process_time()
        answer = await client.get(path)
        spent += time.process_time() - before_s
        assert answer.status_code == 200, answer.text
        size = len(answer.content)
    clock.now_s += 2.0
    asking = asyncio.create_task(client.get(path))
    while not asking.done():
        before_s = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before_s)
    return spent / times, longest, size


async def measured(instances: int, times: int) -> dict[str, Any]:
    clock = Clock()
    transport = httpx.ASGITransport(served(instances, clock))
    answers: dict[str, Any] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        asked = {path for view in VIEWS.values() for path, _ in view}
        for path in sorted(asked):
            await cost(client, path, clock, 2)
            cpu_s, held_s, size = await cost(client, path, clock, times)
            answers[path] = {"cpu_ms": cpu_s * 1e3, "held_ms": held_s * 1e3, "bytes": size}
    share = {
        view or "frame": sum(answers[path]["cpu_ms"] / 1e3 / every_s for path, every_s in paths)
        for view, paths in VIEWS.items()
    }
    views = {view: share["frame"] + own for view, own in share.items() if view != "frame"}
    return {"instances": instances, "answers": answers, "core_share": views}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    results = [asyncio.run(measured(count, 5 if options.quick else 40)) for count in (4, 100, 1_000)]
    if options.json:
        print(json.dumps({"benchmark": "console", "clusters": results}))
        return
    for result in results:
        print(f"{result['instances']} instances")
        for path, figures in result["answers"].items():
            times = f"{figures['cpu_ms']:7.2f} ms CPU, holds {figures['held_ms']:6.2f} ms"
            print(f"  {path:32} {times}, {figures['bytes']:8,} bytes")
        shares = ", ".join(f"{view} {share:.2%}" for view, share in result["core_share"].items())
        print(f"  one console takes of a core: {shares}")


if __name__ == "__main__":
    main()
