"""The scheduler: requests, progress, failures and load reports in; placements out.

A state machine without I/O. Time comes in as an argument (seconds of one monotonic clock), cache contents
through the index, engine facts and gauges through the `instance_up` / `report_load` events; the router, the
REST API and the simulator drive the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

from cache_index import CacheIndex, Holder
from conductor.admission import Gate
from conductor.assumed_cache import AssumedCache
from conductor.books import Books
from conductor.circuit import Circuit, SuspensionPolicy
from conductor.circuit_breaker import CircuitBreaker
from conductor.cluster import Cluster, EngineFacts, Health, InstanceState
from conductor.costs import Calibration, InstanceClass
from conductor.decider import Decider
from conductor.explanation import PlacementRecord, RecordLog
from conductor.outcomes import Outcomes
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    ModelCard,
    Objectives,
    Placement,
    PlacementError,
    PlacementRequest,
    RejectedError,
    Role,
    Usage,
)
from conductor.policies.candidates import Policy
from conductor.prefix_lookup import IndexLookup, PrefixLookup
from conductor.rank import NO_ROW, PlacedElsewhere, ReportedLoad


class Scheduler:
    """Places requests on the cluster and keeps the books of what is under way."""

    def __init__(
        self,
        cluster: Cluster,
        index: CacheIndex,
        policy: Policy,
        objectives: Objectives,
        suspension: SuspensionPolicy,
        *,
        aliases: dict[str, str] | None = None,
        calibrations: dict[str, Calibration] | None = None,
        lookup: PrefixLookup | None = None,
        gate: Gate | None = None,
        outcomes: Outcomes | None = None,
        id_prefix: str = "",
        records: int = 10_000,
    ) -> None:
        self.cluster = cluster
        self.index = index
        self.policy = policy
        self._circuits = CircuitBreaker(cluster, suspension)
        self.records = RecordLog(records)
        self.outcomes = Outcomes() if outcomes is None else outcomes
        self.gate = Gate() if gate is None else gate
        self._lookup = IndexLookup(index) if lookup is None else lookup
        self._books = Books(cluster, self._lookup, calibrations, objectives.tbt_share)
        self._decider = Decider(cluster, index, self._lookup, self.gate, objectives, aliases or {})
        self.on_placed: Callable[[PlacementRecord, float], None] | None = None  # must return at once
        self._id_prefix = id_prefix
        self._placed = 0
        self._active: dict[str, PlacementRecord] = {}
        self._assumed = AssumedCache(index)

    # ---- requests ----

    def place(self, request: PlacementRequest, now_s: float) -> Placement:
        """Choose where the request runs and reserve its load there.

        Raises UnknownModelError when no instance serves the model, NoInstanceError when none can take it now,
        RejectedError when admission turns it away.
        """
        self._placed += 1
        placement_id = f"{self._id_prefix}{self._placed}"
        try:
            record = self._decider.decide(request, self.policy, placement_id, now_s)
            if self.gate.judges:
                self._admit(record)
        except PlacementError:
            self.outcomes.refused(now_s)
            raise
        self._books.reserve(record, now_s)
        self._active[placement_id] = record
        left = self.records.add(record)
        if left:
            self._decider.recycle(left)
        if record.roster.any_probing:
            self._circuits.placed(record)
        if self.on_placed is not None:
            self.on_placed(record, now_s)
        self._assumed.placed(record, now_s)
        self.outcomes.placed(record, len(self._active))
        return record.placement

    def place_together(
        self, requests: Sequence[PlacementRequest], now_s: float
    ) -> list[Placement | PlacementError]:
        """Place requests that arrived at once, each as `place` would but knowing of the others.

        Their prefill ranks are assigned together where that is better than one by one (`joint`); requests for
        different models, or whose prompts begin alike, are not: what one computes, the next finds cached.
        """
        results: list[Placement | PlacementError | None] = [None] * len(requests)
        for i, request in self._decider.assigned(requests, now_s):
            try:
                results[i] = self.place(request, now_s)
            except PlacementError as error:
                results[i] = error
        return [result for result in results if result is not None]

    def anywhere(self, request: PlacementRequest, now_s: float) -> Placement:
        """For what is no load, such as tokenization: nothing is reserved or remembered. Raises as `place` does."""
        return self._decider.anywhere(request, now_s)

    def consider(
        self, request: PlacementRequest, now_s: float, policy: Policy | None = None
    ) -> PlacementRecord:
        """What `place` would decide, with nothing reserved and nothing remembered. Raises as `place` does.

        Another ``policy`` than the scheduler's own may be asked; it is the caller's and may remember.
        """
        return self._decider.decide(request, policy or copy.deepcopy(self.policy), "", now_s)

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        """The prefill leg of a disaggregated placement answered.

        Raises RejectedError when admission judges that its decode would miss its objective; the placement has
        ended then.
        """
        record = self._active.get(placement_id)
        if record is not None and record.prefill_finished_s is None:
            record.prefill_finished_s = now_s
            self._books.end_prefill(record, now_s, learn=True)
            self._books.end_transfer(record)
            if record.placement.disaggregated and record.first_token_s is None:
                self._books.transfer(record, record.prefill, record.decode)
            self._circuits.succeeded(record.placement.prefill.instance_id, placement_id, now_s)
            self._admit_decode(record, now_s)

    def first_token(self, placement_id: str, now_s: float) -> None:
        """The first byte of the answer arrived."""
        record = self._active.get(placement_id)
        if record is None or record.first_token_s is not None:
            return
        record.first_token_s = now_s
        instance = self.cluster.get(record.placement.decode.instance_id)
        if instance is not None:
            self._circuits.answered(instance, placement_id, now_s)
        # An answer that is not streamed comes whole: its first byte tells of its end, not of its first token.
        if record.request.streamed:
            self._begin_answer(record, instance, now_s)

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        """The answer was sent completely; of one that is not streamed this is all that need be told."""
        record = self._active.get(placement_id)
        if record is not None and record.first_token_s is None:
            self._circuits.succeeded(record.placement.decode.instance_id, placement_id, now_s)
        self._end(placement_id, now_s, "finished", usage)

    def cancelled(self, placement_id: str, now_s: float) -> None:
        """The client went away, or the router gave the request up."""
        self._end(placement_id, now_s, "cancelled")

    def expired(self, placement_id: str, now_s: float) -> None:
        """Whoever asked for the placement never told how it ended."""
        self._end(placement_id, now_s, "expired")

    def find(self, placement_id: str) -> PlacementRecord | None:
        """A placement under way, or one of the latest."""
        return self._active.get(placement_id) or self.records.get(placement_id)

    def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None:
        """One leg failed: the reservation is released and the instance pays for it.

        An unreachable instance is down at once (its health check brings it back); one that times out or
        answers 5xx too often is suspended for a while (`circuit_breaker`).
        """
        if failure.kind is not FailureKind.UNREACHABLE:
            self._circuits.failed(failure.instance_id, placement_id, now_s, failure.detail)
        record = self._end(placement_id, now_s, "failed")
        if record is not None:
            record.failure = failure
        if failure.kind is FailureKind.UNREACHABLE and self.cluster.get(failure.instance_id) is not None:
            self.instance_down(failure.instance_id, failure.detail)

    def models(self) -> list[ModelCard]:
        """The models that can be asked for, aliases included."""
        return self._decider.models()

    def check_served(self, model: str) -> None:
        """Raises UnknownModelError, or NoInstanceError while no instance is up; ``model`` may be an alias."""
        self._decider.check_served(model)

    def why_not_ready(self, now_s: float) -> str | None:
        """None when a request could be placed now, else the reason in words."""
        up = [i for i in self.cluster if i.facts is not None and i.is_candidate(now_s)]
        roles = {i.role for i in up}
        if Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles:
            return None
        if not up:
            states = _join(f"{i.instance_id} ({i.health}: {i.health_reason})" for i in self.cluster)
            return f"no instance is up: {states}"
        missing = Role.DECODE if Role.PREFILL in roles else Role.PREFILL
        return f"no {missing} instance is up"

    # ---- the cluster ----

    def instance_up(self, instance_id: str, facts: EngineFacts) -> None:
        """An engine answered its probe; ranks of it become holders of the index."""
        instance = self.cluster[instance_id]
        self.cluster.set_facts(instance, facts)
        if instance.draining:
            self.cluster.set_health(instance, Health.DRAINING, "finishes what was placed on it")
        elif instance.withheld is not None:
            self.cluster.set_health(instance, Health.WITHHELD, instance.withheld)
        else:
            self.cluster.set_health(instance, Health.UP, "answers its health check")
        instance.circuit = Circuit(suspensions=instance.circuit.suspensions)
        for rank in instance.ranks:
            self.index.register(rank.holder)
            self._assumed.follow(rank.holder, facts)

    def instance_down(self, instance_id: str, reason: str) -> None:
        """An engine is gone: it is no candidate, and what it held is forgotten."""
        instance = self.cluster[instance_id]
        if instance.health is Health.DOWN:
            return
        self.cluster.set_health(instance, Health.DOWN, reason)
        for rank in instance.ranks:
            self._assumed.forget(rank.holder)
            self.index.clear(rank.holder)
            self.cluster.report(rank, None)
            self.cluster.tables.empty(rank.row)

    def add_instance(self, instance: InstanceState) -> None:
        """A new instance, which is no candidate until `instance_up`. Raises ValueError as `Cluster.add` does."""
        self.cluster.add(instance)
        self._books.apply(instance.instance_class)

    def drain_instance(self, instance_id: str) -> None:
        """No new placements; what is under way goes on. Raises KeyError when it is unknown."""
        instance = self.cluster[instance_id]
        instance.draining = True
        if instance.health in (Health.UP, Health.SUSPENDED, Health.PROBING, Health.WITHHELD):
            self.cluster.set_health(instance, Health.DRAINING, "finishes what was placed on it")

    def withhold_instance(self, instance_id: str, reason: str) -> None:
        """No new placements until `readmit_instance`; its cache is kept. Raises KeyError when it is unknown."""
        instance = self.cluster[instance_id]
        instance.withheld = reason
        if instance.health in (Health.UP, Health.SUSPENDED, Health.PROBING, Health.WITHHELD):
            self.cluster.set_health(instance, Health.WITHHELD, reason)

    def readmit_instance(self, instance_id: str) -> None:
        """The end of `withhold_instance`. Raises KeyError when it is unknown."""
        instance = self.cluster[instance_id]
        instance.withheld = None
        if instance.health is Health.WITHHELD:
            self.cluster.set_health(instance, Health.UP, "is listed as ready again")
            instance.circuit = Circuit(suspensions=instance.circuit.suspensions)

    def remove_instance(self, instance_id: str) -> None:
        """Take an instance out, and forget what it held. Raises KeyError when it is unknown.

        Placements under way there end as their requests do.
        """
        for rank in self.cluster.remove(instance_id).ranks:
            self._lookup.holder_left(rank.holder)
            self._assumed.forget(rank.holder)
            self.index.unregister(rank.holder)

    def report_load(self, instance_id: str, rank: int, load: ReportedLoad) -> None:
        """Gauges of one rank, polled from its engine."""
        state = self.cluster[instance_id].ranks[rank]
        if load.preemptions is not None:
            self.outcomes.reported(state.reported, load)
        self.cluster.report(state, load)

    def placed_elsewhere(self, placed: Mapping[Holder, PlacedElsewhere]) -> None:
        """Load that other conductors have placed on these ranks, in place of all that they told before."""
        self.cluster.place_elsewhere(placed)

    def calibration(self, instance_class: InstanceClass) -> Calibration:
        """What was learned of a class of instances."""
        return self._books.calibration(instance_class)

    def reset_calibration(self, class_name: str) -> None:
        """Forget what was learned of a class of instances. Raises KeyError when nothing was."""
        del self.calibrations[class_name]
        for instance in self.cluster:
            if instance.instance_class.name == class_name:
                self._books.apply(instance.instance_class)

    @property
    def objectives(self) -> Objectives:
        """Of requests that bring none."""
        return self._decider.objectives

    @property
    def suspension(self) -> SuspensionPolicy:
        """When instances that fail requests are left alone."""
        return self._circuits.policy

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of models."""
        return self._decider.aliases

    @property
    def calibrations(self) -> dict[str, Calibration]:
        """What was learned, by instance class."""
        return self._books.calibrations

    @property
    def active_placements(self) -> int:
        return len(self._active)

    def check_invariants(self) -> None:
        """Assert that reservations and active placements agree; for tests."""
        active = {record.ticket: record for record in self._active.values()}
        assert len(active) == len(self._active), "a ticket was given twice"
        reserved: dict[int, int] = {}
        for record in active.values():
            if record.decode.row >= 0:
                assert record.ticket in record.decode.under_way(), "an active placement lost its decode"
                reserved[record.decode.row] = reserved.get(record.decode.row, 0) + 1
        transfers = [r.transfer for r in active.values() if r.transfer is not None]
        for instance in self.cluster:
            for rank in instance.ranks:
                assert rank.under_way() <= active.keys(), "a prefill or a decode outlived its placement"
                assert rank.active_decodes == reserved.get(rank.row, 0), "a decode outlived its placement"
                assert rank.transfers_out == sum(giver is rank for giver, _ in transfers), (
                    "transfers out drifted"
                )
                assert rank.transfers_in == sum(taker is rank for _, taker in transfers), (
                    "transfers in drifted"
                )
                rank.check(self.cluster.tables)

    # ---- inside ----

    def _admit(self, record: PlacementRecord) -> None:
        """Raises RejectedError; what was estimated is given back then."""
        estimates, block = record.candidates, record.block
        assert estimates is not None
        assert block is not None
        placement, choice = record.placement, record.choice
        rejection = self.gate.judge(estimates, choice, placement.predicted_ttft_s, self.cluster.tables)
        if rejection is not None:
            self._decider.recycle((block,))
            raise RejectedError(rejection.reason, rejection.stage, rejection.retry_after_s)
        self.gate.placed(
            placement.placement_id,
            record.decode.row,
            record.request,
            placement.predicted_ttft_s,
            placement.predicted_tbt_s,
            record.output_tokens,
            record.placed_s,
        )

    def _admit_decode(self, record: PlacementRecord, now_s: float) -> None:
        instance = self.cluster.get(record.placement.decode.instance_id)
        if not record.placement.disaggregated or instance is None or record.decode.row == NO_ROW:
            return
        rejection = self.gate.judge_decode(
            record.request,
            record.decode.row,
            self._books.step_s(record.decode, instance),
            self._decider.objectives_of(record.request).tbt_s,
            now_s,
            self.cluster.tables,
        )
        if rejection is not None:
            self._end(record.placement.placement_id, now_s, "rejected")
            raise RejectedError(rejection.reason, rejection.stage, rejection.retry_after_s)

    def _begin_answer(self, record: PlacementRecord, instance: InstanceState | None, now_s: float) -> None:
        placement, books = record.placement, self._books
        if self.gate.judges:
            self.gate.started(placement.placement_id, now_s)
        if record.transfer is not None:
            books.end_transfer(record)
        if instance is not None:
            learned = books.calibration(instance.instance_class)
            record.raw_step_at_first_token_s = raw_s = books.raw_step_s(record.decode, instance)
            record.step_at_first_token_s = learned.decode.factor * raw_s
            learned.ttft.add(placement.predicted_ttft_s, now_s - record.placed_s)
        books.begin_decode(record, now_s, learn=True)

    def _end(
        self, placement_id: str, now_s: float, outcome: str, usage: Usage | None = None
    ) -> PlacementRecord | None:
        if self._circuits.probes:
            self._circuits.ended(placement_id)
        self._assumed.ended(placement_id, usage)
        record = self._active.pop(placement_id, None)
        if record is None:
            return None
        record.usage = usage
        request, books = record.request, self._books
        finished = outcome == "finished"
        if self.gate.judges:
            self.gate.ended(placement_id)
        if finished and usage is not None and usage.output_tokens:
            self.gate.observe(request, record.beginning, usage.output_tokens)
        if record.transfer is not None:
            books.end_transfer(record)
        books.end(
            record,
            now_s,
            prefilling=(record.first_token_s is None or not request.streamed)
            and record.prefill_finished_s is None,
            learn=finished and request.streamed,
        )
        record.ended_s, record.outcome = now_s, outcome
        self.outcomes.ended(record, self._decider.objectives_of)
        record.forget_prompt()
        return record


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
