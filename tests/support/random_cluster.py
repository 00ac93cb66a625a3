"""Clusters with everything on, and requests for them, drawn at random: small, so that all of it is scarce."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.random import Generator

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Codec, InstanceClass, Speed
from conductor.placement import Role
from simulator.cluster import ClusterSpec, InstanceSpec, Outage, PoolSpec, Request

BLOCK = 16
SPEEDS = {
    Tier.HOST: Speed(50e9, 2e-4),
    Tier.DISK: Speed(5e9, 1e-3),
    Tier.POD: Speed(20e9, 5e-4),
    Tier.REMOTE: Speed(2e9, 2e-3),
}
FAST = replace(LLAMA_8B_H100, name="fast", tiers=SPEEDS, chunk_tokens=512)
SLOW = replace(
    FAST,
    name="slow",
    prefill_s_per_token=4 * FAST.prefill_s_per_token,
    decode_base_s=2 * FAST.decode_base_s,
    nic=Speed(5e9, 1e-4),
    chunk_tokens=128,
)


def random_instance(rng: Generator, name: str, role: Role) -> InstanceSpec:
    kind: InstanceClass = (FAST, SLOW)[rng.integers(2)]
    tiers = {Tier.HOST: int(rng.integers(20, 120)), Tier.DISK: int(rng.integers(60, 300))}
    return InstanceSpec(
        name,
        role,
        kind,
        kv_tokens=BLOCK * int(rng.integers(40, 120)),
        tier_tokens={tier: BLOCK * blocks for tier, blocks in tiers.items() if rng.random() < 0.6},
        pipeline=int(rng.integers(1, 5)) if role is Role.PREFILL else 1,
        sequences=int(rng.choice([3, 8, 256])),
        location=f"s/z/r{rng.integers(2)}/{name}",
        fetches_from_peers=bool(rng.random() < 0.6),
        streams_layers=bool(rng.random() < 0.5),
    )


def random_cluster(rng: Generator, *, outages: bool) -> ClusterSpec:
    mixed, pairs = ((2, 0), (0, 1), (0, 2), (1, 1))[rng.integers(4)]
    counts = {Role.MIXED: mixed, Role.PREFILL: pairs, Role.DECODE: pairs}
    instances = [
        random_instance(rng, f"{role.value}{number}", role) for role in Role for number in range(counts[role])
    ]
    names = [spec.name for spec in instances]
    members = frozenset(rng.choice(names, 2, replace=False).tolist())
    pools = [
        PoolSpec("near", Tier.POD, BLOCK * int(rng.integers(30, 200)), Speed(8e9, 1e-4), members),
        PoolSpec("far", Tier.REMOTE, BLOCK * int(rng.integers(100, 400)), Speed(1e9, 1e-3)),
    ]
    down = [name for name in names if rng.random() < 0.5] if outages else []
    return ClusterSpec(
        tuple(instances),
        tuple(pool for pool in pools if rng.random() < 0.5),
        tuple(
            Outage(name, at_s, for_s)
            for name in down
            for at_s, for_s in ((rng.uniform(0.0, 0.8), rng.uniform(0.02, 0.5)), (1.5, 0.1))
        ),
    )


def encoding(rng: Generator, spec: ClusterSpec) -> ClusterSpec:
    """The same cluster where some tiers encode, alike for all instances, and some are written back."""

    def drawn() -> Codec | None:
        if rng.random() < 0.3:
            return None
        encode, decode = (10.0 ** rng.uniform(8.0, 11.0, 2)).tolist()
        return Codec(float(rng.choice([1.0, 2.5, 8.0])), encode, decode)

    codecs = {tier: drawn() for tier in SPEEDS}
    instances = []
    for each in spec.instances:
        kind = each.instance_class
        tiers = {tier: replace(speed, codec=codecs[tier]) for tier, speed in kind.tiers.items()}
        own = each.tier_tokens.keys() | {pool.tier for pool in spec.pools if pool.serves(each.name)}
        back = own - {Tier.HOST} if Tier.HOST in each.tier_tokens else ()
        instances.append(
            replace(
                each,
                instance_class=replace(kind, name=f"{kind.name}-encoding", tiers=tiers),
                write_back=frozenset(tier for tier in sorted(back) if rng.random() < 0.5),
            )
        )
    return replace(spec, instances=tuple(instances))


def random_requests(rng: Generator, count: int) -> list[Request]:
    """Prompts that begin like one of five conversations."""
    arrivals_s = np.sort(rng.uniform(0.0, 0.8, count)).tolist()
    requests = []
    for number, arrival_s in enumerate(arrivals_s):
        prompt, chain = int(rng.integers(1, 500)), int(rng.integers(5))
        shared = min(prompt // BLOCK, int(rng.integers(0, 40)))
        hashes = np.concatenate(
            [
                10_000 * (chain + 1) + np.arange(shared),
                1_000_000 * (number + 1) + np.arange(prompt // BLOCK - shared),
            ]
        ).astype(np.uint64)
        requests.append(Request(number, arrival_s, prompt, int(rng.integers(1, 60)), hashes))
    return requests
