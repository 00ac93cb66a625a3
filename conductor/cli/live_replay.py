"""Sends a trace's requests to a running front door on the trace's clock, and measures what a client sees."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from conductor.placement import Objectives
from simulator.workloads import TraceRecord, prompt_tokens

if TYPE_CHECKING:
    from simulator.report import Measured

_USAGE_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)":\s*(\d+)')
_TAIL_BYTES = 2048


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How a trace is sent: ``speed`` times faster than recorded, to one model of one front door."""

    url: str
    model: str
    speed: float
    timeout_s: float
    max_output_tokens: int | None
    headers: Mapping[str, str] = field(default_factory=dict)  # with the key, where keys are asked for


@dataclass(slots=True)
class RequestResult:
    """What the client saw of one request; times in seconds since it was sent; ``sent_s`` since the start."""

    sent_s: float = 0.0
    error: str | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    overlap_tokens: int = 0
    predicted_ttft_s: float | None = None
    prefill_instance: str = ""
    decode_instance: str = ""
    attempts: int = 1

    @property
    def tbt_s(self) -> float | None:
        """Mean of the longest tenth of the token gaps (as the Mooncake paper defines TBT)."""
        if not self.gaps_s:
            return None
        longest = sorted(self.gaps_s, reverse=True)[: max(1, len(self.gaps_s) // 10)]
        return sum(longest) / len(longest)

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None


async def replay_trace(
    plan: ReplayPlan, requests: Sequence[TraceRecord], on_done: Callable[[RequestResult], None]
) -> list[RequestResult]:
    """Send every request at its time; the results are in trace order. ``on_done`` is called as each ends."""
    timeout = aiohttp.ClientTimeout(total=plan.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"content-type": "application/json", **plan.headers}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        started_s = time.monotonic()
        first_s = requests[0].arrival_s if requests else 0.0

        async def at_its_time(request: TraceRecord) -> RequestResult:
            due_s = started_s + (request.arrival_s - first_s) / plan.speed
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            sent_s = time.monotonic() - started_s
            result = await _send(session, plan, request)
            result.sent_s = sent_s
            on_done(result)
            return result

        return await asyncio.gather(*(at_its_time(request) for request in requests))


async def _send(session: aiohttp.ClientSession, plan: ReplayPlan, request: TraceRecord) -> RequestResult:
    output_tokens = max(1, request.output_tokens)
    if plan.max_output_tokens is not None:
        output_tokens = min(output_tokens, plan.max_output_tokens)
    body = orjson.dumps(
        {
            "model": plan.model,
            "prompt": prompt_tokens(request),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
    result = RequestResult()
    sent_s = time.monotonic()
    try:
        async with session.post(f"{plan.url}/v1/completions", data=body) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return result
            _read_headers(result, response.headers)
            await _read_stream(result, response, sent_s)
    except (aiohttp.ClientError, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}".rstrip(": ")
    result.duration_s = time.monotonic() - sent_s
    return result


def _read_headers(result: RequestResult, headers: Any) -> None:
    result.prefill_instance = headers.get("x-conductor-prefill-instance", "")
    result.decode_instance = headers.get("x-conductor-decode-instance", "")
    result.overlap_tokens = int(headers.get("x-conductor-overlap-tokens", 0))
    result.attempts = int(headers.get("x-conductor-attempts", 1))
    predicted_ms = headers.get("x-conductor-predicted-ttft-ms")
    result.predicted_ttft_s = float(predicted_ms) / 1e3 if predicted_ms else None


async def _read_stream(result: RequestResult, response: aiohttp.ClientResponse, sent_s: float) -> None:
    tail = b""
    last_s = None
    async for chunk in response.content.iter_any():
        now_s = time.monotonic()
        events = chunk.count(b"data: {")
        if events and last_s is None:
            result.ttft_s = now_s - sent_s
            events -= 1
            last_s = now_s
        if events and last_s is not None:
            result.gaps_s.extend([now_s - last_s] + [0.0] * (events - 1))
            last_s = now_s
        tail = (tail + chunk)[-_TAIL_BYTES:]
    if b'"error"' in tail:
        result.error = "the stream broke: " + tail[tail.index(b'"error"') :][:160].decode(errors="replace")
    elif not tail.rstrip().endswith(b"data: [DONE]"):
        result.error = "the stream ended without data: [DONE]"
    usage = {name: int(value) for name, value in _USAGE_FIELD.findall(tail)}
    result.prompt_tokens = usage.get(b"prompt_tokens", 0)
    result.cached_tokens = usage.get(b"cached_tokens", 0)
    result.output_tokens = usage.get(b"completion_tokens", 0)
    # The last event carries usage and no token.
    if result.gaps_s:
        result.gaps_s.pop()


def report(
    results: Sequence[RequestResult], wall_s: float, objectives: Objectives | None = None
) -> dict[str, Any]:
    """The replay in figures: those of `simulator.report.summary`, and what only a client over HTTP can tell."""
    from simulator.report import summary  # takes a second, which the requests should not wait for

    run = measured(results, wall_s)
    prefills, decodes = Counter(run.prefill_instances), Counter(run.decode_instances)
    return {
        **summary(run, Objectives() if objectives is None else objectives),
        "reused_request_fraction": float((run.cached_tokens > 0).mean()) if run.served else 0.0,
        "prefill_requests": dict(sorted(prefills.items())),
        "decode_requests": dict(sorted(decodes.items())),
        "prefill_load_cv": _variation(prefills.values()),
        "decode_load_cv": _variation(decodes.values()),
        "errors": dict(Counter(r.error for r in results if r.error is not None).most_common(5)),
    }


def measured(results: Sequence[RequestResult], wall_s: float) -> Measured:
    """A replay as columns; queues, tiers and gauges are the engines' own and not seen from here."""
    from simulator.cluster import Outcome
    from simulator.report import Measured

    sent = sorted(results, key=lambda result: result.sent_s)
    ok = [result for result in sent if result.error is None]
    rejected = sum(r.error is not None and r.error.startswith("HTTP 429") for r in results)
    unknown = np.full(len(ok), np.nan)
    return Measured(
        outcomes={
            Outcome.FINISHED.value: len(ok),
            Outcome.REJECTED.value: rejected,
            Outcome.REFUSED.value: 0,
            Outcome.FAILED.value: len(results) - len(ok) - rejected,
        },
        duration_s=wall_s,
        arrival_span_s=sent[-1].sent_s - sent[0].sent_s if sent else 0.0,
        arrival_s=_column(r.sent_s for r in ok),
        prompt_tokens=_column(r.prompt_tokens for r in ok),
        output_tokens=_column(r.output_tokens for r in ok),
        cached_tokens=_column(r.cached_tokens for r in ok),
        ttft_s=_column(r.ttft_s for r in ok),
        tbt_s=_column(r.tbt_s for r in ok),
        itl_s=_column(r.itl_s for r in ok),
        e2e_s=_column(r.duration_s for r in ok),
        predicted_ttft_s=_column(r.predicted_ttft_s for r in ok),
        queue_s=unknown,
        prefilled_s=unknown,
        received_s=unknown,
        prefill_instances=tuple(r.prefill_instance for r in ok),
        decode_instances=tuple(r.decode_instance for r in ok),
        retries=sum(r.attempts - 1 for r in results),
    )


def _column(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _variation(counts: Iterable[int]) -> float | None:
    values = np.array(list(counts), dtype=float)
    return float(values.std() / values.mean()) if len(values) and values.mean() else None
