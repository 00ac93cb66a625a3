"""Per model, the ranks that can take a request now, as arrays: what one decision would otherwise gather anew."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Namespace
from conductor.cluster import DEFAULT_BLOCK_SIZE, Cluster, Health, InstanceState
from conductor.costs import ClusterTables, Floats, Ints
from conductor.costs import tables as t
from conductor.placement import Role
from conductor.rank import RankState

_UNLIMITED = np.iinfo(np.int64).max
_FAILED = "failed this request before"
_JOINT = frozenset(("sglang",))  # protocols whose decode servers refuse what no prefill server computes
_ROLES = {Role.PREFILL: t.PREFILL, Role.DECODE: t.DECODE, Role.MIXED: t.MIXED}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Ranks whose caches are read with the same hashes: one base model, LoRA adapter and block size."""

    namespace: Namespace  # of the default tenant
    members: Ints  # positions in the roster
    holder_ids: Ints  # their rows in the index


@dataclass(frozen=True, slots=True)
class Roster:
    """The candidates for one model; valid for one version of the cluster, until a suspension ends."""

    version: int
    valid_until_s: float
    tables: ClusterTables
    ranks: list[RankState]
    rows: Ints  # of the ranks in the cluster's tables
    roles: Ints
    protocol: Ints
    locations: NDArray[np.int64]  # [level, rank]
    prefill_terms: Floats  # [4, rank]: a, b, c, d of the instance classes
    link_latency_s: Floats
    kv_bytes_per_token: Floats
    nic_s_per_byte: Floats
    kv_capacity_tokens: Ints
    limit_tokens: Ints  # prompts must be shorter: the capacity where the engine told it
    class_ids: Ints
    can_fetch: NDArray[np.bool_]
    any_fetches: bool
    cache_groups: list[CacheGroup]
    group_of: Ints  # of each rank, a position in ``cache_groups``; -1 for none
    block_size: int  # of the largest cache group
    joint_protocols: int  # bits of those in which decode ranks compute no prompts
    any_probing: bool  # of an instance that takes one request, whose end decides
    excluded: dict[str, str]


def make_roster(
    cluster: Cluster,
    index: CacheIndex,
    model: str,
    now_s: float,
    leave_out: frozenset[str] = frozenset(),
    why: str = _FAILED,
) -> Roster | None:
    """None when no instance serves the model. ``leave_out`` names instances that must not get the request."""
    serving = [instance for instance in cluster if instance.serves(model)]
    if not serving:
        return None
    excluded: dict[str, str] = {}
    owners: list[InstanceState] = []
    ranks: list[RankState] = []
    valid_until_s = float("inf")
    for instance in serving:
        if instance.instance_id in leave_out:
            excluded[instance.instance_id] = why
        elif not instance.is_candidate(now_s):
            excluded[instance.instance_id] = f"{instance.health}: {instance.health_reason}"
            if instance.health is Health.SUSPENDED:
                valid_until_s = min(valid_until_s, instance.circuit.suspended_until_s)
        else:
            owners += [instance] * len(instance.ranks)
            ranks += instance.ranks
    caches: dict[Namespace, list[int]] = {}
    protocols: dict[str, int] = {}
    for i, owner in enumerate(owners):
        if owner.block_size is not None:
            caches.setdefault(cache_namespace(owner, model, owner.block_size), []).append(i)
    groups = [
        CacheGroup(
            namespace,
            np.array(members, np.int64),
            np.array([index.register(ranks[i].holder) for i in members], np.int64),
        )
        for namespace, members in caches.items()
    ]
    group_of = np.full(len(ranks), -1, np.int64)
    for number, group in enumerate(groups):
        group_of[group.members] = number
    rows = np.array([rank.row for rank in ranks], np.int64)
    facts = cluster.tables.ranks[rows]
    speeds = cluster.tables.classes[facts[:, t.CLASS]]
    return Roster(
        version=cluster.version,
        valid_until_s=valid_until_s,
        tables=cluster.tables,
        ranks=ranks,
        rows=rows,
        roles=np.array([_ROLES[owner.role] for owner in owners], np.int64),
        protocol=np.array([protocols.setdefault(o.protocol, len(protocols)) for o in owners], np.int64),
        locations=np.ascontiguousarray(facts[:, t.LOCATION :].T),
        prefill_terms=np.ascontiguousarray(speeds[:, t.PREFILL_A : t.PREFILL_D + 1].T),
        link_latency_s=speeds[:, t.NIC_LATENCY_S].copy(),
        kv_bytes_per_token=speeds[:, t.KV_BYTES].copy(),
        kv_capacity_tokens=facts[:, t.CAPACITY_TOKENS].copy(),
        cache_groups=groups,
        group_of=group_of,
        can_fetch=facts[:, t.FETCHES] != 0,
        any_fetches=bool(facts[:, t.FETCHES].any()),
        class_ids=facts[:, t.CLASS].copy(),
        limit_tokens=np.where(facts[:, t.CAPACITY_KNOWN] != 0, facts[:, t.CAPACITY_TOKENS], _UNLIMITED),
        nic_s_per_byte=speeds[:, t.NIC_S_PER_BYTE].copy(),
        block_size=max(groups, key=lambda g: len(g.members)).namespace.block_size
        if groups
        else DEFAULT_BLOCK_SIZE,
        excluded=excluded,
        any_probing=any(owner.health is Health.PROBING for owner in owners),
        joint_protocols=sum(1 << number for name, number in protocols.items() if name in _JOINT),
    )


def cache_namespace(owner: InstanceState, model: str, block_size: int, tenant: str = "default") -> Namespace:
    """Where an instance caches a tenant's prompts of a model or LoRA adapter."""
    served = owner.served_model(model)
    return _namespace(served.name, served.parent, block_size, tenant)


@lru_cache(maxsize=4_096)
def _namespace(name: str, parent: str | None, block_size: int, tenant: str) -> Namespace:
    """There are few, and every request asks for one."""
    if parent is None:
        return Namespace(name, block_size, tenant=tenant)
    return Namespace(parent, block_size, name, tenant)
