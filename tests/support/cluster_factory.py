"""Schedulers over small clusters that are up, and requests for them."""

from collections.abc import Sequence

import numpy as np

from cache_index import CacheIndex, Namespace, Tier, sequence_hashes
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.costs import InstanceClass, PoolLink, Topology
from conductor.placement import Objectives, PlacementRequest, Role
from conductor.policies import make_policy
from conductor.prefix_lookup import IndexLookup
from conductor.scheduler import Scheduler

BLOCK = 16
SUSPENSION = SuspensionPolicy(after_failures=2, pause_s=5.0)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}


def make_scheduler(
    roles: str = "ppdd",
    policy: str = "slo",
    aliases: dict[str, str] | None = None,
    lookup: IndexLookup | None = None,
    index: CacheIndex | None = None,
    protocol: str = "vllm-nixl",
    suspension: SuspensionPolicy = SUSPENSION,
    instance_class: InstanceClass = LLAMA_8B_H100,
    pool_links: Sequence[PoolLink] = (),
) -> Scheduler:
    """``lookup`` reads ``index``."""
    cluster = Cluster(Topology(pool_links=pool_links))
    for i, role in enumerate(roles):
        cluster.add(
            make_instance(
                instance_id=f"{role}{i}",
                url=f"http://10.0.0.{i}:8000",
                role=ROLES[role],
                instance_class=instance_class,
                protocol=protocol,
            )
        )
    scheduler = Scheduler(
        cluster,
        CacheIndex() if index is None else index,
        make_policy(policy),
        Objectives(ttft_s=2.0, tbt_s=0.05),
        suspension,
        aliases=aliases,
        lookup=lookup,
    )
    for instance in cluster:
        scheduler.instance_up(instance.instance_id, facts())
    return scheduler


def facts(*names: str, publishes_events: bool = True) -> EngineFacts:
    models = tuple(ServedModel(name) for name in names or ("llama",))
    adapter = ServedModel("adapter", parent=models[0].name)
    return EngineFacts((*models, adapter), block_size=BLOCK, publishes_events=publishes_events)


def request(tokens: int = 1024, *, seed: int = 0, model: str = "llama", **fields: object) -> PlacementRequest:
    ids = np.random.default_rng(seed).integers(0, 32_000, tokens, dtype=np.uint32)
    return PlacementRequest(
        model=model,
        tokens=ids,
        prompt_tokens=tokens,
        **{"request_id": "r", **fields},  # type: ignore[arg-type]
    )


def hold(scheduler: Scheduler, instance_id: str, tokens: np.ndarray, lora: str | None = None) -> None:
    holder = scheduler.cluster[instance_id].ranks[0].holder
    namespace = Namespace(model="llama", block_size=BLOCK, lora=lora)
    scheduler.index.store(holder, Tier.DEVICE, namespace, sequence_hashes(tokens, BLOCK))
