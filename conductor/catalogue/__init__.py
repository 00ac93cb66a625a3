"""Models, GPUs, tiers and links with the source of each figure, and the instance classes made of them."""

from __future__ import annotations

from conductor.catalogue.attention import AttentionKind, KvPrecision
from conductor.catalogue.derivation import derive_instance_class, kv_capacity_tokens
from conductor.catalogue.gpus import GPUS, GpuSpec
from conductor.catalogue.instance_classes import DEPLOYMENTS, INSTANCE_CLASSES, InstanceClasses
from conductor.catalogue.links import LINKS, LinkSpec, links_within
from conductor.catalogue.measured_classes import LLAMA_8B_H100, LLAMA_70B_8XA800
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
from conductor.catalogue.roofline import Deployment, chunked_prefill_s, decode_step_s, prefill_s
from conductor.catalogue.tiers import TIERS, TierSpec, loading_speeds

__all__ = [
    "DEPLOYMENTS",
    "GPUS",
    "INSTANCE_CLASSES",
    "LINKS",
    "LLAMA_8B_H100",
    "LLAMA_70B_8XA800",
    "MODELS",
    "TIERS",
    "AttentionKind",
    "Deployment",
    "GpuSpec",
    "InstanceClasses",
    "KvPrecision",
    "LinkSpec",
    "ModelSpec",
    "TierSpec",
    "WeightPrecision",
    "active_parameters",
    "chunked_prefill_s",
    "decode_step_s",
    "derive_instance_class",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_capacity_tokens",
    "links_within",
    "loading_speeds",
    "prefill_s",
    "read_instance_class",
    "total_parameters",
    "weights_bytes",
    "write_instance_class",
]
