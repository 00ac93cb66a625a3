"""How a copy between two stores of a simulated cluster travels: over which links, at which speed at most."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from cache_index import Tier
from conductor.costs import POOL_TIERS
from simulator.cluster.engine_state import Store
from simulator.cluster.kernels import layout as k
from simulator.cluster.kernels.arrays import Arrays
from simulator.cluster.kernels.flows import DISK_LINK, HOST_LINK, IN, OUT

SOURCES: Final = {Tier.HOST: k.HOST, Tier.DISK: k.DISK, Tier.POD: k.POD, Tier.REMOTE: k.REMOTE}
# Of an engine's own tiers, by the slower of the two: device and host share PCIe, the disk has its own path.
OWN_LINKS: Final = {Tier.HOST: HOST_LINK, Tier.DISK: DISK_LINK}


class Route(NamedTuple):
    """``links`` are the giver's row plus one in the upper half and the taker's in the lower, 0 for none; ``coder``
    is a third, that of the engine's encoder or decoder. Bytes are those that travel.
    """

    links: int
    coder: int
    cap_bytes_per_s: float
    latency_s: float
    bytes_per_token: float


def route(state: Arrays, source: Store, target: Store) -> Route:
    """What travels to or from a tier that encodes is encoded; between engines it is raw.

    Raises ValueError for what no simulated cluster can do: into a device, or from pool to pool.
    """
    if target.tier is Tier.DEVICE:
        raise ValueError("a copy into a device: only requests bring blocks there")
    pooled, into_pool = source.tier in POOL_TIERS, target.tier in POOL_TIERS
    if pooled and into_pool:
        raise ValueError("a copy from pool to pool has no link")
    engines = len(state.engines)
    speeds = state.speeds[target.owner if pooled else source.owner]
    size, coder = float(speeds[k.G_KV_BYTES]), k.NONE
    if pooled or into_pool:
        pool, engine = (source, target) if pooled else (target, source)
        link = k.LINKS_PER_ENGINE * engines + pool.owner
        own = k.LINKS_PER_ENGINE * engine.owner
        ends = (link, own + IN) if pooled else (own + OUT, link)
        kind = SOURCES[pool.tier]
        cap, size = float(speeds[k.G_LOAD_BYTES_PER_S + kind]), float(speeds[k.G_STORED_BYTES + kind])
        latency_s = float(speeds[k.G_LOAD_LATENCY_S + kind] + state.pool_latency_s[pool.owner])
        coder = own + (k.DECODER if pooled else k.ENCODER) + kind
    elif source.owner == target.owner:
        slower = max(source.tier, target.tier)
        kind, own = SOURCES[slower], k.LINKS_PER_ENGINE * source.owner
        ends = (own + OWN_LINKS[slower], k.NONE)
        cap, size = float(speeds[k.G_LOAD_BYTES_PER_S + kind]), float(speeds[k.G_STORED_BYTES + kind])
        latency_s = float(speeds[k.G_LOAD_LATENCY_S + kind])
        coder = own + (k.DECODER if slower == source.tier else k.ENCODER) + kind
    else:
        ends = (k.LINKS_PER_ENGINE * source.owner + OUT, k.LINKS_PER_ENGINE * target.owner + IN)
        cap, latency_s = state.distances[_distance(state, source.owner, target.owner)].tolist()
        latency_s += float(speeds[k.G_NIC_LATENCY_S])
    if coder != k.NONE and np.isinf(state.links[coder]):  # nothing is coded
        coder = k.NONE
    return Route((ends[0] + 1) << 32 | (ends[1] + 1), coder, cap, latency_s, size)


def _distance(state: Arrays, one: int, other: int) -> int:
    """Index of the links between two engines: the nearest thing that they share."""
    shared = state.engines[one, k.E_LOCATION :][:4] == state.engines[other, k.E_LOCATION :][:4]
    return int(shared.argmax()) if shared.any() else 4
