"""The scheduler of a simulated cluster, which sees its instances as it would see real ones."""

from __future__ import annotations

from dataclasses import replace

from cache_index import CacheIndex, Holder
from conductor.admission import Gate
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.costs import InstanceClass, PoolLink, Topology
from conductor.outcomes import Untold
from conductor.placement import Objectives
from conductor.policies import Policy
from conductor.prefix_lookup import IndexLookup
from conductor.scheduler import Scheduler
from conductor.shared_pools import SharedPool
from simulator.cluster.specification import ClusterSpec, InstanceSpec
from simulator.cluster.workload import BLOCK_TOKENS

MODEL = "simulated"
_RECORDS = 0  # placements are not asked about afterwards


def make_scheduler(
    cluster: ClusterSpec,
    policy: Policy,
    objectives: Objectives,
    gate: Gate | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Scheduler:
    """The scheduler of a cluster whose engines are all up, and say what they cache in such blocks.

    Raises ValueError for a location that is no path.
    """
    pool_links = [PoolLink(pool.tier, pool.speed.bytes_per_s, pool.members) for pool in cluster.pools]
    known = Cluster(Topology(cluster.links, pool_links))
    for number, spec in enumerate(cluster.instances):
        known.add(
            make_instance(
                instance_id=spec.name,
                url=f"http://10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000",
                role=spec.role,
                instance_class=_seen_from_outside(spec),
                protocol="vllm-nixl",
                location=spec.location,
                fetches_from_peers=spec.fetches_from_peers,
                streams_layers=spec.streams_layers,
            )
        )
    index = CacheIndex()
    pools = [SharedPool(Holder(pool.name, 0), pool.tier, pool.members) for pool in cluster.pools]
    for pool in pools:
        index.register(pool.holder)
    scheduler = Scheduler(
        known,
        index,
        policy,
        objectives,
        SuspensionPolicy(),
        lookup=IndexLookup(index, pools=pools),
        gate=gate,
        outcomes=Untold(),
        records=_RECORDS,
    )
    for spec in cluster.instances:
        facts = EngineFacts(
            (ServedModel(MODEL),),
            block_size=block_tokens,
            kv_capacity_blocks=spec.kv_tokens // block_tokens,
            publishes_events=True,
        )
        scheduler.instance_up(spec.name, facts)
    return scheduler


def _seen_from_outside(spec: InstanceSpec) -> InstanceClass:
    """The class of an instance; the nodes of a pipeline share each chunk's work."""
    kind, stages = spec.instance_class, spec.pipeline
    if stages == 1:
        return kind
    return replace(
        kind,
        name=f"{kind.name}/{stages}-stages",
        prefill_s_per_token=kind.prefill_s_per_token / stages,
        prefill_s_per_token_squared=kind.prefill_s_per_token_squared / stages,
        prefill_s_per_cached_token=kind.prefill_s_per_cached_token / stages,
    )
