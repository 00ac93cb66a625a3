"""GPUs: datasheet peaks, and the share of them that kernels were measured to reach.

Peaks are dense (without structured sparsity) and per GPU, bandwidths per direction. They are those of NVIDIA's
datasheets as NVIDIA AIConfigurator 0.12 (Apache-2.0) tabulates them; HBM capacities are the marketed decimal ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a peak that kernels reach on a GPU whatever the engine; what an engine adds is in `engines`."""

    attention_compute: float
    attention_memory: float
    fp8: float  # of what BF16 matrix products reach of theirs, FP8 ones
    fp4: float
    experts: float  # of what matrix products reach, the grouped ones of routed experts
    interconnect: float
    source: str


@dataclass(frozen=True, slots=True)
class GpuSpec:
    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None  # None: no such tensor cores, weights are widened to BF16
    fp4_flops: float | None
    nvlink_bytes_per_s: float  # to the other GPUs of the node; PCIe where there is no NVLink
    pcie_bytes_per_s: float
    nic_bytes_per_s: float  # this GPU's share of the node's network cards, as the cards are sold
    nic_efficiency: float  # share of it that KV transfers reach
    efficiency: Efficiency
    source: str

    def flops(self, weight_bytes: float) -> float:
        """Peak for weights of so many bytes each: the fastest tensor cores that take them."""
        if weight_bytes < 1.0 and self.fp4_flops is not None:
            return self.fp4_flops
        if weight_bytes <= 1.0 and self.fp8_flops is not None:
            return self.fp8_flops
        return self.bf16_flops

    def gemm_flops(self, weight_bytes: float) -> float:
        """What matrix products would reach of that if BF16 ones reached their peak."""
        peak = self.flops(weight_bytes)
        if peak == self.bf16_flops:
            return peak
        return peak * (self.efficiency.fp4 if peak == self.fp4_flops else self.efficiency.fp8)


# Attention and NVLink are those of an untuned roofline. The shares of FP8 and FP4 are rounded from what fits
# AIConfigurator's end-to-end runs (docs/accuracy.md); that of experts is fitted on 26 of them (`engines.KERNELS`).
_UNTUNED: Final = Efficiency(
    attention_compute=0.52,
    attention_memory=0.80,
    fp8=0.80,
    fp4=0.70,
    experts=0.70,
    interconnect=0.50,
    source="untuned roofline; FP8, FP4 and experts from AIConfigurator's end-to-end runs",
)


def _attention(compute: float, memory: float) -> Efficiency:
    """Shares fitted to AIConfigurator's tables of measured attention kernels (test error 19-25 % and 12-14 %).

    Over all sizes, prefill reaches 0.44 on A100, 0.52 on H100 and H200, 0.40 on B200. The long prompts, in which
    attention matters, reach more: 0.60 on A100 and H100, from composites of 16k and 64k tokens (docs/accuracy.md).
    """
    return replace(
        _UNTUNED,
        attention_compute=compute,
        attention_memory=memory,
        source=f"{_UNTUNED.source}; attention fitted to its attention tables",
    )


# Mooncake (FAST'25, Figure 12): 87 GB/s over four 200 Gb/s cards, 190 GB/s over eight of 400 Gb/s.
_NIC_200G: Final = 0.87
_NIC_400G: Final = 0.475

A100_80GB: Final = GpuSpec(
    name="a100-80gb",
    hbm_bytes=80e9,
    hbm_bytes_per_s=2.039e12,
    bf16_flops=312e12,
    fp8_flops=None,
    fp4_flops=None,
    nvlink_bytes_per_s=300e9,
    pcie_bytes_per_s=32e9,
    nic_bytes_per_s=25e9,
    nic_efficiency=_NIC_200G,
    efficiency=_attention(0.60, 0.67),
    source="NVIDIA A100 datasheet (SXM, 80 GB), AIConfigurator a100_sxm",
)

A800_80GB: Final = replace(
    A100_80GB,
    name="a800-80gb",
    nvlink_bytes_per_s=200e9,
    nic_bytes_per_s=12.5e9,
    source="A100 with NVLink cut to 400 GB/s, both directions; four 200 Gb/s cards a node: Mooncake (FAST'25)",
)

H100_80GB: Final = GpuSpec(
    name="h100-80gb",
    hbm_bytes=80e9,
    hbm_bytes_per_s=3.35e12,
    bf16_flops=989e12,
    fp8_flops=1978e12,
    fp4_flops=None,
    nvlink_bytes_per_s=450e9,
    pcie_bytes_per_s=64e9,
    nic_bytes_per_s=50e9,
    nic_efficiency=_NIC_400G,
    efficiency=_attention(0.60, 0.83),
    source="NVIDIA H100 datasheet (SXM), AIConfigurator h100_sxm",
)

H200: Final = replace(
    H100_80GB,
    name="h200",
    hbm_bytes=141e9,
    hbm_bytes_per_s=4.8e12,
    efficiency=_attention(0.60, 0.78),
    source="NVIDIA H200 datasheet (SXM), AIConfigurator h200_sxm",
)

B200: Final = GpuSpec(
    name="b200",
    hbm_bytes=180e9,
    hbm_bytes_per_s=7.7e12,
    bf16_flops=2250e12,
    fp8_flops=4500e12,
    fp4_flops=9000e12,
    nvlink_bytes_per_s=900e9,
    pcie_bytes_per_s=128e9,
    nic_bytes_per_s=100e9,
    nic_efficiency=_NIC_400G,  # not measured on 800 Gb/s cards
    efficiency=_attention(0.40, 0.80),
    source="NVIDIA Blackwell datasheet (HGX B200), AIConfigurator b200_sxm",
)

B300: Final = replace(
    B200,
    name="b300",
    hbm_bytes=288e9,
    hbm_bytes_per_s=7.75e12,
    fp4_flops=14_000e12,
    source="NVIDIA Blackwell Ultra datasheet (HGX B300), AIConfigurator b300_sxm; efficiencies those of B200",
)

GB200: Final = replace(
    B200,
    name="gb200",
    hbm_bytes=186e9,
    hbm_bytes_per_s=8e12,
    bf16_flops=2500e12,
    fp8_flops=5000e12,
    fp4_flops=10_000e12,
    pcie_bytes_per_s=64e9,
    source="NVIDIA Blackwell datasheet (GB200), AIConfigurator gb200; efficiencies those of B200",
)

L40S: Final = GpuSpec(
    name="l40s",
    hbm_bytes=48e9,
    hbm_bytes_per_s=864e9,
    bf16_flops=362.05e12,
    fp8_flops=733e12,
    fp4_flops=None,
    nvlink_bytes_per_s=32e9,
    pcie_bytes_per_s=32e9,
    nic_bytes_per_s=50e9,
    nic_efficiency=_NIC_400G,
    efficiency=_UNTUNED,
    source="NVIDIA L40S datasheet, AIConfigurator l40s; no NVLink, GDDR6; efficiencies not measured",
)

GPUS: Final[dict[str, GpuSpec]] = {
    gpu.name: gpu for gpu in (A100_80GB, A800_80GB, H100_80GB, H200, B200, B300, GB200, L40S)
}
