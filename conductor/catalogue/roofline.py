"""How long a model's forward pass takes on a GPU, from shapes, peaks and measured efficiencies.

A pass is the sum over layers of its matrix products, attention, element-wise kernels and all-reduces, each the
larger of its arithmetic and its memory traffic, plus a constant a layer and a constant a step. docs/catalogue.md
states how far it is from measured kernels. It knows tensor parallelism within a node; latent and hybrid
attention store every KV entry on every GPU then, as engines do.
"""

from __future__ import annotations

from dataclasses import dataclass

from conductor.catalogue.attention import AttentionLayers, KvPrecision, Matrix, Split
from conductor.catalogue.gpus import GpuSpec
from conductor.catalogue.models import ModelSpec, WeightPrecision

_ACTIVATION_BYTES = 2.0  # activations stay in BF16


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on ``tensor_parallel`` GPUs of one node."""

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel: int = 1
    weights: WeightPrecision = WeightPrecision.BF16
    kv: KvPrecision = KvPrecision.BF16

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}")


def prefill_s(deployment: Deployment, tokens: int, context_tokens: int = 0) -> float:
    """Seconds of one pass over ``tokens`` prompt tokens behind ``context_tokens`` that are in the KV cache."""
    attention = 0.0
    for group in deployment.model.attention_layers:
        # Attended entries grow nearly linearly over the chunk, so its middle stands for all of its queries.
        middle = context_tokens + tokens / 2
        pairs = tokens * group.attended_entries(middle)
        scored = tokens * middle / group.compression
        read = (context_tokens + tokens) / group.compression
        if group.indexer:
            read = min(read, pairs)
        attention += group.count * _attention_s(
            deployment, group, group.prefill_flops_per_pair * pairs, scored, read, 1
        )
    return _pass_s(deployment, tokens, 1) + attention


def chunked_prefill_s(
    deployment: Deployment, prompt_tokens: int, cached_tokens: int = 0, chunk_tokens: int = 8192
) -> float:
    """Seconds to prefill a prompt of which ``cached_tokens`` are cached, at most ``chunk_tokens`` a pass."""
    seconds, done = 0.0, cached_tokens
    while done < prompt_tokens:
        chunk = min(chunk_tokens, prompt_tokens - done)
        seconds += prefill_s(deployment, chunk, done)
        done += chunk
    return seconds


def decode_step_s(deployment: Deployment, sequences: int, context_tokens: int) -> float:
    """Seconds of one step that adds a token to each of ``sequences``, ``context_tokens`` tokens in total."""
    attention = 0.0
    for group in deployment.model.attention_layers:
        mean_context = context_tokens / sequences
        pairs = sequences * group.attended_entries(mean_context)
        scored = context_tokens / group.compression
        flops = group.decode_flops_per_pair * pairs
        attention += group.count * _attention_s(deployment, group, flops, scored, pairs, sequences)
    return _pass_s(deployment, sequences, sequences) + attention


def _attention_s(
    deployment: Deployment,
    group: AttentionLayers,
    flops: float,
    scored_entries: float,
    read_entries: float,
    sequences: int,
) -> float:
    """One layer's attention; ``scored_entries`` are (query, entry) pairs that its indexer, if any, looks at."""
    gpu, tensor_parallel = deployment.gpu, deployment.tensor_parallel
    shards = min(tensor_parallel, group.kv_shards)
    flops /= tensor_parallel
    traffic = read_entries * group.entry_bytes(deployment.kv) / shards
    if group.indexer:
        flops += 2 * group.indexer.heads * group.indexer.head_size * scored_entries
        traffic += scored_entries * group.indexer_entry_bytes(deployment.kv)
    efficiency = gpu.efficiency
    return max(
        flops / (gpu.bf16_flops * efficiency.attention_compute),
        traffic / (gpu.hbm_bytes_per_s * efficiency.attention_memory),
    )


def _pass_s(deployment: Deployment, tokens: int, sampled_tokens: int) -> float:
    """Everything but attention: ``tokens`` go through the layers, ``sampled_tokens`` through the output layer."""
    model, gpu, tensor_parallel = deployment.model, deployment.gpu, deployment.tensor_parallel
    efficiency = gpu.efficiency
    weight_bytes = deployment.weights.weight_bytes
    seconds = 0.0
    for group in model.attention_layers:
        seconds += group.count * sum(_gemm_s(deployment, m, tokens, weight_bytes) for m in group.matrices)
    seconds += model.dense_layers * sum(
        _gemm_s(deployment, m, tokens, weight_bytes) for m in model.mlp(model.intermediate_size)
    )
    if model.experts:
        seconds += model.sparse_layers * _experts_s(deployment, tokens)
    seconds += model.layers * (_elementwise_s(deployment, tokens) + efficiency.layer_s)
    if tensor_parallel > 1:
        message_bytes = tokens * model.hidden_size * _ACTIVATION_BYTES
        travelled = 2 * (tensor_parallel - 1) / tensor_parallel * message_bytes
        all_reduce_s = efficiency.all_reduce_s + travelled / (
            gpu.nvlink_bytes_per_s * efficiency.interconnect
        )
        seconds += 2 * model.layers * all_reduce_s
    # Output layer in BF16: quantised checkpoints leave it alone.
    return seconds + _gemm_s(deployment, model.output_layer, sampled_tokens, 2.0) + efficiency.step_s


def _gemm_s(deployment: Deployment, matrix: Matrix, tokens: float, weight_bytes: float) -> float:
    gpu = deployment.gpu
    inputs, outputs = matrix.shard(deployment.tensor_parallel)
    flops = 2 * tokens * inputs * outputs
    traffic = inputs * outputs * weight_bytes + tokens * (inputs + outputs) * _ACTIVATION_BYTES
    return max(
        flops / (gpu.flops(weight_bytes) * gpu.efficiency.gemm_compute),
        traffic / (gpu.hbm_bytes_per_s * gpu.efficiency.gemm_memory),
    )


def _experts_s(deployment: Deployment, tokens: int) -> float:
    """One sparse layer's router, shared and routed experts, tokens spread evenly over experts and GPUs."""
    model, gpu, tensor_parallel = deployment.model, deployment.gpu, deployment.tensor_parallel
    experts = model.experts
    assert experts is not None
    weight_bytes = deployment.weights.expert_weight_bytes
    # Expected number of distinct experts that a batch visits.
    visited = experts.routed * (1 - (1 - experts.active / experts.routed) ** tokens)
    flops = 2 * tokens * experts.active * model.expert_parameters() / tensor_parallel
    weights = visited * model.expert_parameters() * weight_bytes / tensor_parallel
    intermediate = 2 * model.hidden_size + 3 * experts.intermediate_size
    router = Matrix(model.hidden_size, experts.routed, Split.NONE)
    activations = tokens * experts.active * intermediate * _ACTIVATION_BYTES / tensor_parallel
    seconds = max(
        flops / (gpu.flops(weight_bytes) * gpu.efficiency.gemm_compute),
        (weights + activations) / (gpu.hbm_bytes_per_s * gpu.efficiency.gemm_memory),
    )
    seconds = seconds / gpu.efficiency.experts + gpu.efficiency.sparse_layer_s
    seconds += _gemm_s(deployment, router, tokens, _ACTIVATION_BYTES)
    if experts.shared:
        shared = model.mlp(experts.shared * experts.intermediate_size)
        seconds += sum(_gemm_s(deployment, m, tokens, deployment.weights.weight_bytes) for m in shared)
    return seconds


def _elementwise_s(deployment: Deployment, tokens: int) -> float:
    """Norms with residual adds (read and write two vectors, twice) and the activation of the MLP."""
    model, gpu = deployment.model, deployment.gpu
    per_token = 8 * model.hidden_size
    if model.experts is None:
        per_token += 3 * model.intermediate_size // deployment.tensor_parallel
    else:
        visits = model.experts.active + model.experts.shared
        per_token += 3 * visits * model.experts.intermediate_size // deployment.tensor_parallel
    return tokens * per_token * _ACTIVATION_BYTES / (gpu.hbm_bytes_per_s * gpu.efficiency.gemm_memory)
