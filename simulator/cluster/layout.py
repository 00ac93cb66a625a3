"""The scheduler of a simulated cluster, which sees its instances as it would see real ones."""

from __future__ import annotations

from cache_index import CacheIndex
from conductor.admission import Gate
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.costs import Topology
from conductor.placement import Objectives
from conductor.policies import Policy
from conductor.scheduler import Scheduler, SuspensionPolicy
from simulator.cluster.specification import ClusterSpec
from simulator.cluster.workload import BLOCK_TOKENS

MODEL = "simulated"
_RECORDS = 256  # placements are not asked about afterwards


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
    known = Cluster(Topology(cluster.links))
    for number, spec in enumerate(cluster.instances):
        known.add(
            make_instance(
                instance_id=spec.name,
                url=f"http://10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000",
                role=spec.role,
                instance_class=spec.instance_class,
                protocol="vllm-nixl",
                location=spec.location,
                fetches_from_peers=spec.fetches_from_peers,
                streams_layers=spec.streams_layers,
            )
        )
    scheduler = Scheduler(
        known, CacheIndex(), policy, objectives, SuspensionPolicy(), gate=gate, records=_RECORDS
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
