"""What connects GPUs, nodes and sites, with the ranges that sources give.

Estimates take one speed per `Distance` (`conductor.costs.DEFAULT_LINKS`, overridable); `links_within` names the
links that can carry such a transfer, so that a speed can be checked against, or chosen from, a documented range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from conductor.catalogue.tiers import Range
from conductor.costs import Distance


@dataclass(frozen=True, slots=True)
class LinkSpec:
    name: str
    latency_s: Range | None  # None: the source gives none
    bytes_per_s: Range | None  # one direction; None: what one has rented
    source: str


NVLINK: Final = LinkSpec(
    name="nvlink",
    latency_s=Range(0.0, 1e-6),
    bytes_per_s=Range(450e9, 900e9),  # a GPU; sold as 0.9 to 1.8 TB/s of both directions
    source="survey, June 2026",
)

PCIE5: Final = LinkSpec(
    name="pcie5-x16",
    latency_s=Range(1e-6, 1e-6),
    bytes_per_s=Range(64e9, 64e9),  # a node of eight A800 on PCIe 4 reaches 128 GB/s from host to devices
    source="Mooncake (FAST'25)",
)

RDMA: Final = LinkSpec(
    name="rdma",
    latency_s=Range(1e-6, 100e-6),  # median 1 to 5 us, P99 50 to 100 us
    bytes_per_s=Range(12.5e9, 100e9),  # a card: 100 to 400 Gb/s, HDR 200, NDR 400, XDR 800
    source="caching overview",
)

UNIFIED_BUS: Final = LinkSpec(
    name="unified-bus",
    latency_s=None,
    bytes_per_s=Range(50e9, 100e9),  # 400 Gb/s and beyond, 800G
    source="caching overview",
)

TCP: Final = LinkSpec(
    name="tcp",
    latency_s=Range(50e-6, 200e-6),
    bytes_per_s=Range(37e9, 41e9),  # a node with the cards RDMA would use: 40 GB in 1.08 and 0.97 s
    source="caching overview; Mooncake (FAST'25), Figure 12",
)

WIDE_AREA: Final = LinkSpec(
    name="wide-area",
    latency_s=Range(5e-3, 80e-3),
    bytes_per_s=None,
    source="caching overview: sites under central control",
)

LINKS: Final[dict[str, LinkSpec]] = {
    link.name: link for link in (NVLINK, PCIE5, RDMA, UNIFIED_BUS, TCP, WIDE_AREA)
}

_WITHIN: Final[Mapping[Distance, tuple[LinkSpec, ...]]] = {
    Distance.NODE: (NVLINK, PCIE5),
    Distance.RACK: (RDMA, UNIFIED_BUS),
    Distance.ZONE: (RDMA,),
    Distance.SITE: (RDMA, TCP),
    Distance.WORLD: (WIDE_AREA,),
}


def links_within(distance: Distance) -> tuple[LinkSpec, ...]:
    """Links that join two instances which share nothing nearer than ``distance``."""
    return _WITHIN[distance]
