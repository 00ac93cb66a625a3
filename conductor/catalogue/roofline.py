"""How long an engine's step takes on a GPU, from shapes, peaks and measured efficiencies.

A step is the sum over layers of its matrix products, attention, element-wise kernels and all-reduces, each the
larger of its arithmetic and its memory traffic, plus constants a layer, a sequence and a step. What a step asks
of the hardware (`step_work`) does not depend on the engine; how well the engine uses it does (`engines`), so
that coefficients can be fitted to measured runs without counting the work again. docs/accuracy.md states how far
all this is from measurements. It knows tensor parallelism within a node; latent and hybrid attention store every
KV entry on every GPU then, as engines do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from conductor.catalogue.attention import AttentionLayers, KvPrecision, Matrix, Split
from conductor.catalogue.engines import VLLM, Engine
from conductor.catalogue.gpus import GpuSpec
from conductor.catalogue.models import ModelSpec, WeightPrecision
from conductor.costs import Floats

_ACTIVATION_BYTES = 2.0  # activations stay in BF16


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model served by an engine on ``tensor_parallel`` GPUs of one node."""

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel: int = 1
    weights: WeightPrecision = WeightPrecision.BF16
    kv: KvPrecision = KvPrecision.BF16
    engine: Engine = VLLM

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}")


@dataclass(frozen=True, slots=True)
class StepWork:
    """What steps ask of one GPU: seconds at its peaks, and counts. The last axis of each field are the steps."""

    product_s: Floats  # a row a matrix product: arithmetic
    product_memory_s: Floats  # and its weights and activations
    attention_s: Floats  # a row a group of layers with equal attention: arithmetic
    attention_memory_s: Floats  # and its KV entries
    elementwise_s: Floats
    exchange_s: Floats  # of all-reduces, without latency
    exchanges: Floats  # all-reduces
    layers: Floats
    sparse_layers: Floats
    sampled_tokens: Floats

    def seconds(self, engine: Engine) -> Floats:
        """Of each step in ``engine``."""
        compute_s = self.product_s / engine.gemm_compute
        memory_s = self.product_memory_s / engine.gemm_memory
        attention_memory_s = self.attention_memory_s / engine.attention_memory
        seconds: Floats = (
            np.maximum(compute_s, memory_s).sum(axis=0)
            + np.maximum(self.attention_s, attention_memory_s).sum(axis=0)
            + self.elementwise_s / engine.gemm_memory
            + self.exchange_s
            + self.exchanges * engine.all_reduce_s
            + self.layers * engine.layer_s
            + self.sparse_layers * engine.sparse_layer_s
            + self.sampled_tokens * engine.sequence_s
            + engine.step_s
        )
        return seconds

    @classmethod
    def gathered(cls, parts: Sequence[StepWork]) -> StepWork:
        """The steps of all parts, one after another; rows that a part lacks are filled with nothing."""
        gathered = {}
        for field in fields(cls):
            arrays = [np.atleast_2d(getattr(part, field.name)) for part in parts]
            rows = max(len(array) for array in arrays)
            padded = [np.pad(array, ((0, rows - len(array)), (0, 0))) for array in arrays]
            together = np.concatenate(padded, axis=1)
            gathered[field.name] = together if getattr(parts[0], field.name).ndim == 2 else together[0]
        return cls(**gathered)


def step_work(
    deployment: Deployment,
    *,
    prompts: ArrayLike = 0.0,
    prompt_tokens: ArrayLike = 0.0,
    cached_tokens: ArrayLike = 0.0,
    sequences: ArrayLike = 0.0,
    context_tokens: ArrayLike = 0.0,
) -> StepWork:
    """The work of steps, one for each element of the arguments, which are broadcast.

    A step computes ``prompt_tokens`` tokens of each of ``prompts`` prompts behind ``cached_tokens`` tokens that
    each has in the KV cache, and adds a token to each of ``sequences``, ``context_tokens`` tokens in total.
    """
    given = (prompts, prompt_tokens, cached_tokens, sequences, context_tokens)
    prompts, prompt_tokens, cached_tokens, sequences, context_tokens = (
        np.atleast_1d(column)
        for column in np.broadcast_arrays(*(np.asarray(value, np.float64) for value in given))
    )
    model, gpu, gpus = deployment.model, deployment.gpu, deployment.tensor_parallel
    tokens = prompts * prompt_tokens + sequences
    sampled = prompts + sequences
    nothing = np.zeros_like(tokens)
    products = _products(deployment, tokens, sampled)
    attention = [
        kernel
        for group in model.attention_layers
        for kernel in (
            _prefill_attention(deployment, group, prompts, prompt_tokens, cached_tokens),
            _decode_attention(deployment, group, sequences, context_tokens),
        )
    ]
    exchanges = 2.0 * model.layers if gpus > 1 else 0.0
    message_bytes = tokens * model.hidden_size * _ACTIVATION_BYTES
    exchange_bytes = exchanges * 2 * (gpus - 1) / gpus * message_bytes
    return StepWork(
        product_s=np.stack([compute for compute, _ in products]),
        product_memory_s=np.stack([memory for _, memory in products]),
        attention_s=np.stack([compute for compute, _ in attention]),
        attention_memory_s=np.stack([memory for _, memory in attention]),
        elementwise_s=model.layers * tokens * _elementwise_bytes(deployment) / gpu.hbm_bytes_per_s,
        exchange_s=exchange_bytes / (gpu.nvlink_bytes_per_s * gpu.efficiency.interconnect),
        exchanges=nothing + exchanges,
        layers=nothing + model.layers,
        sparse_layers=nothing + model.sparse_layers,
        sampled_tokens=sampled,
    )


def prefill_s(deployment: Deployment, tokens: int, context_tokens: int = 0) -> float:
    """Seconds of one pass over ``tokens`` prompt tokens behind ``context_tokens`` that are in the KV cache."""
    work = step_work(deployment, prompts=1, prompt_tokens=tokens, cached_tokens=context_tokens)
    return float(work.seconds(deployment.engine)[0])


def chunked_prefill_s(
    deployment: Deployment, prompt_tokens: int, cached_tokens: int = 0, chunk_tokens: int = 8192
) -> float:
    """Seconds to prefill a prompt of which ``cached_tokens`` are cached, at most ``chunk_tokens`` a pass."""
    return chunked_prefills_s(deployment, [(prompt_tokens, cached_tokens)], chunk_tokens)[0]


def chunked_prefills_s(
    deployment: Deployment, prompts: Sequence[tuple[int, int]], chunk_tokens: int = 8192
) -> list[float]:
    """The same for each of ``prompts``, pairs of tokens and cached tokens, many at the price of one."""
    done = [np.arange(cached, tokens, chunk_tokens, dtype=np.float64) for tokens, cached in prompts]
    chunks = [
        np.minimum(chunk_tokens, tokens - begun) for (tokens, _), begun in zip(prompts, done, strict=True)
    ]
    work = step_work(
        deployment, prompts=1, prompt_tokens=np.concatenate(chunks), cached_tokens=np.concatenate(done)
    )
    owner = np.repeat(np.arange(len(prompts)), [len(begun) for begun in done])
    seconds = np.bincount(owner, work.seconds(deployment.engine), minlength=len(prompts))
    return [float(s) for s in seconds]


def decode_step_s(deployment: Deployment, sequences: int, context_tokens: int) -> float:
    """Seconds of one step that adds a token to each of ``sequences``, ``context_tokens`` tokens in total."""
    work = step_work(deployment, sequences=sequences, context_tokens=context_tokens)
    return float(work.seconds(deployment.engine)[0])


_Kernel = tuple[Floats, Floats]  # seconds of arithmetic and of memory traffic


def _prefill_attention(
    deployment: Deployment, group: AttentionLayers, prompts: Floats, tokens: Floats, cached: Floats
) -> _Kernel:
    # Attended entries grow nearly linearly over the chunk, so its middle stands for all of its queries.
    middle = cached + tokens / 2
    pairs = tokens * group.attended_entries(middle)
    scored = tokens * middle / group.compression
    read = (cached + tokens) / group.compression
    if group.indexer:
        read = np.minimum(read, pairs)
    flops = group.prefill_flops_per_pair * pairs
    return _attention(deployment, group, prompts * flops, prompts * scored, prompts * read)


def _decode_attention(
    deployment: Deployment, group: AttentionLayers, sequences: Floats, context_tokens: Floats
) -> _Kernel:
    pairs = sequences * group.attended_entries(context_tokens / np.maximum(sequences, 1.0))
    scored = context_tokens / group.compression
    return _attention(deployment, group, group.decode_flops_per_pair * pairs, scored, pairs)


def _attention(
    deployment: Deployment,
    group: AttentionLayers,
    flops: Floats,
    scored_entries: Floats,
    read_entries: Floats,
) -> _Kernel:
    """All layers of ``group``; ``scored_entries`` are (query, entry) pairs that its indexer, if any, looks at."""
    gpu, tensor_parallel = deployment.gpu, deployment.tensor_parallel
    flops = flops / tensor_parallel
    traffic = read_entries * (group.entry_bytes(deployment.kv) / min(tensor_parallel, group.kv_shards))
    if group.indexer:
        flops = flops + 2 * group.indexer.heads * group.indexer.head_size * scored_entries
        traffic = traffic + scored_entries * group.indexer_entry_bytes(deployment.kv)
    return (
        group.count * flops / (gpu.bf16_flops * gpu.efficiency.attention_compute),
        group.count * traffic / (gpu.hbm_bytes_per_s * gpu.efficiency.attention_memory),
    )


def _products(deployment: Deployment, tokens: Floats, sampled: Floats) -> list[_Kernel]:
    """Every matrix product of a step, all layers together."""
    model, weights = deployment.model, deployment.weights
    weight_bytes = weights.weight_bytes
    products = [
        _product(deployment, matrix, tokens, weight_bytes, group.count)
        for group in model.attention_layers
        for matrix in group.matrices
    ]
    if model.dense_layers:
        products += [
            _product(deployment, matrix, tokens, weight_bytes, model.dense_layers)
            for matrix in model.mlp(model.intermediate_size)
        ]
    if model.experts:
        router = Matrix(model.hidden_size, model.experts.routed, Split.NONE)
        products.append(_routed_experts(deployment, tokens))
        products.append(_product(deployment, router, tokens, _ACTIVATION_BYTES, model.sparse_layers))
        if model.experts.shared:
            products += [
                _product(deployment, matrix, tokens, weight_bytes, model.sparse_layers)
                for matrix in model.mlp(model.experts.shared * model.experts.intermediate_size)
            ]
    # Output layer in BF16: quantised checkpoints leave it alone.
    products.append(_product(deployment, model.output_layer, sampled, 2.0, 1))
    return products


def _product(
    deployment: Deployment, matrix: Matrix, tokens: Floats, weight_bytes: float, layers: int
) -> _Kernel:
    gpu = deployment.gpu
    inputs, outputs = matrix.shard(deployment.tensor_parallel)
    flops = 2 * tokens * inputs * outputs
    traffic = inputs * outputs * weight_bytes + tokens * (inputs + outputs) * _ACTIVATION_BYTES
    return layers * flops / gpu.gemm_flops(weight_bytes), layers * traffic / gpu.hbm_bytes_per_s


def _routed_experts(deployment: Deployment, tokens: Floats) -> _Kernel:
    """The routed experts of all sparse layers, tokens spread evenly over experts and GPUs."""
    model, gpu, tensor_parallel = deployment.model, deployment.gpu, deployment.tensor_parallel
    experts = model.experts
    assert experts is not None
    weight_bytes = deployment.weights.expert_weight_bytes
    # Expected number of distinct experts that a batch visits.
    visited = experts.routed * (1 - (1 - experts.active / experts.routed) ** tokens)
    flops = 2 * tokens * experts.active * model.expert_parameters()
    weights = visited * model.expert_parameters() * weight_bytes
    intermediate = 2 * model.hidden_size + 3 * experts.intermediate_size
    activations = tokens * experts.active * intermediate * _ACTIVATION_BYTES
    layers = model.sparse_layers / tensor_parallel / gpu.efficiency.experts
    return (
        layers * flops / gpu.gemm_flops(weight_bytes),
        layers * (weights + activations) / gpu.hbm_bytes_per_s,
    )


def _elementwise_bytes(deployment: Deployment) -> float:
    """A token and layer: norms with residual adds (read and write two vectors, twice) and the MLP's activation."""
    model = deployment.model
    if model.experts is None:
        intermediate = model.intermediate_size
    else:
        visits = model.experts.active + model.experts.shared
        intermediate = visits * model.experts.intermediate_size
    elements = 8 * model.hidden_size + 3 * intermediate // deployment.tensor_parallel
    return elements * _ACTIVATION_BYTES
