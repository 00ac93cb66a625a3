"""What a simulated cluster consists of: instances with their tiers, shared pools, links, outages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Final

from cache_index import Tier
from conductor.cluster_shape import read_cluster_shape
from conductor.costs import DEFAULT_LINKS, POOL_TIERS, Distance, InstanceClass, Speed
from conductor.placement import Role

INSTANCE_TIERS: Final = (Tier.HOST, Tier.DISK)  # an instance's own, beside its device
ROLE_LETTERS: Final = {Role.MIXED: "m", Role.PREFILL: "p", Role.DECODE: "d"}  # names of instances begin so


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One engine of one rank.

    ``kv_tokens`` fit its device; ``tier_tokens`` its own slower tiers, which its class must have a speed for.
    ``write_back`` are tiers, its own and those of pools, that it does not write through: they get what a planner
    hands down. ``pipeline`` nodes prefill a prompt's chunks one behind the other (Mooncake's chunked pipeline
    parallelism); the class's speeds are those of one node.
    """

    name: str
    role: Role
    instance_class: InstanceClass
    kv_tokens: int
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict)
    pipeline: int = 1
    sequences: int = 256  # at most in a batch
    location: str = ""  # site/zone/rack/node, the last parts optional
    fetches_from_peers: bool = False
    streams_layers: bool = False  # loads, fetches and hand-offs overlap with compute, layer by layer
    write_back: frozenset[Tier] = frozenset()

    def __post_init__(self) -> None:
        if self.kv_tokens < 1:
            raise ValueError(f"instance {self.name!r}: kv_tokens must be positive, not {self.kv_tokens}")
        if self.pipeline < 1:
            raise ValueError(f"instance {self.name!r}: pipeline must be at least 1, not {self.pipeline}")
        if self.sequences < 1:
            raise ValueError(f"instance {self.name!r}: sequences must be at least 1, not {self.sequences}")
        if self.pipeline > 1 and self.role is not Role.PREFILL:
            raise ValueError(f"instance {self.name!r}: only an instance that just prefills can be a pipeline")
        for tier in sorted(self.write_back):
            if not any(faster < tier for faster in self.tier_tokens.keys() - self.write_back):
                raise ValueError(
                    f"instance {self.name!r}: write_back: nobody would hand anything down to tier "
                    f"{tier.name.lower()}; give a faster one that is written through, such as tiers.host"
                )
        for tier, tokens in self.tier_tokens.items():
            if tier not in INSTANCE_TIERS:
                raise ValueError(f"instance {self.name!r}: tier {tier.name.lower()} is a pool's, not its own")
            if tier not in self.instance_class.tiers:
                raise ValueError(
                    f"instance {self.name!r}: class {self.instance_class.name} has no speed for tier "
                    f"{tier.name.lower()}"
                )
            if tokens < 1:
                raise ValueError(
                    f"instance {self.name!r}: tokens of tier {tier.name.lower()} must be positive, not {tokens}"
                )

    def ratio(self, tier: Tier) -> float:
        """Bytes of raw KV by bytes stored there."""
        return self.instance_class.kv_bytes_per_token / self.instance_class.stored_bytes_per_token(tier)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A store that several instances load from and write to; ``speed`` is the pool's own, shared by all of them."""

    name: str
    tier: Tier
    capacity_tokens: int
    speed: Speed
    members: frozenset[str] | None = None  # names of instances; None: all

    def serves(self, instance: str) -> bool:
        return self.members is None or instance in self.members

    def __post_init__(self) -> None:
        if self.tier not in POOL_TIERS:
            raise ValueError(f"pool {self.name!r}: tier {self.tier.name.lower()} is an instance's own")
        if self.capacity_tokens < 1:
            raise ValueError(f"pool {self.name!r}: capacity must be positive, not {self.capacity_tokens}")


@dataclass(frozen=True, slots=True)
class Outage:
    """An instance dies, with all it has cached, and is back, empty, ``for_s`` later."""

    instance: str
    at_s: float
    for_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.at_s < inf:
            raise ValueError(f"outage of {self.instance!r}: at_s must not be negative, not {self.at_s}")
        if not self.for_s > 0.0:
            raise ValueError(f"outage of {self.instance!r}: for_s must be positive, not {self.for_s}")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Raises ValueError for names that are used twice or unknown, and for outages that overlap."""

    instances: tuple[InstanceSpec, ...]
    pools: tuple[PoolSpec, ...] = ()
    outages: tuple[Outage, ...] = ()
    links: Mapping[Distance, Speed] = field(default_factory=lambda: DEFAULT_LINKS)
    prefix_caching: bool = True  # without it every prompt is computed whole, as if no two were alike

    def __post_init__(self) -> None:
        known: set[str] = set()
        for instance in self.instances:
            if instance.name in known:
                raise ValueError(f"two instances are called {instance.name!r}")
            known.add(instance.name)
        for pool in self.pools:
            if pool.name in known or sum(other.name == pool.name for other in self.pools) > 1:
                raise ValueError(f"pool {pool.name!r}: something else has that name")
            if pool.members is not None and not pool.members <= known:
                unknown = ", ".join(sorted(pool.members - known))
                raise ValueError(f"pool {pool.name!r}: no instance is called {unknown}")
            self._check_codecs(pool)
        for instance in self.instances:
            pooled = {pool.tier for pool in self.pools if pool.serves(instance.name)}
            for tier in sorted(instance.write_back - instance.tier_tokens.keys() - pooled):
                raise ValueError(
                    f"instance {instance.name!r}: write_back: it has no tier {tier.name.lower()}"
                )
        for outage in self.outages:
            if outage.instance not in known:
                raise ValueError(f"outage: no instance is called {outage.instance!r}")
        for one, other in pairwise(sorted(self.outages, key=lambda each: (each.instance, each.at_s))):
            if one.instance == other.instance and other.at_s < one.at_s + one.for_s:
                raise ValueError(
                    f"outage of {one.instance!r} at {other.at_s} s: it is down since {one.at_s} s, for "
                    f"{one.for_s} s"
                )

    def _check_codecs(self, pool: PoolSpec) -> None:
        """What one member has encoded, the others must be able to decode."""
        members = [each for each in self.instances if pool.serves(each.name)]
        for one, other in pairwise(members):
            ratios = one.ratio(pool.tier), other.ratio(pool.tier)
            if ratios[0] != ratios[1]:
                raise ValueError(
                    f"pool {pool.name!r}: {one.name} and {other.name} encode tier {pool.tier.name.lower()} "
                    f"differently, by {ratios[0]:g} and {ratios[1]:g}; give all members the same codec"
                )


def uniform(
    text: str, instance_class: InstanceClass, *, kv_tokens: int = 0, sequences: int = 256
) -> ClusterSpec:
    """``8`` for eight mixed instances, ``4p4d`` for four that prefill and four that decode, all of one class.

    ``kv_tokens`` 0: as the class has. Raises ValueError.
    """
    capacity = kv_tokens or instance_class.kv_capacity_tokens
    return ClusterSpec(
        tuple(
            InstanceSpec(f"{ROLE_LETTERS[role]}{number}", role, instance_class, capacity, sequences=sequences)
            for role, count in read_cluster_shape(text).items()
            for number in range(count)
        )
    )
