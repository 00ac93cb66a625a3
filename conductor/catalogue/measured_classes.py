"""Instance classes whose constants were fitted to measurements of that very model on those GPUs."""

from __future__ import annotations

from typing import Final

from cache_index import Tier
from conductor.costs import InstanceClass, Speed

# Loading into the device: host DRAM over PCIe 5 x16, one NVMe drive, pod flash behind a DPU, a pool over RDMA.
_TIERS: Final = {
    Tier.HOST: Speed(bytes_per_s=50e9, latency_s=200e-6),
    Tier.DISK: Speed(bytes_per_s=6e9, latency_s=400e-6),
    Tier.POD: Speed(bytes_per_s=14e9, latency_s=300e-6),
    Tier.REMOTE: Speed(bytes_per_s=20e9, latency_s=1e-3),
}

# Llama-3.1-8B, bf16, one H100, from measured-operator composites of AIConfigurator's vLLM tables: prefill of
# 46k/45k/37k/21k tokens/s at 1k/4k/16k/64k tokens is met within +0.8, +4.3, +4.4 and +1.6 % by a*n + b*n^2; the
# base is a step's, which a measured prefill already contains, so a lone 1k prompt comes out 29 % slow and a 16k
# prompt 7 %. Decode steps of 6.2, 7.5, 10.4, 13.1, 28.6 and 18.1 ms (1 x 1k, 16 x 1k, 64 x 1k, 16 x 8k, 64 x 8k,
# 128 x 2k): errors -1, -4, +1, -8, +4 and +12 %. KV: 2 x 32 layers x 8 heads x 128 x 2 bytes.
# Link: one 200 Gb/s RDMA NIC. KV capacity: 80 GB x 0.9 less 16 GB of weights and 2 GB of activations.
LLAMA_8B_H100: Final = InstanceClass(
    name="llama-3.1-8b-h100",
    prefill_s_per_token=2.15e-5,
    prefill_s_per_token_squared=4.1e-10,
    prefill_base_s=6.1e-3,
    prefill_s_per_cached_token=0.0,
    decode_base_s=6.1e-3,
    decode_s_per_sequence=2.5e-5,
    decode_s_per_context_token=4.2e-8,
    kv_bytes_per_token=131_072,
    layers=32,
    chunk_tokens=8_192,
    kv_capacity_tokens=412_000,
    nic=Speed(bytes_per_s=25e9, latency_s=1e-3),
    tiers=_TIERS,
)

# LLaMA-3-70B, bf16, eight A800: fitted to Mooncake (FAST'25) Figure 14a within 0.6 %, cached-prefix terms by
# eye on Figure 14b; transfer 87 GB/s (Figure 12); host to device 128 GB/s a node; decode 26.5 to 30 ms a token
# at batch 1, its growth that of Llama-70B on eight A100 in AIConfigurator's tables (least squares over six
# points, 3 % mean error); KV 320 KB a token.
LLAMA_70B_8XA800: Final = InstanceClass(
    name="llama3-70b-8xa800",
    prefill_s_per_token=1.1045e-4,
    prefill_s_per_token_squared=7.4975e-10,
    prefill_base_s=0.075,
    prefill_s_per_cached_token=2.0e-6,
    decode_base_s=26.5e-3,
    decode_s_per_sequence=5.8e-5,
    decode_s_per_context_token=2.5e-8,
    kv_bytes_per_token=327_680,
    layers=80,
    chunk_tokens=8_192,
    kv_capacity_tokens=1_300_000,
    nic=Speed(bytes_per_s=87e9, latency_s=1e-3),
    tiers={**_TIERS, Tier.HOST: Speed(bytes_per_s=128e9, latency_s=200e-6)},
)
