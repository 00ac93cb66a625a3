"""Where instances stand to each other, and what the links between them cost.

A location is a path such as ``site1/zone2/rack3/node4``; missing parts mean that everything is together. The
speed of a transfer is that of the widest step the path takes, and never more than the network cards of its ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from cache_index import Tier
from conductor.costs.instance_class import Floats, Speed


class Distance(IntEnum):
    """The nearest thing two instances share."""

    NODE = 0
    RACK = 1
    ZONE = 2
    SITE = 3
    WORLD = 4


LOCATION_LEVELS: Final = 4  # parts of a location, nearest first: node, rack, zone, site

# Latency and bandwidth by distance: NVLink in a node, RDMA in a rack and a zone, TCP beyond, a wide-area link
# between sites ("KV cache across the hierarchy" survey, June 2026; RDMA P99 50-100 us, TCP 50-200 us, 5-80 ms
# between sites). The latency counts the connector's own overhead, 50-200 us an operation in vLLM.
DEFAULT_LINKS: Final[Mapping[Distance, Speed]] = {
    Distance.NODE: Speed(bytes_per_s=450e9, latency_s=100e-6),
    Distance.RACK: Speed(bytes_per_s=50e9, latency_s=200e-6),
    Distance.ZONE: Speed(bytes_per_s=25e9, latency_s=400e-6),
    Distance.SITE: Speed(bytes_per_s=10e9, latency_s=1e-3),
    Distance.WORLD: Speed(bytes_per_s=1e9, latency_s=40e-3),
}


POOL_TIERS: Final = (Tier.POD, Tier.REMOTE)


@dataclass(frozen=True, slots=True)
class PoolLink:
    """What instances that load from one shared pool have of its bandwidth together.

    ``tier`` is the one that the pool is for them; ``members`` are instance ids, None: all instances.
    """

    tier: Tier
    bytes_per_s: float
    members: frozenset[str] | None = None

    def serves(self, instance_id: str) -> bool:
        return self.members is None or instance_id in self.members


@dataclass(slots=True)
class Topology:
    """Ids of locations as numbers that kernels compare, and the links as an array."""

    links: Mapping[Distance, Speed] = field(default_factory=lambda: DEFAULT_LINKS)
    pool_links: Sequence[PoolLink] = ()
    _ids: dict[str, int] = field(default_factory=dict)

    def location_ids(self, location: str, instance_id: str) -> list[int]:
        """Ids of node, rack, zone and site. Raises ValueError for a path with too many or empty parts.

        An instance without a node in its path is a node of its own.
        """
        parts = location.split("/") if location else []
        if len(parts) > LOCATION_LEVELS or any(not part for part in parts):
            raise ValueError(
                f"location {location!r} must look like site/zone/rack/node, the last parts optional"
            )
        paths = [
            "/".join(parts[: depth + 1]) if depth < len(parts) else "" for depth in range(LOCATION_LEVELS)
        ]
        if len(parts) < LOCATION_LEVELS:
            known = "/".join(parts)
            paths = [path or known for path in paths[:-1]] + [f"{known}//{instance_id}"]
        return [
            self._ids.setdefault(f"{level}:{path}", len(self._ids))
            for level, path in enumerate(reversed(paths))
        ]

    def pool_numbers(self, instance_id: str) -> list[int]:
        """Which of the pool links an instance loads over from each of `POOL_TIERS`, from 1 on; 0: over none."""
        numbers = [0] * len(POOL_TIERS)
        for number, pool in enumerate(self.pool_links, start=1):
            if pool.serves(instance_id):
                numbers[POOL_TIERS.index(pool.tier)] = number
        return numbers

    def link_table(self) -> Floats:
        """[distance, (seconds per byte, latency)]."""
        return np.array([[1.0 / self.links[d].bytes_per_s, self.links[d].latency_s] for d in Distance])
