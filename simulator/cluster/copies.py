"""How a copy between two stores of a simulated cluster travels: over which links, at which speed at most."""

from __future__ import annotations

from typing import Final, NamedTuple

from cache_index import Tier
from simulator.cluster.engine_state import Store
from simulator.cluster.kernels import layout as k
from simulator.cluster.kernels.arrays import Arrays
from simulator.cluster.kernels.flows import DISK_LINK, HOST_LINK, IN, OUT
from simulator.cluster.specification import POOL_TIERS

_SOURCES: Final = {Tier.HOST: k.HOST, Tier.DISK: k.DISK, Tier.POD: k.POD, Tier.REMOTE: k.REMOTE}
# Of an engine's own tiers, by the slower of the two: device and host share PCIe, the disk has its own path.
_OWN_LINKS: Final = {Tier.HOST: HOST_LINK, Tier.DISK: DISK_LINK}


class Route(NamedTuple):
    """``links`` are the giver's row plus one in the upper half and the taker's in the lower, 0 for none."""

    links: int
    cap_bytes_per_s: float
    latency_s: float
    kv_bytes_per_token: float


def route(state: Arrays, source: Store, target: Store) -> Route:
    """Raises ValueError for what no simulated cluster can do: into a device, or from pool to pool."""
    if target.tier is Tier.DEVICE:
        raise ValueError("a copy into a device: only requests bring blocks there")
    pooled, into_pool = source.tier in POOL_TIERS, target.tier in POOL_TIERS
    if pooled and into_pool:
        raise ValueError("a copy from pool to pool has no link")
    engines = len(state.engines)
    speeds = state.speeds[target.owner if pooled else source.owner]
    kv_bytes = float(speeds[k.G_KV_BYTES])
    if pooled or into_pool:
        pool, engine = (source, target) if pooled else (target, source)
        link = k.LINKS_PER_ENGINE * engines + pool.owner
        own = k.LINKS_PER_ENGINE * engine.owner
        ends = (link, own + IN) if pooled else (own + OUT, link)
        cap = float(speeds[k.G_LOAD_BYTES_PER_S + _SOURCES[pool.tier]])
        latency_s = float(speeds[k.G_LOAD_LATENCY_S + _SOURCES[pool.tier]] + state.pool_latency_s[pool.owner])
    elif source.owner == target.owner:
        slower = max(source.tier, target.tier)
        ends = (k.LINKS_PER_ENGINE * source.owner + _OWN_LINKS[slower], k.NONE)
        cap = float(speeds[k.G_LOAD_BYTES_PER_S + _SOURCES[slower]])
        latency_s = float(speeds[k.G_LOAD_LATENCY_S + _SOURCES[slower]])
    else:
        ends = (k.LINKS_PER_ENGINE * source.owner + OUT, k.LINKS_PER_ENGINE * target.owner + IN)
        cap, latency_s = state.distances[_distance(state, source.owner, target.owner)].tolist()
        latency_s += float(speeds[k.G_NIC_LATENCY_S])
    return Route((ends[0] + 1) << 32 | (ends[1] + 1), cap, latency_s, kv_bytes)


def _distance(state: Arrays, one: int, other: int) -> int:
    """Index of the links between two engines: the nearest thing that they share."""
    shared = state.engines[one, k.E_LOCATION :][:4] == state.engines[other, k.E_LOCATION :][:4]
    return int(shared.argmax()) if shared.any() else 4
