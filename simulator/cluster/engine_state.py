"""The arrays of a simulated cluster, as they are when nothing has happened yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cache_index import Tier
from conductor.costs import Distance, Speed, Topology
from simulator.cluster.kernels import layout as k
from simulator.cluster.kernels.arrays import Arrays, Ints, Words
from simulator.cluster.specification import ClusterSpec, InstanceSpec

_INT = np.int64
_UNLIMITED: Final = Speed(bytes_per_s=math.inf, latency_s=0.0)
_SOURCES: Final = (Tier.HOST, Tier.DISK, Tier.POD, Tier.REMOTE)


@dataclass(frozen=True, slots=True)
class Store:
    """A place for blocks: an instance's tier, or a pool. ``owner`` is their number in the specification."""

    owner: int
    tier: Tier
    capacity_tokens: int


def stores_of(cluster: ClusterSpec) -> Iterator[Store]:
    """All stores of a cluster in the order of their numbers; pools last."""
    for owner, instance in enumerate(cluster.instances):
        yield Store(owner, Tier.DEVICE, instance.kv_tokens)
        for tier, tokens in sorted(instance.tier_tokens.items()):
            yield Store(owner, tier, tokens)
    for owner, pool in enumerate(cluster.pools):
        yield Store(owner, pool.tier, pool.capacity_tokens)


def make_state(
    cluster: ClusterSpec,
    stores: Sequence[Store],
    hashes: Words,
    block_tokens: int,
    longest_output_tokens: int,
) -> Arrays:
    """A cluster where nothing has happened yet; ``hashes`` are those of all requests."""
    engines, pools = len(cluster.instances), len(cluster.pools)
    batch = max(instance.sequences for instance in cluster.instances)
    places = (engines, batch)
    residencies = sum(store.capacity_tokens // block_tokens + 1 for store in stores)
    links = k.LINKS_PER_ENGINE * engines + pools
    leaves = 1 << max(engines - 1, 1).bit_length()
    work, segments, events = 256, 2 * batch, 1024
    state = Arrays(
        counters=np.zeros(k.C_COLUMNS, _INT),
        hashes=hashes,
        work=np.full((work, k.W_COLUMNS), k.NONE, _INT),
        work_s=np.full((work, k.F_COLUMNS), np.inf),
        engines=np.zeros((engines, k.E_COLUMNS), _INT),
        speeds=np.zeros((engines, k.G_COLUMNS)),
        ends=np.full(2 * leaves, np.inf),
        touched=np.zeros(engines, _INT),
        prefilling=np.zeros(places, _INT),
        chunk_work=np.zeros(places, _INT),
        chunk_tokens=np.zeros(places, _INT),
        decode_end=np.zeros(places, _INT),
        decode_work=np.zeros(places, _INT),
        silent=np.zeros(places, _INT),
        log_s=np.zeros((engines, 64, 2)),
        log_steps=np.zeros((engines, 64), _INT),
        segments=np.zeros((segments, 3), _INT),
        segment_gap_s=np.zeros(segments),
        stores=np.zeros((len(stores), k.S_COLUMNS), _INT),
        residencies=np.full((residencies, k.R_COLUMNS), k.NONE, _INT),
        residency_hash=np.zeros(residencies, np.uint64),
        table=np.full(1 << (2 * residencies - 1).bit_length(), k.NONE, _INT),
        pools=np.zeros((engines, pools), _INT),
        pool_source=np.zeros(pools, _INT),
        pool_latency_s=np.array([pool.speed.latency_s for pool in cluster.pools]),
        load_blocks=np.zeros(len(stores), _INT),
        events=np.zeros((events, k.V_COLUMNS), _INT),
        links=np.full(links, np.inf),
        link_flows=np.zeros(links, _INT),
        link_bytes=np.zeros(links),
        distances=np.array([[cluster.links[d].bytes_per_s, cluster.links[d].latency_s] for d in Distance]),
        copies=np.full((16, k.P_COLUMNS), k.NONE, _INT),
        flows=np.zeros((8 * batch, k.L_COLUMNS), _INT),
        flow_s=np.zeros((8 * batch, k.M_COLUMNS)),
        timers=np.zeros(4 * batch, _INT),
        timer_s=np.zeros(4 * batch),
        notices=np.zeros((6 * batch, k.N_COLUMNS)),
        gaps_s=np.zeros(longest_output_tokens + 1),
    )
    state.counters[k.C_BLOCK_TOKENS] = block_tokens
    chain(state.work, k.W_NEXT, 0, k.NONE)
    chain(state.events, k.V_NEXT, 0, k.NONE)
    chain(state.segments, 2, 0, k.NONE)
    chain(state.residencies, k.R_NEXT, 0, k.NONE)
    chain(state.copies, k.P_NEXT, 0, k.NONE)
    topology = Topology(cluster.links)
    for number, instance in enumerate(cluster.instances):
        _set_engine(state, number, instance, topology)
    for number, pool in enumerate(cluster.pools):
        state.links[k.LINKS_PER_ENGINE * engines + number] = pool.speed.bytes_per_s
    _set_stores(state, cluster, stores, block_tokens)
    return state


def _set_engine(state: Arrays, number: int, instance: InstanceSpec, topology: Topology) -> None:
    row, speeds, kind = state.engines[number], state.speeds[number], instance.instance_class
    for queue in (k.E_WAITING, k.E_WANTS_KV, k.E_ARRIVED, k.E_LOADED):
        row[queue] = row[queue + 1] = k.NONE
    row[k.E_HOST] = row[k.E_DISK] = k.NONE
    block_tokens = int(state.counters[k.C_BLOCK_TOKENS])
    row[k.E_KV_TOKENS] = instance.kv_tokens // block_tokens * block_tokens
    row[k.E_SEQUENCES] = instance.sequences
    row[k.E_CHUNK_TOKENS] = kind.chunk_tokens
    row[k.E_STAGES] = instance.pipeline
    row[k.E_STREAMS] = instance.streams_layers
    row[k.E_DISK_WRITE_BACK] = Tier.DISK in instance.write_back
    row[k.E_LOCATION : k.E_LOCATION + 4] = topology.location_ids(instance.location, instance.name)
    speeds[k.G_A] = kind.prefill_s_per_token
    speeds[k.G_B] = kind.prefill_s_per_token_squared
    speeds[k.G_BASE] = kind.prefill_base_s
    speeds[k.G_D] = kind.prefill_s_per_cached_token
    speeds[k.G_DECODE_BASE] = kind.decode_base_s
    speeds[k.G_PER_SEQUENCE] = kind.decode_s_per_sequence
    speeds[k.G_PER_CONTEXT] = kind.decode_s_per_context_token
    speeds[k.G_KV_BYTES] = kind.kv_bytes_per_token
    speeds[k.G_LAYERS] = kind.layers
    speeds[k.G_NIC_LATENCY_S] = kind.nic.latency_s
    links = k.LINKS_PER_ENGINE * number
    state.links[links] = state.links[links + 1] = kind.nic.bytes_per_s
    for source, tier in enumerate(_SOURCES):
        speed = kind.tiers.get(tier, _UNLIMITED)
        speeds[k.G_LOAD_BYTES_PER_S + source] = speed.bytes_per_s
        speeds[k.G_LOAD_LATENCY_S + source] = speed.latency_s
        speeds[k.G_STORED_BYTES + source] = kind.stored_bytes_per_token(tier)
        if speed.codec is not None:  # coders, by bytes as they travel
            state.links[links + k.DECODER + source] = speed.codec.decode_bytes_per_s / speed.codec.ratio
            state.links[links + k.ENCODER + source] = speed.codec.encode_bytes_per_s / speed.codec.ratio
        if tier in (Tier.HOST, Tier.DISK):
            state.links[links + 2 + source] = speed.bytes_per_s


def chain(rows: Ints, column: int, start: int, last: int) -> None:
    """Chain rows from ``start`` on as free ones, ``last`` behind them."""
    rows[start:, column] = np.arange(start + 1, len(rows) + 1)
    rows[-1, column] = last


def _set_stores(state: Arrays, cluster: ClusterSpec, stores: Sequence[Store], block_tokens: int) -> None:
    for store, place in enumerate(stores):
        state.stores[store] = k.NONE
        for column in (k.S_IDLE, k.S_PINNED, k.S_WRITTEN):
            state.stores[store, column] = 0
        state.stores[store, k.S_CAPACITY] = place.capacity_tokens // block_tokens
        if place.tier is Tier.DEVICE:
            state.engines[place.owner, k.E_DEVICE] = store
        elif place.tier is Tier.HOST:
            state.engines[place.owner, k.E_HOST] = store
        elif place.tier is Tier.DISK:
            state.engines[place.owner, k.E_DISK] = store
    for number, pool in enumerate(cluster.pools):
        state.pool_source[number] = k.POD if pool.tier is Tier.POD else k.REMOTE
        for engine, instance in enumerate(cluster.instances):
            if pool.serves(instance.name):
                back = pool.tier in instance.write_back
                state.pools[engine, number] = k.WRITES_BACK if back else k.WRITES_THROUGH
