"""The cluster and its shared pools as the configuration describes them, before anybody is up."""

from __future__ import annotations

from collections.abc import Iterable

from cache_index import Holder, Tier
from conductor.cluster import Cluster
from conductor.config import SharedPoolConfig
from conductor.costs import PoolLink, Topology
from conductor.instance_config import InstanceConfig
from conductor.membership import instance_of
from conductor.shared_pools import SharedPool


def make_cluster(instances: Iterable[InstanceConfig], pools: Iterable[SharedPoolConfig]) -> Cluster:
    """Raises ValueError for instances that cannot be."""
    shared = [(pool_of(each), each.bytes_per_s) for each in pools]
    pool_links = [PoolLink(pool.tier, rate, pool.members) for pool, rate in shared if rate is not None]
    cluster = Cluster(Topology(pool_links=pool_links))
    for instance in instances:
        cluster.add(instance_of(instance))
    return cluster


def pool_of(config: SharedPoolConfig) -> SharedPool:
    members = frozenset(config.members) if config.members is not None else None
    return SharedPool(Holder(config.id), Tier[config.tier.upper()], members)
