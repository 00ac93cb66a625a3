"""A cluster in virtual time: arrivals, the scheduler's decisions, engines and links, as discrete events.

Nothing is decided here: the scheduler is the one that serves real traffic, and is told of progress, of what engines
cache and of their gauges as the router and the event streams would tell it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_index import Holder, Namespace
from conductor.cluster import ReportedLoad
from conductor.dispatcher import Dispatcher
from conductor.placement import Held, Placement, PlacementError, PlacementRequest, RejectedError, Usage
from conductor.scheduler import Scheduler
from simulator.cluster.engine import Leg, Progress, SimulatedEngine, Work
from simulator.cluster.hand_offs import HandOffs
from simulator.cluster.kv_memory import IndexListener, KvMemory
from simulator.cluster.layout import MODEL
from simulator.cluster.specification import ClusterSpec
from simulator.cluster.workload import BLOCK_TOKENS, Request

POLL_S: Final = 1.0  # between two looks at engines' gauges, as `conductor serve` does by default
_NO_TOKENS: Final = np.empty(0, np.uint32)


class Outcome(StrEnum):
    FINISHED = "finished"
    REJECTED = "rejected"  # by admission
    REFUSED = "refused"  # no instance can take it: it is too long for all of them
    FAILED = "failed"  # instances died under it as often as it was tried


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one request; times after ``arrival_s`` are from there on, and infinite if not finished.

    ``queue_s`` is when its prefill began (loads from slower tiers included), ``prefilled_s`` when that ended,
    ``received_s`` when its KV cache was where it decodes. ``tbt_s`` is the mean of its longest tenth of token
    gaps, ``itl_s`` of all; 0 for answers of one token. ``cached_tokens`` were reused at prefill; those of them
    that were not on the instance's device are counted by where they came from.
    """

    number: int
    outcome: Outcome
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    queue_s: float = inf
    ttft_s: float = inf
    tbt_s: float = inf
    itl_s: float = inf
    e2e_s: float = inf
    prefill_instance: str = ""
    decode_instance: str = ""
    predicted_ttft_s: float = inf
    prefilled_s: float = inf
    received_s: float = inf
    host_tokens: int = 0
    disk_tokens: int = 0
    pod_tokens: int = 0
    remote_tokens: int = 0
    peer_tokens: int = 0
    preemptions: int = 0
    retries: int = 0  # after instances died


@dataclass(frozen=True, slots=True)
class Timeline:
    """Gauges of every instance, once a second: arrays of [look, instance]."""

    at_s: NDArray[np.float64]  # [look]
    instances: tuple[str, ...]
    running: NDArray[np.int32]
    waiting: NDArray[np.int32]
    kv_usage: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Simulated:
    """All requests in the order of their end, and what the engines did."""

    results: list[RequestResult]
    end_s: float
    busy_s: dict[str, float]  # of every instance
    load_variation: float  # of requests per instance: standard deviation by mean, mean of all polls
    engine_runs: int
    timeline: Timeline


@dataclass(slots=True)
class _UnderWay:
    request: Request
    placement: Placement
    prefill: Work
    decode: Work | None = None  # of a pair, once its prefill has ended


class ClusterSimulation:
    """One trace through the scheduler that `make_scheduler` made of the same cluster and ``block_tokens``.

    A ``dispatcher`` over that scheduler may hold requests back; without one they are placed as they arrive.
    ``step_by_step``: as `SimulatedEngine`. Raises ValueError for an instance that does not hold a block.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: ClusterSpec,
        dispatcher: Dispatcher | None = None,
        *,
        block_tokens: int = BLOCK_TOKENS,
        step_by_step: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._block_tokens = block_tokens
        self._dispatcher = Dispatcher(scheduler) if dispatcher is None else dispatcher
        self._held: dict[int, Request] = {}  # by ticket
        self.engines: dict[str, SimulatedEngine] = {}
        namespace = Namespace(MODEL, block_tokens)
        for spec in cluster.instances:
            listener = IndexListener(scheduler.index, Holder(spec.name, 0), namespace)
            self.engines[spec.name] = SimulatedEngine(
                spec.instance_class,
                KvMemory(spec.kv_tokens // block_tokens * block_tokens, block_tokens, listener),
                sequences=spec.sequences,
                step_by_step=step_by_step,
            )
        self._groups = _by_role(cluster)
        self._hand_offs = HandOffs({spec.name: spec.instance_class.nic for spec in cluster.instances})
        self._ends: list[tuple[float, str]] = []  # heap; an entry that is not the engine's end is stale
        self._touched: dict[str, None] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._results: list[RequestResult] = []
        self._next_poll_s = 0.0
        self._variations: list[float] = []
        self._looks: list[tuple[float, list[int], list[int], list[float]]] = []

    def run(self, requests: Iterable[Request], on_end: Callable[[], None] = lambda: None) -> Simulated:
        """Simulate until every request has ended; ``on_end`` is called for each. To be called once."""
        arrivals = iter(requests)
        arrival = next(arrivals, None)
        now_s = 0.0
        told = 0
        while True:
            next_s = self._next_event_s()
            if arrival is not None and arrival.arrival_s < next_s:
                next_s = arrival.arrival_s
            if self._held:
                wakeup_s = self._dispatcher.next_wakeup_s(now_s)
                next_s = next_s if wakeup_s is None else min(next_s, max(wakeup_s, now_s))
            if next_s == inf:
                break
            now_s = next_s
            if now_s >= self._next_poll_s:
                self._poll(now_s)
            self._progress(now_s)
            while arrival is not None and arrival.arrival_s <= now_s:
                self._arrive(arrival, now_s)
                arrival = next(arrivals, None)
            if self._held:
                self._release(now_s)
            self._begin(now_s)
            for _ in range(len(self._results) - told):
                on_end()
            told = len(self._results)
        assert not self._under_way and not self._held, "some requests never ended"
        return Simulated(
            results=self._results,
            end_s=now_s,
            busy_s={name: engine.busy_s for name, engine in self.engines.items()},
            load_variation=float(np.mean(self._variations)) if self._variations else 0.0,
            engine_runs=sum(engine.runs for engine in self.engines.values()),
            timeline=Timeline(
                at_s=np.array([look[0] for look in self._looks]),
                instances=tuple(self.engines),
                running=np.array([look[1] for look in self._looks], np.int32),
                waiting=np.array([look[2] for look in self._looks], np.int32),
                kv_usage=np.array([look[3] for look in self._looks], np.float32),
            ),
        )

    def _next_event_s(self) -> float:
        while self._ends and self.engines[self._ends[0][1]].end_s != self._ends[0][0]:
            heapq.heappop(self._ends)
        steps_s = self._ends[0][0] if self._ends else inf
        return min(steps_s, self._hand_offs.next_end()[0]) if len(self._hand_offs) else steps_s

    def _progress(self, now_s: float) -> None:
        """Whatever ends now."""
        while self._ends and self._ends[0][0] <= now_s:
            end_s, name = heapq.heappop(self._ends)
            if self.engines[name].end_s == end_s:
                self._told(self.engines[name].finish(), now_s)
                self._touched[name] = None
        while len(self._hand_offs):
            end_s, number = self._hand_offs.next_end()
            if end_s > now_s:
                break
            assert isinstance(number, int)
            self._hand_offs.end(number, now_s)
            self._arrived(self._under_way[number])

    def _begin(self, now_s: float) -> None:
        """Let engines go on where something changed, once all that happens now has happened."""
        while self._touched:
            name, _ = self._touched.popitem()
            engine = self.engines[name]
            before_s = engine.end_s
            end_s = engine.begin(now_s)
            if end_s != before_s and end_s < inf:
                heapq.heappush(self._ends, (end_s, name))
            for work in engine.take_fetches():
                self._fetch(self._under_way[work.number], now_s)

    def _arrive(self, request: Request, now_s: float) -> None:
        asked = PlacementRequest(
            str(request.number),
            MODEL,
            _NO_TOKENS,
            request.prompt_tokens,
            hashes=request.hashes,
            hashes_block_size=self._block_tokens,
        )
        try:
            answer = self._dispatcher.arrive(asked, now_s)
        except PlacementError as error:
            self._refused(request, error)
            return
        if isinstance(answer, Held):
            self._held[answer.ticket] = request
        else:
            self._placed(request, answer, now_s)

    def _release(self, now_s: float) -> None:
        """Those whose turn it is, of the requests held."""
        for released in self._dispatcher.release(now_s):
            request, outcome = self._held.pop(released.ticket), released.outcome
            if isinstance(outcome, Placement):
                self._placed(request, outcome, now_s)
            else:
                self._refused(request, outcome)

    def _placed(self, request: Request, placement: Placement, now_s: float) -> None:
        prefill, decode = placement.prefill.instance_id, placement.decode.instance_id
        whole_tokens = request.prompt_tokens + request.output_tokens
        if not self.engines[decode].fits(whole_tokens) or not self.engines[prefill].fits(
            request.prompt_tokens
        ):
            self.scheduler.cancelled(placement.placement_id, now_s)
            self._lost(request, Outcome.REFUSED)
            return
        work = _work(request, Leg.PREFILL if placement.disaggregated else Leg.WHOLE)
        self._under_way[request.number] = _UnderWay(request, placement, work)
        self.engines[prefill].submit(work)
        self._touched[prefill] = None

    def _told(self, progress: Progress, now_s: float) -> None:
        for work in progress.prefilled:
            self._prefilled(self._under_way[work.number], now_s)
        for work in progress.first_tokens:
            self.scheduler.first_token(self._under_way[work.number].placement.placement_id, now_s)
        for work in progress.finished:
            self._finished(self._under_way.pop(work.number), work, now_s)

    def _prefilled(self, under_way: _UnderWay, now_s: float) -> None:
        placement = under_way.placement
        try:
            self.scheduler.prefill_finished(placement.placement_id, now_s)
        except RejectedError:
            self.engines[placement.prefill.instance_id].handed_off(under_way.prefill)
            del self._under_way[under_way.request.number]
            self._lost(under_way.request, Outcome.REJECTED)
            return
        under_way.decode = _work(under_way.request, Leg.DECODE)
        self.engines[placement.decode.instance_id].submit(under_way.decode)
        self._touched[placement.decode.instance_id] = None

    def _fetch(self, under_way: _UnderWay, now_s: float) -> None:
        assert under_way.decode is not None
        lacking = under_way.request.prompt_tokens - under_way.decode.cached_tokens
        giver, taker = under_way.placement.prefill.instance_id, under_way.placement.decode.instance_id
        kv_bytes = lacking * self.engines[taker].instance_class.kv_bytes_per_token
        self._hand_offs.start(under_way.request.number, giver, taker, kv_bytes, now_s)

    def _arrived(self, under_way: _UnderWay) -> None:
        assert under_way.decode is not None
        giver, taker = under_way.placement.prefill.instance_id, under_way.placement.decode.instance_id
        self.engines[giver].handed_off(under_way.prefill)
        self.engines[taker].received(under_way.decode)
        self._touched[giver] = self._touched[taker] = None

    def _finished(self, under_way: _UnderWay, last: Work, now_s: float) -> None:
        request, placement, first = under_way.request, under_way.placement, under_way.prefill
        usage = Usage(request.prompt_tokens, request.output_tokens, first.cached_tokens)
        self.scheduler.finished(placement.placement_id, now_s, usage)
        self._results.append(
            RequestResult(
                number=request.number,
                outcome=Outcome.FINISHED,
                arrival_s=request.arrival_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                cached_tokens=first.cached_tokens,
                queue_s=first.began_s - request.arrival_s,
                ttft_s=last.first_token_s - request.arrival_s,
                tbt_s=last.tbt_s,
                itl_s=last.itl_s,
                e2e_s=now_s - request.arrival_s,
                prefill_instance=placement.prefill.instance_id,
                decode_instance=placement.decode.instance_id,
                predicted_ttft_s=placement.predicted_ttft_s,
            )
        )

    def _refused(self, request: Request, error: PlacementError) -> None:
        self._lost(request, Outcome.REJECTED if isinstance(error, RejectedError) else Outcome.REFUSED)

    def _lost(self, request: Request, outcome: Outcome) -> None:
        self._results.append(
            RequestResult(
                request.number, outcome, request.arrival_s, request.prompt_tokens, request.output_tokens
            )
        )

    def _poll(self, now_s: float) -> None:
        """Report gauges as of the last poll time that has passed: nothing has changed since the last event."""
        at_s = now_s // POLL_S * POLL_S
        self._next_poll_s = at_s + POLL_S
        for name, engine in self.engines.items():
            load = ReportedLoad(engine.running, engine.waiting, engine.memory.usage, at_s)
            self.scheduler.report_load(name, 0, load)
        engines = self.engines.values()
        self._looks.append(
            (
                at_s,
                [e.running for e in engines],
                [e.waiting for e in engines],
                [e.memory.usage for e in engines],
            )
        )
        for names in self._groups:
            loads = [self.engines[name].running + self.engines[name].waiting for name in names]
            if any(loads):
                self._variations.append(float(np.std(loads) / np.mean(loads)))


def _work(request: Request, leg: Leg) -> Work:
    return Work(
        request.number,
        leg,
        request.prompt_tokens,
        request.output_tokens,
        request.hashes,
        request.hashes.tolist(),
    )


def _by_role(cluster: ClusterSpec) -> list[list[str]]:
    roles: dict[str, list[str]] = {}
    for spec in cluster.instances:
        roles.setdefault(spec.role, []).append(spec.name)
    return list(roles.values())
