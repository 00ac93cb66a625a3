"""A simulated run as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A process for each instance, with lanes for requests that queue, prefill and decode there, counters of its gauges,
and its outages; one process for hand-offs, with lanes for each pair of instances; one for the router, which shows
the requests that were not served. Arrows lead from a request's prefill over its hand-off to its decode. Times are
microseconds of the simulation.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

import orjson

from simulator.cluster.results import Outcome, RequestResult, Simulated, Timeline
from simulator.cluster.specification import Outage

ROUTER: Final = 1  # process ids
HAND_OFFS: Final = 2
_FIRST_INSTANCE: Final = 3
_KINDS: Final = ("queue", "prefill", "decode")
_LANES: Final = 10_000  # of a kind, at most, so that thread ids sort by kind

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Slice:
    process: int
    kind: str  # of its lanes
    name: str
    start_us: int
    end_us: int
    result: RequestResult


def chrome_trace(simulated: Simulated, outages: Iterable[Outage] = ()) -> Iterator[str]:
    """The trace as pieces of one JSON object."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    first = True
    for event in _events(simulated, outages):
        yield ("" if first else ",\n") + orjson.dumps(event).decode()
        first = False
    yield "\n]}\n"


def write_chrome_trace(path: Path, simulated: Simulated, outages: Iterable[Outage] = ()) -> None:
    """Compressed where the name ends in ``.gz``; Perfetto opens both. Raises OSError."""
    if path.suffix == ".gz":
        with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
            for piece in chrome_trace(simulated, outages):
                packed.write(piece.encode())
    else:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(chrome_trace(simulated, outages))


def _events(simulated: Simulated, outages: Iterable[Outage]) -> Iterator[Event]:
    results = sorted(simulated.results, key=lambda result: (result.arrival_s, result.number))
    used = (name for r in results for name in (r.prefill_instance, r.decode_instance) if name)
    names = list(dict.fromkeys([*simulated.timeline.instances, *used]))
    processes = {name: _FIRST_INSTANCE + number for number, name in enumerate(names)}
    yield from _process(ROUTER, "router", 0)
    yield from _process(HAND_OFFS, "hand-offs", len(names) + 1)
    for order, name in enumerate(names, 1):
        yield from _process(processes[name], name, order)
    slices = [piece for result in results for piece in _slices(result, processes)]
    yield from _placed_slices(slices)
    yield from (_unserved(result) for result in results if result.outcome is not Outcome.FINISHED)
    yield from _counters(simulated.timeline, processes)
    for outage in outages:
        if outage.instance in processes:
            yield from _outage(outage, processes[outage.instance])


def _slices(result: RequestResult, processes: dict[str, int]) -> Iterator[_Slice]:
    """What became of a request, one after the other; kinds that a run does not tell apart run into the next."""
    if result.outcome is not Outcome.FINISHED:
        return
    prefill, decode = processes[result.prefill_instance], processes[result.decode_instance]
    known = [each for each in (result.prefilled_s, result.ttft_s) if isfinite(each)]
    prefilled_s = known[0]
    received_s = result.received_s if isfinite(result.received_s) else prefilled_s
    moments = [0.0, result.queue_s, prefilled_s, max(received_s, prefilled_s), result.e2e_s]
    arrived, began, prefilled, received, ended = (round((result.arrival_s + s) * 1e6) for s in moments)
    title = f"request {result.number}"
    yield _Slice(prefill, "queue", title, arrived, began, result)
    yield _Slice(prefill, "prefill", title, began, prefilled, result)
    if prefill != decode:
        pair = f"{result.prefill_instance} to {result.decode_instance}"
        yield _Slice(HAND_OFFS, pair, title, prefilled, received, result)
    yield _Slice(decode, "decode", title, received, ended, result)


def _placed_slices(slices: Sequence[_Slice]) -> Iterator[Event]:
    """Slices in lanes in which none overlaps another, and arrows between those of one request."""
    pairs = sorted({each.kind for each in slices if each.process == HAND_OFFS})
    lanes: dict[tuple[int, str], _Lanes] = {}
    for each in sorted(slices, key=lambda s: (s.start_us, s.end_us, s.result.number, _order(s.kind))):
        key = (each.process, each.kind)
        kind = pairs.index(each.kind) if each.process == HAND_OFFS else _KINDS.index(each.kind)
        if key not in lanes:
            lanes[key] = _Lanes()
        lane, new = lanes[key].take(each.start_us, each.end_us)
        thread = 1 + kind * _LANES + lane
        if new:
            yield _meta(each.process, thread, "thread_name", name=f"{each.kind} {lane + 1}")
            yield _meta(each.process, thread, "thread_sort_index", sort_index=thread)
        event = {
            "ph": "X",
            "pid": each.process,
            "tid": thread,
            "cat": "hand-off" if each.process == HAND_OFFS else each.kind,
            "name": each.name,
            "ts": each.start_us,
            "dur": each.end_us - each.start_us,
            "args": _facts(each.result),
        }
        yield event
        yield from _arrow(event, each.result)


def _order(kind: str) -> int:
    """Of slices that start at once; hand-offs lie between prefill and decode."""
    return {"queue": 0, "prefill": 1, "decode": 3}.get(kind, 2)


class _Lanes:
    """The lane that was free first is taken again; a new one where none is."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []  # heap of (end, lane)
        self._count = 0

    def take(self, start_us: int, end_us: int) -> tuple[int, bool]:
        """Lane, and whether it is a new one. Starts must not go back."""
        while self._busy and self._busy[0][0] <= start_us:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        new = not self._free
        lane = self._count if new else heapq.heappop(self._free)
        self._count += new
        heapq.heappush(self._busy, (end_us, lane))
        return lane, new


def _arrow(event: Event, result: RequestResult) -> Iterator[Event]:
    """From prefill (``s``) over the hand-off (``t``) to decode (``f``), for requests that change instances."""
    if result.prefill_instance == result.decode_instance or event["cat"] == "queue":
        return
    step = {"prefill": "s", "hand-off": "t", "decode": "f"}[event["cat"]]
    at_us = event["ts"] + (max(event["dur"] - 1, 0) if step == "s" else 0)  # its end is outside of a slice
    arrow: Event = {
        "ph": step,
        "pid": event["pid"],
        "tid": event["tid"],
        "cat": "hand-off",
        "name": "hand-off",
        "id": result.number,
        "ts": at_us,
    }
    if step == "f":
        arrow["bp"] = "e"  # bound to the slice around it
    yield arrow


def _facts(result: RequestResult) -> dict[str, Any]:
    return {
        "request": result.number,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "cached_tokens": result.cached_tokens,
        "ttft_ms": round(result.ttft_s * 1e3, 3),
        "predicted_ttft_ms": (
            round(result.predicted_ttft_s * 1e3, 3) if isfinite(result.predicted_ttft_s) else None
        ),
        "tbt_ms": round(result.tbt_s * 1e3, 3),
        "preemptions": result.preemptions,
        "retries": result.retries,
    }


def _unserved(result: RequestResult) -> Event:
    return {
        "ph": "i",
        "s": "p",
        "pid": ROUTER,
        "tid": 1,
        "cat": "unserved",
        "name": f"request {result.number} {result.outcome.value}",
        "ts": round(result.arrival_s * 1e6),
        "args": {
            "request": result.number,
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": result.output_tokens,
        },
    }


def _counters(timeline: Timeline, processes: dict[str, int]) -> Iterator[Event]:
    """Only where a gauge changes: between, it stays as it is."""
    gauges: tuple[tuple[str, str, list[list[Any]]], ...] = (
        ("running", "requests", timeline.running.tolist()),
        ("waiting", "requests", timeline.waiting.tolist()),
        ("KV memory", "percent", (timeline.kv_usage.astype(float) * 100).round(2).tolist()),
    )
    at_us = [round(at_s * 1e6) for at_s in timeline.at_s.tolist()]
    for name, unit, rows in gauges:
        for column, instance in enumerate(timeline.instances):
            before = None
            for look_us, row in zip(at_us, rows, strict=True):
                if row[column] != before:
                    before = row[column]
                    process = processes[instance]
                    yield {"ph": "C", "pid": process, "name": name, "ts": look_us, "args": {unit: before}}


def _outage(outage: Outage, process: int) -> Iterator[Event]:
    thread = len(_KINDS) * _LANES + 1
    yield _meta(process, thread, "thread_name", name="outage")
    yield _meta(process, thread, "thread_sort_index", sort_index=0)
    start_us = round(outage.at_s * 1e6)
    length_us = round(outage.for_s * 1e6) if isfinite(outage.for_s) else 0
    yield {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "cat": "outage",
        "name": "outage",
        "ts": start_us,
        "dur": length_us,
    }


def _process(process: int, name: str, order: int) -> Iterator[Event]:
    yield _meta(process, 0, "process_name", name=name)
    yield _meta(process, 0, "process_sort_index", sort_index=order)


def _meta(process: int, thread: int, kind: str, **args: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": args}
