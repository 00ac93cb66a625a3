"""Per model, the ranks that can take a request now, as arrays: what one decision would otherwise gather anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Namespace
from conductor.cluster import Cluster, Health, InstanceState, RankState
from conductor.costs import InstanceClass, Ints
from conductor.placement import Role
from conductor.policies import Flags


class LoadTable:
    """Reservations of every rank, one row each, written through whenever a rank changes."""

    def __init__(self) -> None:
        self.context_tokens: Ints = np.zeros(0, dtype=np.int64)
        self.active_decodes: Ints = np.zeros(0, dtype=np.int64)
        self.pending_prefills: Ints = np.zeros(0, dtype=np.int64)
        self.placements: Ints = np.zeros(0, dtype=np.int64)

    def update(self, rank: RankState) -> None:
        row = rank.row
        if row >= len(self.placements):
            self._grow(row + 1)
        self.context_tokens[row] = rank.context_tokens
        self.active_decodes[row] = len(rank.decodes)
        self.pending_prefills[row] = len(rank.prefills)
        self.placements[row] = rank.placements

    def _grow(self, rows: int) -> None:
        for name in ("context_tokens", "active_decodes", "pending_prefills", "placements"):
            grown = np.zeros(max(16, 2 * rows), dtype=np.int64)
            column = getattr(self, name)
            grown[: len(column)] = column
            setattr(self, name, grown)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Ranks whose caches are read with the same hashes: one base model, LoRA adapter and block size."""

    namespace: Namespace  # of the default tenant
    members: NDArray[np.intp]  # positions in the roster
    holder_ids: NDArray[np.intp]  # their rows in the index


@dataclass(frozen=True, slots=True)
class Roster:
    """The candidates for one model; valid for one version of the cluster, until a suspension ends."""

    version: int
    valid_until_s: float
    ranks: list[RankState]
    rows: NDArray[np.intp]  # of the ranks in the load table
    can_prefill: Flags
    can_decode: Flags
    is_mixed: Flags
    class_groups: list[tuple[InstanceClass, NDArray[np.intp]]]
    cache_groups: list[CacheGroup]
    excluded: dict[str, str]


def make_roster(
    cluster: Cluster, index: CacheIndex, model: str, now_s: float, leave_out: frozenset[str] = frozenset()
) -> Roster | None:
    """None when no instance serves the model. ``leave_out`` names instances that failed the request before."""
    serving = [instance for instance in cluster if instance.serves(model)]
    if not serving:
        return None
    excluded: dict[str, str] = {}
    owners: list[InstanceState] = []
    ranks: list[RankState] = []
    valid_until_s = float("inf")
    for instance in serving:
        if instance.instance_id in leave_out:
            excluded[instance.instance_id] = "failed this request before"
        elif not instance.is_candidate(now_s):
            excluded[instance.instance_id] = f"{instance.health}: {instance.health_reason}"
            if instance.health is Health.SUSPENDED:
                valid_until_s = min(valid_until_s, instance.suspended_until_s)
        else:
            owners += [instance] * len(instance.ranks)
            ranks += instance.ranks
    classes: dict[str, tuple[InstanceClass, list[int]]] = {}
    caches: dict[Namespace, list[int]] = {}
    for i, owner in enumerate(owners):
        classes.setdefault(owner.instance_class.name, (owner.instance_class, []))[1].append(i)
        if owner.block_size is not None:
            caches.setdefault(cache_namespace(owner, model, owner.block_size), []).append(i)
    return Roster(
        version=cluster.version,
        valid_until_s=valid_until_s,
        ranks=ranks,
        rows=np.array([rank.row for rank in ranks], dtype=np.intp),
        can_prefill=_with_role(owners, Role.PREFILL),
        can_decode=_with_role(owners, Role.DECODE),
        is_mixed=_with_role(owners, Role.MIXED),
        class_groups=[(c, np.array(members, dtype=np.intp)) for c, members in classes.values()],
        cache_groups=[
            CacheGroup(
                namespace,
                np.array(members, dtype=np.intp),
                np.array([index.register(ranks[i].holder) for i in members], dtype=np.intp),
            )
            for namespace, members in caches.items()
        ],
        excluded=excluded,
    )


def cache_namespace(owner: InstanceState, model: str, block_size: int) -> Namespace:
    """Where an instance caches prompts of a model or LoRA adapter, for the default tenant."""
    served = owner.served_model(model)
    if served.parent is None:
        return Namespace(model=served.name, block_size=block_size)
    return Namespace(model=served.parent, block_size=block_size, lora=served.name)


def _with_role(owners: list[InstanceState], role: Role) -> Flags:
    return np.array([owner.role is role for owner in owners], dtype=np.bool_)
