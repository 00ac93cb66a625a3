"""`conductor trace`: what a trace contains, the same trace in Mooncake's format, and synthetic ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conductor.cli.trace_options import (
    Format,
    FromS,
    Limit,
    MaxInput,
    MaxOutput,
    MinInput,
    MinOutput,
    Rate,
    Seed,
    Speed,
    ToS,
    cannot_read,
    fail,
    trace_path,
    warn_on,
)
from simulator.workloads import (
    CAPACITIES_BLOCKS,
    MOONCAKE_BLOCK_TOKENS,
    WORKLOAD_KINDS,
    Selection,
    TraceError,
    TraceFormat,
    TraceProfile,
    TraceRecord,
    at_rate,
    detect_format,
    faster,
    generate,
    in_blocks_of,
    mooncake_line,
    profile_trace,
    read_trace,
    select,
    trace_span_s,
)

trace = typer.Typer(
    help=(
        "Traces: statistics, conversion, generation.\n\n"
        "A trace says when requests arrive, how long they are and which prefix blocks they share. Read are "
        "Mooncake JSONL, AIPerf's mooncake_trace (session_id, delay), Bailian JSONL, Azure LLM CSV, BurstGPT "
        "CSV and ShareGPT-like JSON; the format is found out from the content (docs/traces.md)."
    ),
    no_args_is_help=True,
)

_File = Annotated[Path, typer.Argument(help="The trace; - reads it from stdin.", show_default=False)]


@trace.command()
def stats(
    file: _File,
    trace_format: Format = None,
    limit: Limit = None,
    from_s: FromS = 0.0,
    to_s: ToS = None,
    min_input_tokens: MinInput = 0,
    max_input_tokens: MaxInput = None,
    min_output_tokens: MinOutput = 0,
    max_output_tokens: MaxOutput = None,
    speed: Speed = None,
    rate: Rate = None,
    seed: Seed = 0,
    capacity: Annotated[
        list[int] | None, typer.Option(min=1, help="Cache size in blocks; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Lengths, arrivals, and what prefix caches could reuse.

    Reuse is that of one cache for the whole trace: without a limit, with LRU eviction at several sizes, and at
    best at each size (Belady's MIN, which knows the future). What LRU lacks of the best is what knowing about
    sessions could gain; what the best lacks of no limit only more memory can.

    Example: conductor trace stats conversation_trace.jsonl --capacity 5860 --capacity 50000
    """
    selection = Selection(
        from_s, to_s, min_input_tokens, max_input_tokens, min_output_tokens, max_output_tokens, limit
    )
    chosen, records = _read(file, trace_format, selection, speed, rate, seed)
    capacities = tuple(capacity or CAPACITIES_BLOCKS)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cache sizes", total=len(set(capacities)))
        profile = profile_trace(records, capacities, lambda: progress.advance(task))
    if as_json:
        print(json.dumps(_as_json(file, chosen, profile), indent=2))
    else:
        _print(Console(), file, chosen, profile)


@trace.command()
def convert(
    file: _File,
    trace_format: Format = None,
    limit: Limit = None,
    from_s: FromS = 0.0,
    to_s: ToS = None,
    min_input_tokens: MinInput = 0,
    max_input_tokens: MaxInput = None,
    min_output_tokens: MinOutput = 0,
    max_output_tokens: MaxOutput = None,
    speed: Speed = None,
    rate: Rate = None,
    seed: Seed = 0,
) -> None:
    """Write a trace, or a part of it, as Mooncake JSONL to stdout: what conductor replay reads.

    Smaller blocks are merged into Mooncake's 512 tokens, so that prefixes shared for less are lost.

    Example: conductor trace convert AzureLLMInferenceTrace_conv.csv --limit 1000 --rate 2 > azure.jsonl
    """
    selection = Selection(
        from_s, to_s, min_input_tokens, max_input_tokens, min_output_tokens, max_output_tokens, limit
    )
    _, records = _read(file, trace_format, selection, speed, rate, seed)
    if any(record.block_tokens != MOONCAKE_BLOCK_TOKENS for record in records):
        records = list(in_blocks_of(records, MOONCAKE_BLOCK_TOKENS))
    _write(sorted(records, key=lambda record: record.arrival_s))


@trace.command("generate")
def generate_trace(
    kind: Annotated[
        str,
        typer.Argument(
            help="; ".join(
                f"[bold]{name}[/bold]: {each.description}" for name, each in WORKLOAD_KINDS.items()
            ),
            show_default=False,
        ),
    ],
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    rate: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Requests a second, over the whole trace.")
    ] = 1.0,
    seed: Seed = 0,
) -> None:
    """Write a synthetic trace as Mooncake JSONL, with session_id and delay, to stdout.

    Within a session each prompt begins with the one before it and its answer. Users and tools take the time
    they take: where the longest session lasts longer than REQUESTS / RATE seconds, the rate becomes lower, and
    a line on stderr says so.

    Example: conductor trace generate coding --requests 3000 --rate 2 --seed 1 > coding.jsonl
    """
    console = Console(stderr=True)
    if kind not in WORKLOAD_KINDS:
        fail(console, f"unknown kind {kind!r}; known: {', '.join(WORKLOAD_KINDS)}")
    records = generate(kind, requests, rate, seed)
    span_s = trace_span_s(records)
    if span_s > 1.01 * requests / rate:
        console.print(
            f"the longest session lasts {span_s:,.0f} s, so that the rate is {requests / span_s:.2f} requests a "
            f"second; from about {rate * span_s:,.0f} requests on it can be {rate:g}",
            style="yellow",
        )
    _write(records)


def _read(
    file: Path,
    trace_format: TraceFormat | None,
    selection: Selection,
    speed: float | None,
    rate: float | None,
    seed: int,
) -> tuple[TraceFormat, list[TraceRecord]]:
    console = Console(stderr=True)
    if speed is not None and rate is not None:
        fail(console, "--speed and --rate both scale time: give one of them")
    try:
        with trace_path(str(file)) as path:
            chosen = trace_format or detect_format(path)
            records = list(select(read_trace(path, warn_on(console), chosen), selection))
    except (TraceError, OSError) as error:
        fail(console, cannot_read(error))
    if not records:
        fail(console, f"{file} has no request, or none is left: loosen the filters")
    if speed is not None:
        records = list(faster(records, speed))
    if rate is not None:
        records = at_rate(records, rate, seed)
    return chosen, records


def _write(records: Iterable[TraceRecord]) -> None:
    try:
        sys.stdout.buffer.writelines(map(mooncake_line, records))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the reader has had enough, as `head` has
        sys.stderr.close()


def _as_json(file: Path, trace_format: TraceFormat, profile: TraceProfile) -> dict[str, Any]:
    figures = asdict(profile)
    figures["unlimited"] |= {
        "block_hit_rate": profile.unlimited.block_hit_rate,
        "token_hit_rate": profile.unlimited.token_hit_rate,
    }
    return {
        "file": str(file),
        "format": trace_format.value,
        "has_prefixes": trace_format.has_prefixes,
        "has_arrivals": trace_format.has_arrivals,
        **figures,
    }


def _print(console: Console, file: Path, trace_format: TraceFormat, profile: TraceProfile) -> None:
    arrivals = profile.arrivals
    console.print(
        f"{'stdin' if str(file) == '-' else file.name}: {profile.requests:,} requests, {trace_format.value}",
        highlight=False,
    )
    if arrivals.span_s:
        console.print(
            f"{arrivals.requests_per_s:.2f} requests/s over {arrivals.span_s:,.0f} s, {arrivals.busiest_minute:,} "
            f"in the busiest minute; CV of the gaps {arrivals.gap_cv:.2f} (Poisson 1)",
            highlight=False,
        )
    else:
        console.print("no arrival times; --rate gives some", highlight=False)
    if arrivals.sessions:
        delay = "" if arrivals.median_delay_s is None else f", median delay {arrivals.median_delay_s:.1f} s"
        console.print(
            f"{arrivals.sessions:,} sessions of {arrivals.turns_per_session:.1f} turns{delay}",
            highlight=False,
        )
    lengths = Table("tokens", "mean", *(f"p{p}" for p in profile.inputs.percentiles), "max", "total")
    for name, each in (("input", profile.inputs), ("output", profile.outputs)):
        cells = (each.mean, *each.percentiles.values(), each.longest, each.total)
        lengths.add_row(name, *(f"{value:,.0f}" for value in cells))
    console.print(lengths)
    if not trace_format.has_prefixes:
        console.print("the format does not say what requests share: no reuse to count", highlight=False)
        return
    unlimited = profile.unlimited
    console.print(
        f"{unlimited.unique_blocks:,} blocks of {profile.block_tokens} tokens, "
        f"{unlimited.blocks_used_once / unlimited.unique_blocks:.1%} used once; without a limit a cache hits "
        f"{unlimited.block_hit_rate:.1%} of the blocks, {unlimited.token_hit_rate:.1%} of the input tokens, and "
        f"something in {unlimited.requests_with_hits / unlimited.requests:.1%} of the requests",
        highlight=False,
    )
    reuse = Table("cache, blocks", "tokens", "LRU", "best (Belady)", "LRU of best", title="block hit rate")
    for row in profile.by_capacity:
        share = row.lru_hit_rate / row.belady_hit_rate if row.belady_hit_rate else 1.0
        reuse.add_row(
            *(f"{row.capacity_blocks:,}", f"{row.capacity_tokens:,}"),
            *(f"{row.lru_hit_rate:.3f}", f"{row.belady_hit_rate:.3f}", f"{share:.0%}"),
        )
    console.print(reuse)
