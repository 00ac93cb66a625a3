"""`conductor replay TRACE --url URL`: requests over HTTP to a running front door."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from conductor.cli.json_output import write_json
from conductor.cli.live_replay import ReplayPlan, RequestResult, replay_trace, report
from conductor.cli.progress import progress_bar
from conductor.cli.trace_options import fail
from conductor.placement import Objectives
from simulator.workloads import TraceRecord


def replay_live(
    console: Console,
    plan: ReplayPlan,
    requests: list[TraceRecord],
    objectives: Objectives,
    json_path: str | None,
) -> None:
    """Exit code 1 when any request failed, 130 when interrupted."""
    started_s = time.monotonic()
    try:
        results = _run(console, plan, requests)
    except KeyboardInterrupt:
        console.print("interrupted: the replay has no results", style="red")
        raise typer.Exit(130) from None
    figures = report(results, time.monotonic() - started_s, objectives)
    if json_path is not None:
        write_json(json_path, figures)
    if json_path != "-":
        _print(Console(), figures)
    raise typer.Exit(1 if figures["error_request_count"] else 0)


def served_model(console: Console, url: str, wanted: str | None, headers: Mapping[str, str]) -> str:
    """``wanted``, else the first model that is served there; exit code 2 when it is not, or there is none."""
    try:
        response = httpx.get(f"{url}/v1/models", timeout=10, headers=dict(headers), trust_env=False)
        if response.status_code in (401, 403):
            fail(console, f"{url} takes an API key: --token, or CONDUCTOR_API_KEY")
        response.raise_for_status()
        served = [str(entry["id"]) for entry in response.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        fail(console, f"no model at {url}/v1/models: {error}; is `conductor serve` running there?")
    if not served:
        fail(console, f"{url} serves no model now")
    if wanted is not None and wanted not in served:
        fail(console, f"the model {wanted!r} is not served at {url}; served: {', '.join(served)}")
    return wanted or served[0]


def _run(console: Console, plan: ReplayPlan, requests: list[TraceRecord]) -> list[RequestResult]:
    failed = 0
    with progress_bar(console, "requests", transient=False) as progress:
        task = progress.add_task("replaying", total=len(requests), note="0 failed")

        def on_done(result: RequestResult) -> None:
            nonlocal failed
            failed += result.error is not None
            progress.update(task, advance=1, note=f"{failed} failed")

        results = asyncio.run(unless_interrupted(replay_trace(plan, requests, on_done)))
    if results is None:
        raise KeyboardInterrupt
    return results


async def unless_interrupted(
    work: Coroutine[Any, Any, list[RequestResult]],
) -> list[RequestResult] | None:
    """None after Ctrl-C, which may come again while thousands of requests are being dropped."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


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
