"""`conductor replay`: a recorded trace against a running front door, over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conductor.cli.decision_replay import replay_decisions
from conductor.cli.live_replay import ReplayPlan, RequestResult, replay_trace, report
from simulator.workloads import TraceError, TraceRecord, read_mooncake


def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake JSONL: timestamp, input_length, output_length, hash_ids.")
    ] = None,
    url: Annotated[str, typer.Option(help="The front door.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; default: the first one served.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Send this many times faster than recorded.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer answers.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Give a request up after this long.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")
    ] = False,
    decisions: Annotated[
        Path | None,
        typer.Option(help="Instead of a trace: decisions recorded by conductor serve --record FILE."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="With --decisions: what this policy would have chosen.")
    ] = None,
) -> None:
    """Replay TRACE over HTTP and print TTFT/TBT percentiles, reuse rate and requests per instance.

    Prompts are token ids generated from the trace's block hashes, so equal hashes are equal tokens and the
    cache is exercised as recorded. Times are real seconds: with --speed 10, start the engines ten times faster
    too (conductor serve --emulate 2p2d --emulate-speed 10). Exit code 1 when any request failed.

    With --decisions FILE, recorded decisions are decided again, without any server: exit code 0 when all come
    out the same to the last bit, 1 naming the first difference.
    """
    console = Console(stderr=True)
    if (trace is None) == (decisions is None):
        console.print("give either a TRACE or --decisions FILE", style="red")
        raise typer.Exit(2)
    if policy is not None and decisions is None:
        console.print("--policy belongs to --decisions FILE", style="red")
        raise typer.Exit(2)
    if decisions is not None:
        replay_decisions(decisions, policy, as_json=as_json)
        return
    assert trace is not None
    try:
        requests = list(islice(read_mooncake(trace), limit))
    except (TraceError, OSError) as error:
        console.print(f"[red]cannot read the trace:[/red] {error}")
        raise typer.Exit(2) from None
    if not requests:
        console.print(f"[red]{trace} holds no requests[/red]")
        raise typer.Exit(2)
    plan = ReplayPlan(
        url=url.rstrip("/"),
        model=model or _first_model(console, url.rstrip("/")),
        speed=speed,
        timeout_s=timeout_s,
        max_output_tokens=max_output_tokens,
    )
    started_s = time.monotonic()
    results = _run(console, plan, requests)
    figures = report(results, time.monotonic() - started_s)
    if as_json:
        json.dump(figures, sys.stdout, indent=2)
        print()
    else:
        _print(Console(), figures)
    raise typer.Exit(1 if figures["error_request_count"] else 0)


def _first_model(console: Console, url: str) -> str:
    try:
        response = httpx.get(f"{url}/v1/models", timeout=10)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        console.print(f"[red]no model at {url}/v1/models:[/red] {error}; is `conductor serve` running there?")
        raise typer.Exit(2) from None


def _run(console: Console, plan: ReplayPlan, requests: list[TraceRecord]) -> list[RequestResult]:
    failed = 0
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("replay", total=len(requests), failed=0)

        def on_done(result: RequestResult) -> None:
            nonlocal failed
            failed += result.error is not None
            progress.update(task, advance=1, failed=failed)

        return asyncio.run(replay_trace(plan, requests, on_done))


def _print(console: Console, figures: dict[str, Any]) -> None:
    times = Table("", "mean", "p50", "p90", "p99", title="times, ms")
    for name, label in (
        ("time_to_first_token", "TTFT"),
        ("longest_tenth_token_latency", "TBT (longest 10 % of gaps)"),
        ("inter_token_latency", "ITL (mean gap)"),
        ("request_latency", "end to end"),
        ("ttft_prediction_error", "|predicted - observed TTFT|"),
    ):
        if figures[name]:
            times.add_row(label, *(f"{figures[name][which]:,.1f}" for which in ("avg", "p50", "p90", "p99")))
    console.print(times)
    instances = Table("instance", "prefills", "decodes", title="requests per instance")
    for name in sorted(figures["prefill_requests"].keys() | figures["decode_requests"].keys()):
        prefills, decodes = figures["prefill_requests"].get(name, 0), figures["decode_requests"].get(name, 0)
        instances.add_row(name or "(unknown)", str(prefills), str(decodes))
    console.print(instances)
    console.print(
        f"{figures['request_count']} of {figures['request_count'] + figures['error_request_count']} requests "
        f"succeeded ({figures['retries']} retries) in {figures['benchmark_duration']:.1f} s; "
        f"{figures['prefix_cache_reused_ratio']:.1%} of the prompt tokens and "
        f"{figures['reused_request_fraction']:.1%} of the requests reused cache"
    )
    for error, count in figures["errors"].items():
        console.print(f"[red]{count} x {error}[/red]")
