"""Simulated runs written down by hand, for tests of what is told about them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from simulator.cluster import Outcome, RequestResult, Simulated, Timeline

INSTANCES = ("p0", "p1", "d0", "d1")


def finished(number: int, arrival_s: float, **changes: Any) -> RequestResult:
    """A request of 1,000 + 11 tokens over a pair: 0.1 s queued, 0.4 s of prefill, 0.1 s of hand-off."""
    facts: dict[str, Any] = {
        "prompt_tokens": 1_000,
        "output_tokens": 11,
        "cached_tokens": 400,
        "queue_s": 0.1,
        "prefilled_s": 0.5,
        "received_s": 0.6,
        "ttft_s": 0.65,
        "tbt_s": 0.04,
        "itl_s": 0.02,
        "e2e_s": 0.85,
        "prefill_instance": "p0",
        "decode_instance": "d0",
        "predicted_ttft_s": 0.7,
        "host_tokens": 100,
    }
    return RequestResult(number, Outcome.FINISHED, arrival_s, **(facts | changes))


def lost(number: int, arrival_s: float, outcome: Outcome = Outcome.REJECTED) -> RequestResult:
    return RequestResult(number, outcome, arrival_s, 1_000, 11)


def simulated(results: list[RequestResult], instances: tuple[str, ...] = INSTANCES) -> Simulated:
    """Ends with the last request; gauges count up, once a second."""
    end_s = max((r.arrival_s + r.e2e_s for r in results if r.e2e_s < np.inf), default=1.0)
    at_s = np.arange(int(end_s) + 1, dtype=np.float64)
    look = np.add.outer(np.arange(len(at_s)), np.arange(len(instances)))
    return Simulated(
        results=results,
        end_s=end_s,
        busy_s=dict.fromkeys(instances, 0.5 * end_s),
        load_variation=0.25,
        engine_runs=7,
        computed_tokens=sum(r.prompt_tokens - r.cached_tokens for r in results),
        timeline=Timeline(
            at_s=at_s,
            instances=instances,
            running=look.astype(np.int32),
            waiting=(look % 3).astype(np.int32),
            kv_usage=(look / (look.max() + 1)).astype(np.float32),
        ),
    )


def busy_pairs(count: int, seed: int = 0) -> Simulated:
    """``count`` requests over two pairs, at about ten a second; every tenth is not served."""
    random_ = random.Random(seed)
    results = []
    arrival_s = 0.0
    for number in range(count):
        arrival_s += random_.expovariate(10.0)
        if number % 10 == 9:
            results.append(lost(number, arrival_s, random_.choice([Outcome.REJECTED, Outcome.FAILED])))
            continue
        queue_s = random_.expovariate(2.0)
        prefilled_s = queue_s + random_.uniform(0.05, 1.0)
        received_s = prefilled_s + random_.uniform(0.0, 0.2)
        ttft_s = received_s + 0.02
        itl_s = random_.uniform(0.01, 0.04)
        results.append(
            finished(
                number,
                arrival_s,
                queue_s=queue_s,
                prefilled_s=prefilled_s,
                received_s=received_s,
                ttft_s=ttft_s,
                itl_s=itl_s,
                tbt_s=itl_s * random_.uniform(1.0, 2.0),
                e2e_s=ttft_s + 10 * itl_s,
                cached_tokens=random_.randrange(100, 1_000),
                prefill_instance=random_.choice(["p0", "p1"]),
                decode_instance=random_.choice(["d0", "d1"]),
                preemptions=random_.randrange(2),
            )
        )
    return simulated(results)
