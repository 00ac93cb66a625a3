"""`conductor plan`: how much KV cache a model needs, how many requests a cluster holds, and what it must earn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from conductor.catalogue import (
    GPUS,
    MODELS,
    AttentionKind,
    GpuSpec,
    KvPrecision,
    ModelSpec,
    WeightPrecision,
    active_parameters,
    kv_bytes,
    kv_bytes_per_token,
    total_parameters,
    weights_bytes,
)
from conductor.catalogue.derivation import RUNTIME_BYTES
from conductor.catalogue.sizing import (
    BreakEven,
    Cluster,
    Concurrency,
    Saving,
    break_even,
    concurrency,
    inflection_requests,
    layers_of_saving,
)

_GIB = 2**30
_LARGEST_INSTANCE_GPUS = 64
_CONTEXTS = tuple(1024 * thousands for thousands in (8, 32, 128, 256, 512, 1024))


@dataclass(frozen=True, slots=True)
class Machines:
    """Instances of equal GPUs over which a model's weights are divided."""

    gpu: GpuSpec
    instances: int
    gpus_per_instance: int
    weights_bytes: float  # per GPU, as the next two
    runtime_bytes: float
    kv_budget_bytes: float
    kv_copies: int  # GPUs of an instance that store the same entries

    @property
    def instance_budget_bytes(self) -> float:
        """What distinct KV cache an instance holds."""
        return self.kv_budget_bytes * self.gpus_per_instance / self.kv_copies


@dataclass(frozen=True, slots=True)
class ContextRow:
    context_tokens: int
    precision: KvPrecision
    concurrency: Concurrency  # its "GPUs" are instances
    inflection_requests: int


def plan(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "h200",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs in all; default: one instance.")] = None,
    weights: Annotated[WeightPrecision, typer.Option(help="Precision of the weights.")] = WeightPrecision.FP8,
    kv: Annotated[
        list[KvPrecision] | None,
        typer.Option(help="Precision of the KV cache; may be repeated; default: all that the model has."),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a request; may be repeated; default: 8K to 1M.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="GPUs an instance; default: the fewest that leave room.")
    ] = None,
    memory_utilisation: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory the engine may use.")
    ] = 0.9,
    runtime_gb: Annotated[
        float, typer.Option(min=0, help="GB (1e9) a GPU for activations, graphs, buffers.")
    ] = RUNTIME_BYTES / 1e9,
    weights_gb: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB (1e9) of weights a GPU, where they are divided in another way."),
    ] = None,
    hit_rate: Annotated[
        float, typer.Option(min=0, max=0.999, help="Share of a prompt that prefix caches hold.")
    ] = 0.85,
    uncompressed_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="Compare savings with this; default: GQA 8 x 128 in the same layers."),
    ] = None,
    price_per_month: Annotated[
        float | None, typer.Option(min=0, help="US$ the cluster costs a month.")
    ] = None,
    price_per_million: Annotated[
        float | None, typer.Option(min=1e-9, help="US$ earned by a million output tokens.")
    ] = None,
    output_tokens: Annotated[float, typer.Option(min=1, help="Of a request, for requests a day.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, in bytes.")] = False,
) -> None:
    """Size a cluster for a model: KV cache, concurrency, what to optimise, break-even.

    Four questions, in the order in which they come up:

    1. How large is a request? KV cache grows with the context, by the bytes that a token leaves in every layer;
    attention (GQA, MLA, hybrid) and precision decide how many those are.

    2. How many requests fit? A GPU holds weights, runtime and KV cache; what is left for the last, divided by a
    request, is the concurrency. Latent and hybrid KV caches are stored on every GPU of an instance, so that a
    larger instance holds no more of them.

    3. When does KV cache matter? From the inflection on, when the resident requests' KV cache is half the
    weights; below it, optimise the weights, above it precision, prefix caching and offloading.

    4. What do the measures save, and what must the cluster sell?

    Examples:

    conductor plan --model llama-3-70b --gpu h100-80gb --gpus 64

    conductor plan --model deepseek-v3 --gpu h200 --kv fp8 --context 32768 --context 131072

    conductor plan --gpus 1000 --price-per-month 1170000 --price-per-million 0.87
    """
    console = Console(stderr=True)
    spec, card = MODELS.get(model), GPUS.get(gpu)
    if spec is None:
        _refuse(console, f"--model {model!r} is not in the catalogue; known: {', '.join(MODELS)}")
    if card is None:
        _refuse(console, f"--gpu {gpu!r} is not in the catalogue; known: {', '.join(GPUS)}")
    if (price_per_month is None) != (price_per_million is None):
        _refuse(console, "break-even needs both --price-per-month and --price-per-million")
    try:
        machines = _machines(
            *(spec, card, gpus, weights, tensor_parallel),
            share=memory_utilisation,
            runtime_bytes=runtime_gb * 1e9,
            stated_bytes=None if weights_gb is None else weights_gb * 1e9,
        )
    except ValueError as error:
        _refuse(console, str(error))
    precisions = list(dict.fromkeys(kv or _precisions_of(spec)))
    contexts = sorted(set(context or _CONTEXTS))
    all_weights = machines.weights_bytes * machines.gpus_per_instance
    rows = [
        _row(spec, machines, all_weights, each, precision) for each in contexts for precision in precisions
    ]
    smallest = min(precisions, key=lambda precision: kv_bytes(spec, contexts[-1], precision))
    savings = layers_of_saving(
        *(spec, contexts[-1], smallest, hit_rate),
        None if uncompressed_gib is None else uncompressed_gib * _GIB,
    )
    sales = None
    if price_per_month is not None and price_per_million is not None:
        sales = break_even(price_per_month, price_per_million, output_tokens)
    if as_json:
        print(json.dumps(_as_json(spec, machines, rows, contexts[-1], savings, sales), indent=2))
    else:
        _print(Console(highlight=False), spec, weights, machines, rows, contexts[-1], savings, sales)


def _refuse(console: Console, reason: str) -> NoReturn:
    console.print(reason, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(2)


def _precisions_of(model: ModelSpec) -> tuple[KvPrecision, ...]:
    if model.kind is AttentionKind.HYBRID:
        return (KvPrecision.BF16, KvPrecision.FP8, KvPrecision.FP8_FP4_INDEXER)
    return (KvPrecision.BF16, KvPrecision.FP8, KvPrecision.INT4)


def _machines(
    model: ModelSpec,
    gpu: GpuSpec,
    gpus: int | None,
    precision: WeightPrecision,
    tensor_parallel: int | None,
    *,
    share: float,
    runtime_bytes: float,
    stated_bytes: float | None,
) -> Machines:
    """ValueError when the weights fit no instance of the GPUs there are."""
    total = weights_bytes(model, precision)
    sizes = (
        [tensor_parallel] if tensor_parallel else [2**n for n in range(_LARGEST_INSTANCE_GPUS.bit_length())]
    )
    for size in sizes:
        each = stated_bytes if stated_bytes is not None else total / size
        budget = Cluster(size, gpu.hbm_bytes * share, each, runtime_bytes).kv_budget_bytes
        if budget > 0:
            break
    else:
        raise ValueError(
            f"no memory is left for KV cache: {each / 1e9:,.0f} GB of weights and {runtime_bytes / 1e9:g} GB of "
            f"runtime against {share:.0%} of {gpu.hbm_bytes / 1e9:g} GB on each of {size} x {gpu.name}; give more "
            "--tensor-parallel, smaller --weights or a larger --gpu"
        )
    if gpus is not None and gpus < size:
        raise ValueError(
            f"{model.name} in {precision.value} needs {size} x {gpu.name} an instance, --gpus is {gpus}"
        )
    shards = min(size, *(group.kv_shards for group in model.attention_layers))
    return Machines(gpu, (gpus or size) // size, size, each, runtime_bytes, budget, size // shards)


def _row(
    model: ModelSpec, machines: Machines, all_weights: float, context_tokens: int, precision: KvPrecision
) -> ContextRow:
    request_bytes = kv_bytes(model, context_tokens, precision)
    return ContextRow(
        context_tokens,
        precision,
        concurrency(machines.instances, machines.instance_budget_bytes, request_bytes),
        inflection_requests(model, all_weights, context_tokens, precision),
    )


def _as_json(
    model: ModelSpec,
    machines: Machines,
    rows: Sequence[ContextRow],
    longest: int,
    savings: Sequence[Saving],
    sales: BreakEven | None,
) -> dict[str, Any]:
    precisions = dict.fromkeys(row.precision for row in rows)
    return {
        "model": model.name,
        "attention": model.kind.value,
        "gpu": machines.gpu.name,
        "instances": machines.instances,
        "gpus_per_instance": machines.gpus_per_instance,
        "weights_bytes_per_gpu": machines.weights_bytes,
        "kv_budget_bytes_per_gpu": machines.kv_budget_bytes,
        "kv_copies": machines.kv_copies,
        "kv_bytes_per_token": {each.value: kv_bytes_per_token(model, each) for each in precisions},
        "contexts": [
            {
                "context_tokens": row.context_tokens,
                "kv_precision": row.precision.value,
                "request_bytes": row.concurrency.request_bytes,
                "requests_per_instance": row.concurrency.per_gpu,
                "instances_per_request": row.concurrency.gpus_per_request,
                "requests_on_cluster": row.concurrency.on_cluster,
                "inflection_requests": row.inflection_requests,
            }
            for row in rows
        ],
        "savings": {"context_tokens": longest, "measures": [asdict(saving) for saving in savings]},
        "break_even": None if sales is None else asdict(sales),
    }


def _print(
    console: Console,
    model: ModelSpec,
    weights: WeightPrecision,
    machines: Machines,
    rows: Sequence[ContextRow],
    longest: int,
    savings: Sequence[Saving],
    sales: BreakEven | None,
) -> None:
    total, active = total_parameters(model), active_parameters(model)
    parameters = f"{total / 1e9:,.0f} B parameters" + (
        f" ({active / 1e9:,.0f} B active)" if active < total else ""
    )
    console.print(f"{model.name}: {model.layers} layers, {model.kind.value} attention, {parameters}")
    counted = "1 instance" if machines.instances == 1 else f"{machines.instances:,} instances"
    console.print(
        f"{counted} of {machines.gpus_per_instance} x {machines.gpu.name}; each GPU: "
        f"{machines.weights_bytes / 1e9:,.1f} GB of weights ({weights.value}), "
        f"{machines.kv_budget_bytes / 1e9:,.1f} GB for KV cache"
    )
    if machines.kv_copies > 1:
        console.print(
            f"every KV entry is stored on {machines.kv_copies} GPUs of its instance: larger instances hold no more"
        )
    precisions = list(dict.fromkeys(row.precision for row in rows))
    cells = {(row.context_tokens, row.precision): row for row in rows}
    contexts = list(dict.fromkeys(row.context_tokens for row in rows))

    named = [each.value for each in precisions]
    sizes = _table("KV cache of a request, GiB", "context", *named)
    sizes.add_row("a token, KiB", *(f"{kv_bytes_per_token(model, each) / 1024:,.2f}" for each in precisions))
    held = _table("requests at once: an instance / the cluster", "context", *named)
    matters = _table("requests whose KV cache is half the weights", "context", *named)
    for context in contexts:
        chosen = [cells[context, precision] for precision in precisions]
        name = _context(context) + (" *" if context > model.max_context_tokens else "")
        sizes.add_row(name, *(f"{row.concurrency.request_bytes / _GIB:,.2f}" for row in chosen))
        held.add_row(name, *(_held(row.concurrency) for row in chosen))
        matters.add_row(name, *(f"{row.inflection_requests:,}" for row in chosen))
    for table in (sizes, held, matters):
        console.print(table)
    if any(row.concurrency.per_gpu == 0 for row in rows):
        console.print("1 over N: a request needs the KV cache of N instances")
    if contexts[-1] > model.max_context_tokens:
        console.print(f"* longer than the model's published {_context(model.max_context_tokens)}")
    saved = _table(f"what makes a request of {_context(longest)} smaller", "measure", "GiB", "times smaller")
    for saving in savings:
        saved.add_row(saving.measure, f"{saving.request_bytes / _GIB:,.2f}", f"{saving.factor:,.0f}")
    console.print(saved)
    if sales is not None:
        console.print(
            f"break-even: {sales.output_tokens_per_month:,.0f} output tokens a month, "
            f"{sales.output_tokens_per_day:,.0f} or {sales.requests_per_day:,.0f} requests a day"
        )


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", min_width=len(title))


def _held(held: Concurrency) -> str:
    if held.per_gpu:
        return f"{held.per_gpu:,} / {held.on_cluster:,}"
    return f"1 over {held.gpus_per_request} / {held.on_cluster:,}"


def _context(tokens: int) -> str:
    if tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
