"""Instance classes derived from a model and a GPU: the cost model's constants, fitted to the roofline."""

from __future__ import annotations

import numpy as np

from conductor.catalogue.measured_times import PrefillTime, StepTime, with_measured_times
from conductor.catalogue.models import kv_bytes_per_token, weights_bytes
from conductor.catalogue.roofline import Deployment, chunked_prefills_s, step_work
from conductor.catalogue.tiers import CONNECTOR_S, loading_speeds
from conductor.costs import InstanceClass, Speed

# What an engine takes of a GPU's memory besides weights and KV cache: activations, graphs, communication buffers.
RUNTIME_BYTES = 3.5e9

_PROMPTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_CACHED_SHARES = (0.0, 0.5, 0.9)
_BATCHES = (1, 4, 16, 64, 128, 256)
_CONTEXTS = (1024, 2048, 8192, 32_768)


def kv_capacity_tokens(
    deployment: Deployment, memory_utilisation: float = 0.9, runtime_bytes: float = RUNTIME_BYTES
) -> int:
    """Tokens of KV cache that fit beside the weights, over all GPUs of the deployment.

    Where every GPU stores all of every entry (latent and hybrid attention), the GPUs' memories do not add up.
    Raises ValueError when the weights do not fit.
    """
    model, gpu, gpus = deployment.model, deployment.gpu, deployment.tensor_parallel
    weights = weights_bytes(model, deployment.weights)
    free = gpu.hbm_bytes * memory_utilisation - weights / gpus - runtime_bytes
    if free <= 0:
        raise ValueError(
            f"{model.name} in {deployment.weights.value} ({weights / 1e9:.0f} GB) does not fit {gpus} x {gpu.name} "
            f"({gpu.hbm_bytes / 1e9:.0f} GB each): use more GPUs (tensor_parallel) or a smaller weight precision"
        )
    shards = min(gpus, *(group.kv_shards for group in model.attention_layers))
    return int(free * shards / kv_bytes_per_token(model, deployment.kv))


def derive_instance_class(
    name: str,
    deployment: Deployment,
    *,
    chunk_tokens: int = 8192,
    memory_utilisation: float = 0.9,
    runtime_bytes: float = RUNTIME_BYTES,
) -> InstanceClass:
    """The instance class of ``deployment``.

    Prefill is fitted over prompts of 512 to 131,072 tokens of which none, half or 90 % are cached in the device
    (what fits the model's context), decode over batches of 1 to 256 at contexts of 1K to 32K as far as the KV
    cache holds them; both minimise relative errors. Raises ValueError when the weights do not fit.
    """
    model, gpu, gpus = deployment.model, deployment.gpu, deployment.tensor_parallel
    capacity = kv_capacity_tokens(deployment, memory_utilisation, runtime_bytes)
    unfitted = InstanceClass(
        name=name,
        prefill_s_per_token=0.0,
        prefill_s_per_token_squared=0.0,
        prefill_base_s=0.0,
        prefill_s_per_cached_token=0.0,
        decode_base_s=0.0,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=0.0,
        kv_bytes_per_token=kv_bytes_per_token(model, deployment.kv),
        layers=model.layers,
        chunk_tokens=chunk_tokens,
        kv_capacity_tokens=capacity,
        nic=Speed(bytes_per_s=gpus * gpu.nic_bytes_per_s * gpu.nic_efficiency, latency_s=CONNECTOR_S),
        tiers=loading_speeds(gpu, gpus),
    )
    prompts = [
        (tokens, int(tokens * share))
        for tokens in _PROMPTS
        if tokens <= model.max_context_tokens
        for share in _CACHED_SHARES
    ]
    prefills = [
        PrefillTime(tokens, cached, seconds)
        for (tokens, cached), seconds in zip(
            prompts, chunked_prefills_s(deployment, prompts, chunk_tokens), strict=True
        )
    ]
    batches, contexts = (grid.ravel() for grid in np.meshgrid(_BATCHES, _CONTEXTS))
    fits = (batches * contexts <= capacity) | (batches == 1)
    batches, contexts = batches[fits], (batches * contexts)[fits]
    seconds = step_work(deployment, sequences=batches, context_tokens=contexts).seconds(deployment.engine)
    steps = map(StepTime, batches.tolist(), contexts.tolist(), seconds.tolist())
    return with_measured_times(unfitted, prefills, list(steps))
