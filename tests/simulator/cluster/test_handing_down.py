"""A full host tier hands down to a store that nothing is written through to: what is asked for again is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Codec, Speed
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from conductor.tier_planner_config import TierPlannerConfig
from simulator.cluster import (
    ClusterSimulation,
    ClusterSpec,
    InstanceSpec,
    PoolSpec,
    Request,
    Simulated,
    make_scheduler,
)

BLOCK = 512
CODEC = Codec(4.0, 20e9, 40e9)


def conversations(count: int = 16, turns: int = 12) -> list[Request]:
    """They take turns of four blocks each, and their next one comes when fifteen others have had theirs."""
    requests = []
    for turn in range(1, turns + 1):
        for chain in range(count):
            blocks = 4 * turn
            hashes = 1_000 * (chain + 1) + np.arange(blocks, dtype=np.uint64)
            number = len(requests)
            requests.append(Request(number, 1.5 * number, blocks * BLOCK + 1, 2, hashes))
    return requests


def run(
    actions: list[Literal["evict", "demote"]], *, codec: Codec | None = None, write_back: bool = True
) -> Simulated:
    kind = replace(
        LLAMA_8B_H100,
        name=f"with {codec}",
        tiers={Tier.HOST: Speed(50e9, 2e-4), Tier.REMOTE: Speed(10e9, 1e-3, codec)},
    )
    back = frozenset({Tier.REMOTE} if write_back else ())
    spec = ClusterSpec(
        (InstanceSpec("m0", Role.MIXED, kind, 60 * BLOCK, {Tier.HOST: 200 * BLOCK}, write_back=back),),
        (PoolSpec("store", Tier.REMOTE, 10_000 * BLOCK, Speed(10e9, 1e-3)),),
    )
    scheduler = make_scheduler(
        spec, make_policy("slo"), Objectives(ttft_s=2.0, tbt_s=0.2), block_tokens=BLOCK
    )
    planner = TierPlannerConfig(actions=actions, learns_from=40) if actions else None
    simulation = ClusterSimulation(
        scheduler, spec, Dispatcher(scheduler), block_tokens=BLOCK, tier_planner=planner
    )
    simulated = simulation.run(conversations(), lambda: simulation.engines.check_invariants())
    simulation.engines.check_invariants()
    return simulated


def loaded(simulated: Simulated) -> int:
    return sum(each.remote_tokens for each in simulated.results)


def mean_ttft_s(simulated: Simulated) -> float:
    return float(np.mean([each.ttft_s for each in simulated.results]))


def test_a_store_that_is_written_back_holds_what_is_handed_down() -> None:
    alone, handed = run(["evict"]), run(["evict", "demote"])
    assert loaded(alone) == 0 and alone.tier_traffic["remote"].written_bytes == 0
    assert loaded(handed) > 0
    assert mean_ttft_s(handed) < mean_ttft_s(alone)
    demoted = handed.tier_actions["demote"]["done"]
    assert demoted.moved_bytes >= handed.tier_traffic["remote"].written_bytes > 0
    through = run(["evict"], write_back=False)
    assert handed.tier_traffic["remote"].written_bytes <= through.tier_traffic["remote"].written_bytes


def test_a_store_that_encodes_is_handed_fewer_bytes_and_gives_them_back_sooner() -> None:
    raw, encoded = run(["evict", "demote"]), run(["evict", "demote"], codec=CODEC)
    assert loaded(encoded) >= loaded(raw) > 0
    assert encoded.tier_traffic["remote"].carried_bytes < 0.5 * raw.tier_traffic["remote"].carried_bytes
    assert mean_ttft_s(encoded) < mean_ttft_s(raw)


def test_runs_that_hand_down_are_repeatable() -> None:
    assert repr(run(["evict", "demote"], codec=CODEC)) == repr(run(["evict", "demote"], codec=CODEC))
