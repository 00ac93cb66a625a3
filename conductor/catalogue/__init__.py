"""Models, GPUs, tiers and links with the source of each figure, and the instance classes made of them."""

from __future__ import annotations

from conductor.catalogue.attention import AttentionKind, KvPrecision
from conductor.catalogue.closed_loop import ClosedLoops, Times, closed_loops
from conductor.catalogue.derivation import derive_instance_class, kv_capacity_tokens
from conductor.catalogue.engines import ENGINES, KERNELS, SGLANG, TENSORRT_LLM, VLLM, Engine
from conductor.catalogue.gpus import GPUS, GpuSpec
from conductor.catalogue.instance_classes import DEPLOYMENTS, INSTANCE_CLASSES, InstanceClasses
from conductor.catalogue.links import LINKS, LinkSpec, links_within
from conductor.catalogue.measured_classes import LLAMA_8B_H100, LLAMA_70B_8XA800
from conductor.catalogue.measured_times import PrefillTime, StepTime, with_measured_times
from conductor.catalogue.models import (
    MODELS,
    ModelSpec,
    WeightPrecision,
    active_parameters,
    kv_bytes,
    kv_bytes_per_token,
    total_parameters,
    weights_bytes,
)
from conductor.catalogue.profile_file import read_instance_class, write_instance_class
from conductor.catalogue.roofline import (
    Deployment,
    StepWork,
    chunked_prefill_s,
    chunked_prefills_s,
    decode_step_s,
    prefill_s,
    step_work,
)
from conductor.catalogue.tiers import TIERS, TierSpec, loading_speeds

__all__ = [
    "DEPLOYMENTS",
    "ENGINES",
    "GPUS",
    "INSTANCE_CLASSES",
    "KERNELS",
    "LINKS",
    "LLAMA_8B_H100",
    "LLAMA_70B_8XA800",
    "MODELS",
    "SGLANG",
    "TENSORRT_LLM",
    "TIERS",
    "VLLM",
    "AttentionKind",
    "ClosedLoops",
    "Deployment",
    "Engine",
    "GpuSpec",
    "InstanceClasses",
    "KvPrecision",
    "LinkSpec",
    "ModelSpec",
    "PrefillTime",
    "StepTime",
    "StepWork",
    "TierSpec",
    "Times",
    "WeightPrecision",
    "active_parameters",
    "chunked_prefill_s",
    "chunked_prefills_s",
    "closed_loops",
    "decode_step_s",
    "derive_instance_class",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_capacity_tokens",
    "links_within",
    "loading_speeds",
    "prefill_s",
    "read_instance_class",
    "step_work",
    "total_parameters",
    "weights_bytes",
    "with_measured_times",
    "write_instance_class",
]
