"""Serving engines: how well each uses a GPU, and what it adds to every layer, sequence, step and request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Engine:
    """Coefficients of a step's time (`roofline`) and of a closed loop's waits (`closed_loop`)."""

    name: str
    gemm_compute: float  # share of peak FLOPS that BF16 matrix products reach
    gemm_memory: float  # share of the memory's bandwidth that they and element-wise kernels reach
    attention_memory: float  # of the share that the GPU's attention kernels reach, in decoding
    layer_s: float  # launching and synchronising a layer's kernels
    sparse_layer_s: float  # and a mixture's: routing, permuting, gathering
    step_s: float  # scheduling, a step
    sequence_s: float  # sampling and detokenizing, a sequence and step
    all_reduce_s: float  # an all-reduce's latency
    request_s: float  # before the first step and after it: HTTP, tokenization, the client
    met_prompts: float  # share of the other requests in flight whose prefill a request waits for
    mixes: bool  # a step may hold prompts and decoding sequences
    source: str


# The constants of a roofline that nobody tuned: GEMMs 0.70 of peak FLOPS and 0.85 of bandwidth, 6 us a layer,
# 1.2 ms a step, 8 us an all-reduce. Against composites of measured kernels of vLLM it is 17 to 20 % slow in
# prefill, which 0.85 of peak corrects (0.83 to 0.88 fit). The constant of mixtures is fitted, with the GPUs' share
# for experts, on 26 runs of DeepSeek-R1 in FP8 on eight H200 under SGLang (AIConfigurator's silicon samples).
KERNELS: Final = Engine(
    name="kernels",
    gemm_compute=0.85,
    gemm_memory=0.85,
    attention_memory=1.0,
    layer_s=6e-6,
    sparse_layer_s=15e-6,
    step_s=1.2e-3,
    sequence_s=0.0,
    all_reduce_s=8e-6,
    request_s=0.0,
    met_prompts=0.0,
    mixes=True,
    source="untuned roofline, prefill corrected on AIConfigurator's vLLM GEMM tables: kernels without an engine",
)

# Ten coefficients each, fitted by `simulator.accuracy` to the dense runs of AIConfigurator's silicon samples and
# rounded: `python benchmarks/accuracy.py` prints them again. Layers and all-reduces are hard to tell apart where
# most runs are on several GPUs. The samples have no runs to fit `sparse_layer_s` to; with that of `KERNELS`
# mixtures come out as docs/accuracy.md says.
_SOURCE: Final = "dense runs of aiconfigurator-core 0.12.0, systems/silicon_sample.csv"

VLLM: Final = Engine(
    name="vllm",
    gemm_compute=0.714,
    gemm_memory=0.845,
    attention_memory=1.15,
    layer_s=62.5e-6,
    sparse_layer_s=15e-6,
    step_s=0.0,
    sequence_s=36.3e-6,
    all_reduce_s=2.81e-6,
    request_s=0.0526,
    met_prompts=0.0682,
    mixes=True,
    source=_SOURCE,
)

TENSORRT_LLM: Final = Engine(
    name="trtllm",
    gemm_compute=0.697,
    gemm_memory=0.968,
    attention_memory=1.15,
    layer_s=61.9e-6,
    sparse_layer_s=15e-6,
    step_s=0.0,
    sequence_s=21.1e-6,
    all_reduce_s=0.0,
    request_s=0.0298,
    met_prompts=0.0685,
    mixes=True,
    source=_SOURCE,
)

SGLANG: Final = Engine(
    name="sglang",
    gemm_compute=0.793,
    gemm_memory=0.951,
    attention_memory=0.980,
    layer_s=16.4e-6,
    sparse_layer_s=15e-6,
    step_s=2.31e-3,
    sequence_s=20.2e-6,
    all_reduce_s=0.557e-6,
    request_s=0.150,
    met_prompts=0.447,
    mixes=False,
    source=_SOURCE,
)

ENGINES: Final[dict[str, Engine]] = {engine.name: engine for engine in (KERNELS, VLLM, TENSORRT_LLM, SGLANG)}
