"""Where KV blocks can lie: latency, bandwidth, capacity and price of each kind of memory and storage.

Ranges are those of the sources; ``typical`` is the value inside them that estimates use unless an instance
class or a configuration says otherwise. Bandwidths are of one device where the table says so, and of a node
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from cache_index import Tier
from conductor.catalogue.gpus import GpuSpec
from conductor.costs import Speed

GIB: Final = 1024**3
_GB, _TB, _PB = 1e9, 1e12, 1e15


class Range(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TierSpec:
    name: str
    level: str  # G1 (nearest) to G4, as the literature counts them
    tier: Tier  # how the cache index names blocks that lie there
    latency_s: Range | None  # None: the source gives none
    bytes_per_s: Range | None  # None: bound by the link to it
    capacity_bytes: Range | None  # None: as large as one pays for
    price_per_gb: Range | None  # US dollars to buy; None where the source gives none
    typical: Speed
    source: str
    price_per_gb_month: float | None = None  # US dollars to rent
    compression: Range | None = (
        None  # raw KV by stored bytes, as published; how fast it is coded, nobody says
    )


HBM: Final = TierSpec(
    name="hbm",
    level="G1",
    tier=Tier.DEVICE,
    latency_s=Range(100e-9, 100e-9),
    bytes_per_s=Range(3e12, 8e12),
    capacity_bytes=Range(80 * _GB, 288 * _GB),  # a GPU
    price_per_gb=Range(15, 40),
    typical=Speed(bytes_per_s=3.35e12, latency_s=100e-9),
    source="survey, June 2026; typical: H100",
)

HOST_DRAM: Final = TierSpec(
    name="host-dram",
    level="G2",
    tier=Tier.HOST,
    latency_s=Range(100e-9, 100e-9),
    bytes_per_s=Range(100e9, 200e9),
    capacity_bytes=Range(1 * _TB, 4 * _TB),  # a node
    price_per_gb=Range(3, 3),
    typical=Speed(bytes_per_s=128e9, latency_s=100e-9),
    source="survey, June 2026; typical: host to device of a Mooncake node (FAST'25)",
)

CXL: Final = TierSpec(
    name="cxl",
    level="G2.5",
    tier=Tier.HOST,
    latency_s=Range(200e-9, 500e-9),
    bytes_per_s=Range(64e9, 256e9),  # a link, CXL 2.0 to 3.0
    capacity_bytes=None,
    price_per_gb=Range(3, 3),
    typical=Speed(bytes_per_s=64e9, latency_s=500e-9),
    source="survey, June 2026; caching overview",
)

POD_FLASH: Final = TierSpec(
    name="pod-flash",
    level="G3.5",
    tier=Tier.POD,
    latency_s=Range(100e-6, 100e-6),  # near DRAM's when prefetched
    bytes_per_s=Range(14e9, 14e9),  # a drive
    capacity_bytes=Range(8 * _TB, 64 * _TB),
    price_per_gb=Range(0.3, 0.5),
    typical=Speed(bytes_per_s=14e9, latency_s=100e-6),
    source="survey, June 2026: AI SSD, shared flash of a pod behind a DPU",
)

NVME: Final = TierSpec(
    name="nvme",
    level="G3",
    tier=Tier.DISK,
    latency_s=Range(5e-6, 200e-6),  # the low end with GPUDirect Storage
    bytes_per_s=Range(3e9, 14e9),  # a drive; 3 to 7 on PCIe 4, 14 on PCIe 5
    capacity_bytes=Range(1 * _TB, 16 * _TB),
    price_per_gb=Range(0.15, 0.15),
    typical=Speed(bytes_per_s=6e9, latency_s=200e-6),
    source="survey, June 2026; caching overview",
)

HDD: Final = TierSpec(
    name="hdd",
    level="G3-",
    tier=Tier.DISK,
    latency_s=Range(5e-3, 10e-3),
    bytes_per_s=Range(0.2e9, 0.2e9),
    capacity_bytes=Range(4 * _TB, 100 * _TB),
    price_per_gb=None,
    typical=Speed(bytes_per_s=0.2e9, latency_s=10e-3),
    source="caching overview",
)

PARALLEL_FILE_SYSTEM: Final = TierSpec(
    name="parallel-file-system",
    level="G4",
    tier=Tier.REMOTE,
    latency_s=None,
    bytes_per_s=Range(40 * GIB, 40 * GIB),  # a node with 400 Gb/s; 6.6 TiB/s over 180 storage nodes
    capacity_bytes=Range(1 * _PB, 1 * _PB),  # petabytes: the order of magnitude
    price_per_gb=None,
    typical=Speed(bytes_per_s=40 * GIB, latency_s=200e-6),
    source="survey, June 2026: 3FS; typical latency: that of the NVMe drives it is made of",
)

MEMORY_POOL: Final = TierSpec(
    name="memory-pool",
    level="G4",
    tier=Tier.REMOTE,
    latency_s=Range(1e-6, 5e-6),
    bytes_per_s=Range(87e9, 190e9),  # a node with 4 x 200 and 8 x 400 Gb/s: 40 GB in 0.451 and 0.211 s
    capacity_bytes=None,
    price_per_gb=None,
    typical=Speed(bytes_per_s=87e9, latency_s=5e-6),
    source="Mooncake (FAST'25), Figure 12: pooled DRAM and SSD over RDMA",
)

KEY_VALUE_STORE: Final = TierSpec(
    name="key-value-store",
    level="G4",
    tier=Tier.REMOTE,
    latency_s=Range(100e-6, 1e-3),
    bytes_per_s=None,
    capacity_bytes=None,
    price_per_gb=None,
    typical=Speed(bytes_per_s=20e9, latency_s=1e-3),  # one 200 Gb/s card, less protocol
    source="LMCache documentation: Redis, Valkey, InfiniStore",
)

OBJECT_STORE: Final = TierSpec(
    name="object-store",
    level="G4",
    tier=Tier.REMOTE,
    latency_s=Range(10e-3, 100e-3),
    bytes_per_s=Range(1e9, 12e9),  # a node, parallel ranges
    capacity_bytes=None,
    price_per_gb=None,
    typical=Speed(bytes_per_s=4e9, latency_s=30e-3),
    source="hierarchy note; LMCache report: 256-token chunks, 3 to 10x compression makes it pay",
    price_per_gb_month=0.02,
    compression=Range(3, 10),  # CacheGen (SIGCOMM'24) itself: 3.5 to 4.3, at little loss of quality
)

TIERS: Final[dict[str, TierSpec]] = {
    spec.name: spec
    for spec in (
        HBM,
        HOST_DRAM,
        CXL,
        POD_FLASH,
        NVME,
        HDD,
        PARALLEL_FILE_SYSTEM,
        MEMORY_POOL,
        KEY_VALUE_STORE,
        OBJECT_STORE,
    )
}

# What a KV connector adds to every operation: 50 to 200 us of inter-process communication in vLLM.
CONNECTOR_S: Final = 200e-6
# Share of PCIe that copies from pinned host memory reach.
_PCIE_EFFICIENCY: Final = 0.78
# Chunks in which slow tiers are best read (LMCache), and the bandwidth of storage that a GPU should be given.
SLOW_TIER_CHUNK_TOKENS: Final = 256
STORAGE_BYTES_PER_S_PER_GPU: Final = Range(1e9, 3e9)


def loading_speeds(gpu: GpuSpec, gpus: int) -> Mapping[Tier, Speed]:
    """Of loading into an instance of ``gpus`` GPUs of one node, by tier, connector overhead included.

    Host memory is bound by PCIe and by the node's memory, flash by one drive (add drives by overriding), the
    remote pool by the instance's network cards.
    """
    pcie = gpus * gpu.pcie_bytes_per_s * _PCIE_EFFICIENCY
    network = gpus * gpu.nic_bytes_per_s * gpu.nic_efficiency

    def through(spec: TierSpec, path_bytes_per_s: float) -> Speed:
        rate = min(spec.typical.bytes_per_s, path_bytes_per_s)
        return Speed(bytes_per_s=rate, latency_s=spec.typical.latency_s + CONNECTOR_S)

    return {
        Tier.HOST: through(HOST_DRAM, pcie),
        Tier.DISK: through(NVME, pcie),
        Tier.POD: through(POD_FLASH, min(pcie, network)),
        Tier.REMOTE: through(MEMORY_POOL, min(pcie, network)),
    }
