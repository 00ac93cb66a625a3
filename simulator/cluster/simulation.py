"""A cluster in virtual time: arrivals, the scheduler's decisions, engines and links, as discrete events.

Nothing is decided here: the scheduler is the one that serves real traffic, and is told of progress, of what engines
cache and of their gauges as the router and the event streams would tell it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

import msgspec
import numpy as np

from cache_index import Holder, Namespace, Tier
from conductor.costs import POOL_TIERS
from conductor.dispatcher import Dispatcher
from conductor.link_budgets import LinkBudget
from conductor.placement import (
    FailureKind,
    Held,
    InstanceFailure,
    Placement,
    PlacementError,
    PlacementRequest,
    RejectedError,
    Usage,
)
from conductor.rank import ReportedLoad
from conductor.scheduler import Scheduler
from conductor.tier_planner_config import TierPlannerConfig
from simulator.cluster.engine_state import Store, stores_of
from simulator.cluster.engines import Engines, Load, flat_hashes
from simulator.cluster.kernels import layout as k
from simulator.cluster.kernels.arrays import Floats
from simulator.cluster.layout import MODEL
from simulator.cluster.looks import Looks
from simulator.cluster.results import Outcome, RequestResult, Simulated
from simulator.cluster.specification import ClusterSpec, Outage
from simulator.cluster.tier_actions import TierActions
from simulator.cluster.workload import BLOCK_TOKENS, Request

POLL_S: Final = 1.0  # between two looks at engines' gauges, as `conductor serve` does by default
ATTEMPTS: Final = 3  # at a request, when instances die under it
_NO_TOKENS: Final = np.empty(0, np.uint32)
_NO_HASHES: Final = np.empty(0, np.uint64)


class _UnderWay(msgspec.Struct):
    request: Request
    placement: Placement
    work: int  # row of its first leg
    retries: int
    speaks: bool = False


class ClusterSimulation:
    """One trace through the scheduler that `make_scheduler` made of the same cluster and ``block_tokens``.

    A ``dispatcher`` over that scheduler may hold requests back; without one they are placed as they arrive. A
    ``tier_planner`` moves, keeps and drops what slower tiers and pools hold, within ``action_budget`` of each link.
    ``step_by_step`` never takes two steps of an engine at once: slow, and the oracle of the closed form.
    Raises ValueError for an instance, a tier of one or a pool that does not hold a block.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: ClusterSpec,
        dispatcher: Dispatcher | None = None,
        *,
        block_tokens: int = BLOCK_TOKENS,
        step_by_step: bool = False,
        tier_planner: TierPlannerConfig | None = None,
        action_budget: LinkBudget | None = None,
    ) -> None:
        for store in stores_of(cluster):
            if store.capacity_tokens < block_tokens:
                raise ValueError(
                    f"{_name_of(cluster, store)}: {store.capacity_tokens} tokens do not hold a block of "
                    f"{block_tokens}"
                )
        self.scheduler = scheduler
        self._cluster = cluster
        self._block_tokens = block_tokens
        self._step_by_step = step_by_step
        self._dispatcher = Dispatcher(scheduler) if dispatcher is None else dispatcher
        self._numbers = {spec.name: number for number, spec in enumerate(cluster.instances)}
        self._held: dict[int, tuple[Request, int]] = {}  # by ticket, with the retries so far
        self._under_way: dict[int, _UnderWay] = {}  # by request number
        self._results: list[RequestResult] = []
        self._outages = _changes_of(cluster.outages)
        self._next_poll_s = 0.0
        self._looks = Looks(tuple(self._numbers))
        self._untold: tuple[float, Floats] | None = None  # the latest gauges, of when, and not yet told
        self._tier_planner = tier_planner
        self._action_budget = action_budget or LinkBudget()
        self._tiers: TierActions | None = None

    def run(self, requests: Iterable[Request], on_end: Callable[[], None] = lambda: None) -> Simulated:
        """Simulate until every request has ended; ``on_end`` is called for each. To be called once.

        Python's collector rests meanwhile: nothing here makes cycles, and it would visit all requests again.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._run(requests, on_end)
        finally:
            if collects:
                gc.enable()

    def _run(self, requests: Iterable[Request], on_end: Callable[[], None]) -> Simulated:
        workload = list(requests)
        if not self._cluster.prefix_caching:
            workload = [msgspec.structs.replace(request, hashes=_NO_HASHES) for request in workload]
        hashes, starts = flat_hashes([request.hashes for request in workload])
        self._first_hash = {request.number: start for request, start in zip(workload, starts, strict=True)}
        self.engines = Engines(
            self._cluster,
            hashes,
            block_tokens=self._block_tokens,
            longest_output_tokens=max((request.output_tokens for request in workload), default=0),
            step_by_step=self._step_by_step,
        )
        self._kv_tokens: list[int] = self.engines.kv_tokens.tolist()  # whole blocks
        self._holders = _holders_of(self._cluster, self.engines)
        self._namespace = Namespace(MODEL, self._block_tokens)
        if self._tier_planner is not None:
            self._tiers = TierActions(
                self._tier_planner,
                self._action_budget,
                self._cluster,
                self.scheduler,
                self.engines,
                self._holders,
                workload,
                self._first_hash,
            )
            self.scheduler.on_placed = self._tiers.placed
        arrivals = iter(workload)
        arrival = next(arrivals, None)
        now_s = 0.0
        told = 0
        while arrival is not None or self._under_way or self._held:
            until_s = self._next_time_s(now_s)
            if arrival is not None and arrival.arrival_s < until_s:
                until_s = max(arrival.arrival_s, now_s)
            # Where nobody waits and nothing is moved, answers that begin and end change nothing for the engines.
            patient = arrival is not None and not self._held and self._tiers is None
            now_s, notices = self.engines.advance(now_s, until_s, patient=patient)
            if now_s >= self._next_poll_s:
                self._poll(now_s)
            for notice in notices:
                self._told(notice, notice[k.N_AT_S])
            while self._outages and self._outages[0][0] <= now_s:
                self._change(*self._outages.pop(0))
            if arrival is not None and arrival.arrival_s <= now_s:
                self._tell_scheduler()
                while arrival is not None and arrival.arrival_s <= now_s:
                    self._ask(arrival, placement_request(arrival, self._block_tokens), 0, now_s)
                    arrival = next(arrivals, None)
            if self._held:
                self._tell_scheduler()
                self._release(now_s)
            if self._tiers is not None and now_s >= self._tiers.next_s:
                self._tell_scheduler()
                self._tiers.plan(now_s)
            for _ in range(len(self._results) - told):
                on_end()
            told = len(self._results)
        self._tell_scheduler()
        busy_s = self.engines.busy_s.tolist()
        return Simulated(
            results=self._results,
            end_s=now_s,
            busy_s={spec.name: busy_s[number] for number, spec in enumerate(self._cluster.instances)},
            load_variation=self._looks.load_variation(_by_role(self._cluster)),
            engine_runs=self.engines.runs,
            computed_tokens=self.engines.computed_tokens,
            timeline=self._looks.timeline(self.engines.kv_tokens),
            tier_actions=self._tiers.done() if self._tiers is not None else {},
            tier_traffic=self.engines.tier_traffic(),
        )

    def _next_time_s(self, now_s: float) -> float:
        """Until when nothing from outside the engines happens, arrivals apart."""
        next_s = self._next_poll_s if self._under_way else inf
        if self._tiers is not None and self._under_way:
            next_s = min(next_s, self._tiers.next_s)
        if self._outages:
            next_s = min(next_s, self._outages[0][0])
        if self._held:
            wakeup_s = self._dispatcher.next_wakeup_s(now_s)
            next_s = next_s if wakeup_s is None else min(next_s, wakeup_s)
        return next_s if next_s > now_s else now_s

    def _ask(self, request: Request, asked: PlacementRequest, retries: int, now_s: float) -> None:
        try:
            answer = self._dispatcher.arrive(asked, now_s)
        except PlacementError as error:
            self._refused(request, error, retries)
            return
        if isinstance(answer, Held):
            self._held[answer.ticket] = request, retries
        else:
            self._placed(request, answer, retries, now_s)

    def _release(self, now_s: float) -> None:
        """Those whose turn it is, of the requests held."""
        for released in self._dispatcher.release(now_s):
            (request, retries), outcome = self._held.pop(released.ticket), released.outcome
            if isinstance(outcome, Placement):
                self._placed(request, outcome, retries, now_s)
            else:
                self._refused(request, outcome, retries)

    def _placed(self, request: Request, placement: Placement, retries: int, now_s: float) -> None:
        prefill = self._numbers[placement.prefill.instance_id]
        decode = self._numbers[placement.decode.instance_id]
        whole_tokens = request.prompt_tokens + request.output_tokens
        if whole_tokens > self._kv_tokens[decode] or request.prompt_tokens > self._kv_tokens[prefill]:
            self.scheduler.cancelled(placement.placement_id, now_s)
            self._lost(request, Outcome.REFUSED, retries)
            return
        instances = self._cluster.instances
        pair = prefill != decode
        work = self.engines.submit(
            Load(
                request.number,
                request.prompt_tokens,
                request.output_tokens,
                self._first_hash[request.number],
                len(request.hashes),
            ),
            prefill,
            decode if pair else k.NONE,
            plan_blocks=placement.plan.tokens // self._block_tokens,
            peer=self._peer_of(placement),
            streams=pair and instances[prefill].streams_layers and instances[decode].streams_layers,
        )
        self._under_way[request.number] = _UnderWay(request, placement, work, retries)

    def _peer_of(self, placement: Placement) -> int:
        """Whom the plan fetches from."""
        for segment in reversed(placement.plan.segments):
            peer = self._numbers.get(segment.holder.instance_id, k.NONE)
            if peer != k.NONE and segment.holder.instance_id != placement.prefill.instance_id:
                return peer
        return k.NONE

    def _told(self, notice: list[float], now_s: float) -> None:
        kind, number = notice[k.N_KIND], int(notice[k.N_NUMBER])
        if kind == k.COPIED:
            assert self._tiers is not None
            self._tiers.copied(number, int(notice[k.N_CACHED]), now_s)
            return
        under_way = self._under_way.get(number)
        if under_way is None:
            return  # it was given up at this very time
        if kind == k.FIRST_TOKEN:
            under_way.speaks = True
            self.scheduler.first_token(under_way.placement.placement_id, now_s)
        elif kind == k.FINISHED:
            self._finished(under_way, notice, now_s)
        else:
            self._prefilled(under_way, now_s)

    def _prefilled(self, under_way: _UnderWay, now_s: float) -> None:
        try:
            self.scheduler.prefill_finished(under_way.placement.placement_id, now_s)
        except RejectedError:
            self.engines.drop(under_way.work, now_s)
            del self._under_way[under_way.request.number]
            self._lost(under_way.request, Outcome.REJECTED, under_way.retries)
            return
        self.engines.hand_on(under_way.work)

    def _finished(self, under_way: _UnderWay, notice: list[float], now_s: float) -> None:
        request, placement = under_way.request, under_way.placement
        began_s, prefilled_s, received_s, first_s, itl_s, tbt_s = notice[k.N_BEGAN_S : k.N_CACHED]
        cached, preemptions, host, disk, pod, remote, peer = notice[k.N_CACHED :]
        cached_tokens = int(cached)
        usage = Usage(request.prompt_tokens, request.output_tokens, cached_tokens)
        self.scheduler.finished(placement.placement_id, now_s, usage)
        del self._under_way[request.number]
        arrival_s = request.arrival_s
        if not placement.disaggregated:
            received_s = prefilled_s
        self._results.append(
            RequestResult(  # by position: by name a struct takes seven times as long to make
                request.number,
                Outcome.FINISHED,
                arrival_s,
                request.prompt_tokens,
                request.output_tokens,
                cached_tokens,
                began_s - arrival_s,
                first_s - arrival_s,
                tbt_s,
                itl_s,
                now_s - arrival_s,
                placement.prefill.instance_id,
                placement.decode.instance_id,
                placement.predicted_ttft_s,
                prefilled_s - arrival_s,
                received_s - arrival_s,
                int(host),
                int(disk),
                int(pod),
                int(remote),
                int(peer),
                int(preemptions),
                under_way.retries,
            )
        )

    def _refused(self, request: Request, error: PlacementError, retries: int) -> None:
        outcome = Outcome.REJECTED if isinstance(error, RejectedError) else Outcome.REFUSED
        self._lost(request, outcome, retries)

    def _lost(self, request: Request, outcome: Outcome, retries: int) -> None:
        self._results.append(
            RequestResult(
                request.number,
                outcome,
                request.arrival_s,
                request.prompt_tokens,
                request.output_tokens,
                retries=retries,
            )
        )

    def _change(self, now_s: float, name: str, dies: bool) -> None:
        """An instance dies, or is back."""
        instance = self.scheduler.cluster[name]
        if not dies:
            assert instance.facts is not None
            self.scheduler.instance_up(name, instance.facts)
            return
        number = self._numbers[name]
        victims = [each for each in self._under_way.values() if self.engines.needs(each.work, number)]
        for victim in victims:
            self.engines.drop(victim.work, now_s)
            del self._under_way[victim.request.number]
        self._tell_scheduler()
        self.engines.kill(number, now_s)
        self.scheduler.instance_down(name, "it died")
        if self._tiers is not None:
            self._tiers.died(name, now_s)
        failure = InstanceFailure(name, FailureKind.UNREACHABLE, "it died")
        for victim in victims:
            self.scheduler.failed(victim.placement.placement_id, now_s, failure)
            if victim.speaks or victim.retries + 1 == ATTEMPTS:
                self._lost(victim.request, Outcome.FAILED, victim.retries)
                continue
            asked = msgspec.structs.replace(
                placement_request(victim.request, self._block_tokens),
                excluded=frozenset({name}),
                retry_of=victim.placement.placement_id,
                arrived_s=victim.request.arrival_s,
            )
            self._ask(victim.request, asked, victim.retries + 1, now_s)

    def _tell_scheduler(self) -> None:
        """What engines and pools store and evict and the latest gauges, as event streams and polls would tell it.

        Before something is decided: nothing else asks for it.
        """
        changes = self.engines.changes()
        if changes is not None:
            self.scheduler.index.apply(self._holders, self._namespace, changes)
        if self._untold is None:
            return
        at_s, gauges = self._untold
        self._untold = None
        facts = zip(self._numbers, self._kv_tokens, gauges.tolist(), strict=True)
        for name, kv_tokens, (running, waiting, used_tokens) in facts:
            load = ReportedLoad(int(running), int(waiting), used_tokens / kv_tokens, at_s)
            self.scheduler.report_load(name, 0, load)

    def _poll(self, now_s: float) -> None:
        """Read gauges as of the last poll time that has passed: nothing has changed since the last event."""
        at_s = now_s // POLL_S * POLL_S
        self._next_poll_s = at_s + POLL_S
        gauges = self.engines.read_gauges(at_s)
        self._looks.add(at_s, gauges)
        self._untold = at_s, gauges


def placement_request(request: Request, block_tokens: int = BLOCK_TOKENS) -> PlacementRequest:
    """A simulated request as the scheduler is asked for it: by its hashes alone."""
    return PlacementRequest(
        str(request.number),
        MODEL,
        _NO_TOKENS,
        request.prompt_tokens,
        hashes=request.hashes,
        hashes_block_size=block_tokens,
    )


def _changes_of(outages: Iterable[Outage]) -> list[tuple[float, str, bool]]:
    """When which instance dies (True) or comes back (False), in order; what comes back does so first."""
    changes = [(outage.at_s, outage.instance, True) for outage in outages]
    changes += [(outage.at_s + outage.for_s, outage.instance, False) for outage in outages]
    return sorted(changes, key=lambda change: (change[0], change[2], change[1]))


def _holders_of(cluster: ClusterSpec, engines: Engines) -> list[tuple[Holder, Tier]]:
    """Whose each store is in the index."""
    holders = []
    for store in engines.stores:
        owners = cluster.pools if store.tier in POOL_TIERS else cluster.instances
        holders.append((Holder(owners[store.owner].name, 0), store.tier))
    return holders


def _name_of(cluster: ClusterSpec, store: Store) -> str:
    """A store as errors name it."""
    if store.tier in POOL_TIERS:
        return f"pool {cluster.pools[store.owner].name!r}"
    instance = f"instance {cluster.instances[store.owner].name!r}"
    return instance if store.tier is Tier.DEVICE else f"{instance}, tier {store.tier.name.lower()}"


def _by_role(cluster: ClusterSpec) -> list[list[int]]:
    roles: dict[str, list[int]] = {}
    for number, instance in enumerate(cluster.instances):
        roles.setdefault(instance.role, []).append(number)
    return list(roles.values())
