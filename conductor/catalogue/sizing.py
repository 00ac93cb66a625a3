"""How many requests a cluster holds, when KV cache starts to matter, what it must earn, and what compression saves.

Contexts are in tokens, sizes in bytes, money in US dollars. Tables elsewhere mix GB (1e9) and GiB (2**30):
everything here is bytes, and only the printing chooses a unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.catalogue.attention import GroupedQueryAttention, KvPrecision
from conductor.catalogue.models import ModelSpec, kv_bytes
from conductor.costs import Speed

_DAYS_PER_MONTH = 30


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal GPUs, each with its share of the weights."""

    gpus: int
    hbm_bytes: float  # per GPU, as the next two
    weights_bytes: float
    runtime_bytes: float  # activations, graphs, communication buffers

    @property
    def kv_budget_bytes(self) -> float:
        """What one GPU has left for KV cache; 0 when there is nothing left."""
        return max(0.0, self.hbm_bytes - self.weights_bytes - self.runtime_bytes)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of one size are resident at once."""

    request_bytes: float
    per_gpu: int  # 0 when a request needs more than one GPU
    gpus_per_request: int
    on_cluster: int


def concurrency(gpus: int, kv_budget_bytes: float, request_bytes: float) -> Concurrency:
    """Requests of ``request_bytes`` of KV cache on ``gpus`` GPUs with ``kv_budget_bytes`` each.

    A request that exceeds one GPU takes as many whole GPUs as it needs. Raises ValueError without a budget.
    """
    if kv_budget_bytes <= 0:
        raise ValueError("no memory is left for KV cache: use fewer weight bytes per GPU or larger GPUs")
    if request_bytes <= 0:
        raise ValueError(f"request_bytes must be positive, not {request_bytes}")
    per_gpu = int(kv_budget_bytes // request_bytes)
    gpus_per_request = max(1, math.ceil(request_bytes / kv_budget_bytes))
    on_cluster = gpus * per_gpu if per_gpu else gpus // gpus_per_request
    return Concurrency(request_bytes, per_gpu, gpus_per_request, on_cluster)


@dataclass(frozen=True, slots=True)
class ConcurrencyRow:
    context_tokens: int
    precision: KvPrecision
    concurrency: Concurrency


def concurrency_table(
    model: ModelSpec, cluster: Cluster, contexts: Sequence[int], precisions: Sequence[KvPrecision]
) -> list[ConcurrencyRow]:
    """One row for every context and precision, contexts outermost."""
    return [
        ConcurrencyRow(
            context,
            precision,
            concurrency(cluster.gpus, cluster.kv_budget_bytes, kv_bytes(model, context, precision)),
        )
        for context in contexts
        for precision in precisions
    ]


def inflection_requests(
    model: ModelSpec,
    weights_bytes: float,
    context_tokens: int,
    precision: KvPrecision = KvPrecision.BF16,
    share: float = 0.5,
) -> int:
    """The least number of resident requests whose KV cache reaches ``share`` of the weights.

    From there on KV cache, not weights, decides how many requests fit (survey, June 2026: one half).
    """
    return max(1, math.ceil(share * weights_bytes / kv_bytes(model, context_tokens, precision)))


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What a cluster must sell to earn its price."""

    output_tokens_per_month: float
    output_tokens_per_day: float
    requests_per_day: float


def break_even(
    cluster_price_per_month: float, price_per_million_output_tokens: float, output_tokens_per_request: float
) -> BreakEven:
    """Months have 30 days; input tokens are given away."""
    if price_per_million_output_tokens <= 0 or output_tokens_per_request <= 0:
        raise ValueError("price_per_million_output_tokens and output_tokens_per_request must be positive")
    per_month = cluster_price_per_month / price_per_million_output_tokens * 1e6
    per_day = per_month / _DAYS_PER_MONTH
    return BreakEven(per_month, per_day, per_day / output_tokens_per_request)


@dataclass(frozen=True, slots=True)
class Saving:
    """A request's KV cache after one more measure, and how many times smaller than at first it is."""

    measure: str
    request_bytes: float
    factor: float


def gqa_equivalent_bytes(model: ModelSpec, context_tokens: int) -> float:
    """What the model's layers would store in BF16 with ordinary GQA of 8 KV heads of 128."""
    attention = GroupedQueryAttention(query_heads=64, kv_heads=8, head_size=128)
    groups = attention.layers(model.layers, model.hidden_size)
    return sum(group.kv_bytes(context_tokens, KvPrecision.BF16) for group in groups)


def layers_of_saving(
    model: ModelSpec,
    context_tokens: int,
    quantised: KvPrecision,
    prefix_hit_rate: float,
    uncompressed_bytes: float | None = None,
) -> list[Saving]:
    """How attention, precision and prefix cache shrink what one request adds, each on top of the one before.

    ``uncompressed_bytes`` is what to compare with; by default `gqa_equivalent_bytes`. Blocks that the prefix
    cache shares are counted as free, which holds when many requests share them.
    """
    if not 0 <= prefix_hit_rate < 1:
        raise ValueError(f"prefix_hit_rate must be at least 0 and below 1, not {prefix_hit_rate}")
    first = (
        uncompressed_bytes if uncompressed_bytes is not None else gqa_equivalent_bytes(model, context_tokens)
    )
    compact = kv_bytes(model, context_tokens, quantised)
    steps = (
        ("uncompressed", first),
        (f"{model.kind.value} attention", kv_bytes(model, context_tokens, KvPrecision.BF16)),
        (quantised.value, compact),
        (f"prefix cache at {prefix_hit_rate:.0%}", compact * (1 - prefix_hit_rate)),
    )
    return [Saving(measure, size, first / size) for measure, size in steps]


def load_s(size_bytes: float, speed: Speed) -> float:
    """Seconds to move ``size_bytes`` over a link or from a tier that nothing else uses."""
    return speed.latency_s + size_bytes / speed.bytes_per_s


def reuse_bandwidth_bytes_per_s(model: ModelSpec, flops_per_s: float, prefix_tokens: int) -> float:
    """The bandwidth above which loading a prefix of ``prefix_tokens`` tokens beats computing it again.

    Mooncake (FAST'25), section 2.2: KV bytes over the arithmetic that makes them, a layer and token at the
    prefix's end costing ``4 p d + 22 d^2`` operations; for dense models with ``d`` the hidden size.
    """
    hidden = model.hidden_size
    flops_per_token = model.layers * (4 * prefix_tokens * hidden + 22 * hidden * hidden)
    return flops_per_s * kv_bytes(model, prefix_tokens) / prefix_tokens / flops_per_token
