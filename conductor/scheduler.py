"""The scheduler: requests, progress, failures and load reports in; placements out.

A state machine without I/O. Time comes in as an argument (seconds of one monotonic clock), cache contents
through the index, engine facts and gauges through the `instance_up` / `report_load` events; the router, the
REST API and the simulator drive the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cache_index import CacheIndex
from conductor.admission import Gate
from conductor.assumed_cache import AssumedCache
from conductor.cluster import (
    NO_ROW,
    Cluster,
    EngineFacts,
    Health,
    InstanceState,
    PendingPrefill,
    RankState,
    ReportedLoad,
)
from conductor.costs import Calibration, InstanceClass
from conductor.costs.tables import DECODE
from conductor.estimates import Estimates, Estimator
from conductor.explanation import PlacementRecord, RecordLog
from conductor.joint import MAX_TOGETHER, assign
from conductor.outcomes import Outcomes
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementError,
    PlacementRequest,
    RejectedError,
    Role,
    UnknownModelError,
    Usage,
)
from conductor.policies.candidates import NO_PEER, Candidates, Policy
from conductor.prefix_lookup import IndexLookup, PrefixLookup
from conductor.prefix_plan import hand_off_s, plan_of, predicted_ttft_s
from conductor.roster import Roster, cache_namespace, make_roster

# Prompts that begin with the same tokens are likely to share more.
_BEGINNING_TOKENS = 512
# What is left of the TTFT objective of a request that was held too long.
_LEAST_OBJECTIVE_S = 1e-3
# Shorter answers say more about the first step than about the pace.
_MIN_OBSERVED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request should meet: time to first token, and mean of its longest tenth of token gaps."""

    ttft_s: float = 2.0
    tbt_s: float = 0.05


@dataclass(frozen=True, slots=True)
class SuspensionPolicy:
    """When an instance that answers its health check but fails requests stops being a candidate."""

    after_failures: int = 3
    pause_s: float = 10.0


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
        id_prefix: str = "",
        records: int = 10_000,
    ) -> None:
        self.cluster = cluster
        self.index = index
        self.policy = policy
        self.objectives = objectives
        self.suspension = suspension
        self.aliases = aliases or {}
        self.records = RecordLog(records)
        self.outcomes = Outcomes()
        self.calibrations = calibrations if calibrations is not None else {}
        self._id_prefix = id_prefix
        self._placed = 0
        for instance in cluster:
            self._apply(instance.instance_class, self.calibration(instance.instance_class))
        self._rosters: dict[str, Roster] = {}
        self._lookup = lookup or IndexLookup(index)
        self.gate = gate or Gate()
        self._estimator = Estimator(cluster)
        self._active: dict[str, PlacementRecord] = {}
        self._assumed = AssumedCache(index)

    # ---- requests ----

    def place(self, request: PlacementRequest, now_s: float) -> Placement:
        """Choose where the request runs and reserve its load there.

        Raises UnknownModelError when no instance serves the model, NoInstanceError when none can take it now,
        RejectedError when admission turns it away.
        """
        self._placed += 1
        try:
            record = self._decide(request, self.policy, f"{self._id_prefix}{self._placed}", now_s)
            self._admit(record)
        except PlacementError:
            self.outcomes.refused(now_s)
            raise
        self._reserve(record, now_s)
        if record.cache_group is not None:
            self._lookup.prefill_begins(
                record.placement.placement_id, request, record.cache_group, record.prefill.holder
            )
        self._active[record.placement.placement_id] = record
        for dropped in self.records.add(record):
            self._estimator.recycle(dropped)
        self._assume(record, now_s)
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
        for i, request in self._assigned(requests, now_s):
            try:
                results[i] = self.place(request, now_s)
            except PlacementError as error:
                results[i] = error
        return [result for result in results if result is not None]

    def consider(
        self, request: PlacementRequest, now_s: float, policy: Policy | None = None
    ) -> PlacementRecord:
        """What `place` would decide, with nothing reserved and nothing remembered. Raises as `place` does.

        Another ``policy`` than the scheduler's own may be asked; it is the caller's and may remember.
        """
        return self._decide(request, policy or copy.deepcopy(self.policy), "", now_s)

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        """The prefill leg of a disaggregated placement answered.

        Raises RejectedError when admission judges that its decode would miss its objective; the placement has
        ended then.
        """
        record = self._active.get(placement_id)
        if record is not None and record.prefill_finished_s is None:
            record.prefill_finished_s = now_s
            self._end_prefill(record, now_s, learn=True)
            self._end_transfer(record)
            if record.placement.disaggregated and record.first_token_s is None:
                self._transfer(record, record.prefill, record.decode)
            self._succeeded(record.placement.prefill.instance_id)
            self._admit_decode(record, now_s)

    def first_token(self, placement_id: str, now_s: float) -> None:
        """The first byte of the answer arrived."""
        record = self._active.get(placement_id)
        if record is None or record.first_token_s is not None:
            return
        record.first_token_s = now_s
        self.gate.started(placement_id, now_s)
        self._end_transfer(record)
        instance = self.cluster.get(record.placement.decode.instance_id)
        if instance is not None:
            record.step_at_first_token_s = self._step_s(record.decode, instance)
            if record.request.streamed:
                ttft_s = now_s - record.placed_s
                self.calibration(instance.instance_class).ttft.add(record.placement.predicted_ttft_s, ttft_s)
        # An answer that is not streamed comes whole: its first byte says nothing about the prefill.
        self._end_prefill(record, now_s, learn=record.request.streamed)
        self._succeeded(record.placement.decode.instance_id)

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        """The answer was sent completely."""
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
        answers 5xx several times in a row is suspended for a while.
        """
        record = self._end(placement_id, now_s, "failed")
        if record is not None:
            record.failure = failure
        instance = self.cluster.get(failure.instance_id)
        if instance is None:
            return
        if failure.kind is FailureKind.UNREACHABLE:
            self.instance_down(failure.instance_id, failure.detail)
            return
        instance.consecutive_failures += 1
        if instance.consecutive_failures >= self.suspension.after_failures and instance.is_candidate(now_s):
            reason = f"{instance.consecutive_failures} requests failed in a row, last: {failure.detail}"
            instance.suspended_until_s = now_s + self.suspension.pause_s
            self.cluster.set_health(instance, Health.SUSPENDED, reason)

    def models(self) -> list[ModelCard]:
        """The models that can be asked for, aliases included."""
        cards = self.cluster.models()
        known = {card.model: card for card in cards}
        aliases = [
            ModelCard(alias, known[name].max_model_len, known[name].instances, parent=name)
            for alias, name in self.aliases.items()
            if name in known and alias not in known
        ]
        return cards + aliases

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
        else:
            self.cluster.set_health(instance, Health.UP, "answers its health check")
        instance.consecutive_failures = 0
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

    def add_instance(self, instance: InstanceState) -> None:
        """A new instance, which is no candidate until `instance_up`. Raises ValueError as `Cluster.add` does."""
        self.cluster.add(instance)
        self._apply(instance.instance_class, self.calibration(instance.instance_class))

    def drain_instance(self, instance_id: str) -> None:
        """No new placements; what is under way goes on. Raises KeyError when it is unknown."""
        instance = self.cluster[instance_id]
        instance.draining = True
        if instance.health in (Health.UP, Health.SUSPENDED):
            self.cluster.set_health(instance, Health.DRAINING, "finishes what was placed on it")

    def remove_instance(self, instance_id: str) -> None:
        """Take an instance out, and forget what it held. Raises KeyError when it is unknown.

        Placements under way there end as their requests do.
        """
        ranks = self.cluster.remove(instance_id).ranks
        for placement_id in [p for rank in ranks for p in rank.prefills]:
            self._lookup.prefill_ended(placement_id)
        for rank in ranks:
            self._assumed.forget(rank.holder)
            self.index.unregister(rank.holder)

    def report_load(self, instance_id: str, rank: int, load: ReportedLoad) -> None:
        """Gauges of one rank, polled from its engine."""
        state = self.cluster[instance_id].ranks[rank]
        self.outcomes.reported(state.reported, load)
        self.cluster.report(state, load)

    def calibration(self, instance_class: InstanceClass) -> Calibration:
        """What was learned of a class of instances."""
        return self.calibrations.setdefault(instance_class.name, Calibration())

    def reset_calibration(self, class_name: str) -> None:
        """Forget what was learned of a class of instances. Raises KeyError when nothing was."""
        del self.calibrations[class_name]
        for instance in self.cluster:
            if instance.instance_class.name == class_name:
                self._apply(instance.instance_class, self.calibration(instance.instance_class))

    @property
    def active_placements(self) -> int:
        return len(self._active)

    def check_invariants(self) -> None:
        """Assert that reservations and active placements agree; for tests."""
        reserved: dict[int, int] = {}
        for record in self._active.values():
            if record.decode.row >= 0:
                assert record.placement.placement_id in record.decode.decodes, (
                    "an active placement lost its decode"
                )
                reserved[record.decode.row] = reserved.get(record.decode.row, 0) + 1
        for instance in self.cluster:
            for rank in instance.ranks:
                assert rank.prefills.keys() <= self._active.keys(), "a prefill outlived its placement"
                assert len(rank.decodes) == reserved.get(rank.row, 0), "a decode outlived its placement"
                assert rank.context_tokens == sum(rank.decodes.values()), "context tokens drifted"
                assert rank.pending_tokens == sum(p.tokens for p in rank.prefills.values()), (
                    "pending tokens drifted"
                )
                transfers = [r.transfer for r in self._active.values() if r.transfer is not None]
                assert rank.transfers_out == sum(giver is rank for giver, _ in transfers), (
                    "transfers out drifted"
                )
                assert rank.transfers_in == sum(taker is rank for _, taker in transfers), (
                    "transfers in drifted"
                )
                self.cluster.check(rank)

    # ---- estimates ----

    def _roster(self, request: PlacementRequest, model: str, now_s: float) -> Roster:
        """The candidates; gathered anew only when the cluster changed, or for a retry."""
        if request.excluded:
            roster = make_roster(self.cluster, self.index, model, now_s, request.excluded)
        else:
            roster = self._rosters.get(model)
            if roster is None or roster.version != self.cluster.version or now_s >= roster.valid_until_s:
                roster = make_roster(self.cluster, self.index, model, now_s)
                if roster is not None:
                    self._rosters[model] = roster
        if roster is None:
            raise UnknownModelError(self._why_unknown(model))
        return roster

    # ---- books ----

    def _assigned(
        self, requests: Sequence[PlacementRequest], now_s: float
    ) -> Iterator[tuple[int, PlacementRequest]]:
        """The requests with their numbers, in the order to place them in, prefill ranks fixed where that pays."""
        apart: dict[str, list[int]] = {}
        alike: list[int] = []
        beginnings: set[bytes] = set()
        for i, request in enumerate(requests):
            beginning = request.tokens[:_BEGINNING_TOKENS].tobytes()
            if request.excluded or request.prefill_on is not None or (beginning and beginning in beginnings):
                alike.append(i)
                continue
            beginnings.add(beginning)
            apart.setdefault(request.model, []).append(i)
        for together in apart.values():
            for first in range(0, len(together), MAX_TOGETHER):
                chunk = together[first : first + MAX_TOGETHER]
                yield from self._assign([(i, requests[i]) for i in chunk], now_s)
        yield from ((i, requests[i]) for i in alike)

    def _assign(
        self, chunk: list[tuple[int, PlacementRequest]], now_s: float
    ) -> list[tuple[int, PlacementRequest]]:
        try:
            batch = [self._estimate(request, now_s) for _, request in chunk] if len(chunk) > 1 else []
        except PlacementError:
            return chunk  # `place` says it again, request by request
        assignment = assign(batch) if batch else None
        holders = [candidates.ranks for candidates in batch]
        for candidates in batch:
            self._estimator.recycle(candidates)
        if assignment is None:
            return chunk
        fixed = []
        for b in assignment.order:
            i, request = chunk[b]
            fixed.append((i, replace(request, prefill_on=holders[b][assignment.ranks[b]].holder)))
        return fixed

    def _decide(
        self, request: PlacementRequest, policy: Policy, placement_id: str, now_s: float
    ) -> PlacementRecord:
        model = self.aliases.get(request.model, request.model)
        roster = self._roster(request, model, now_s)
        candidates = self._estimate(request, now_s)
        choice = policy.choose(candidates)
        if choice is None:
            reason = self._why_none(model, candidates)
            self._estimator.recycle(candidates)
            raise NoInstanceError(reason)
        prefill, decode = candidates.ranks[choice.prefill], candidates.ranks[choice.decode]
        plan = plan_of(candidates, choice)
        moving_s = hand_off_s(candidates, choice.prefill, choice.decode)
        group = int(roster.group_of[choice.prefill])
        placement = Placement(
            placement_id=placement_id,
            request_id=request.request_id,
            model=model,
            prefill=prefill.target,
            decode=decode.target,
            overlap_tokens=int(candidates.overlap_tokens[choice.prefill]),
            plan=plan,
            predicted_ttft_s=predicted_ttft_s(candidates, choice, plan, moving_s),
            predicted_tbt_s=float(candidates.tbt_s[choice.decode]),
        )
        return PlacementRecord(
            placement=placement,
            request=request,
            policy=policy.name,
            candidates=candidates,
            choice=choice,
            placed_s=now_s,
            held_s=now_s - request.arrived_s if request.arrived_s is not None else 0.0,
            queue_s=float(candidates.queue_s[choice.prefill]),
            hand_off_s=moving_s,
            output_tokens=candidates.output_tokens,
            prefill=prefill,
            decode=decode,
            peer=candidates.ranks[choice.peer] if choice.peer != NO_PEER else None,
            cache_group=roster.cache_groups[group] if group >= 0 else None,
        )

    def _estimate(self, request: PlacementRequest, now_s: float) -> Estimates:
        model = self.aliases.get(request.model, request.model)
        ttft_objective_s = request.ttft_objective_s or self.objectives.ttft_s
        held_s = now_s - request.arrived_s if request.arrived_s is not None else 0.0
        estimates = self._estimator.estimate(
            request,
            self._roster(request, model, now_s),
            self._lookup,
            now_s,
            output_tokens=self.gate.output_tokens(request),
            ttft_objective_s=max(ttft_objective_s - held_s, _LEAST_OBJECTIVE_S),
            tbt_objective_s=request.tbt_objective_s or self.objectives.tbt_s,
        )
        if request.prefill_on is None:
            return estimates
        others = np.array([rank.holder != request.prefill_on for rank in estimates.ranks], np.bool_)
        return estimates.with_roles(np.where(others & (estimates.roles != DECODE), 0, estimates.roles))

    def _assume(self, record: PlacementRecord, now_s: float) -> None:
        """Where the prefill engine publishes no events, take what is sent there as cached."""
        request, holder = record.request, record.prefill.holder
        if not self._assumed.is_assumed(holder) or not len(request.tokens):
            return
        owner = self.cluster[holder.instance_id]
        if owner.block_size is not None:
            namespace = cache_namespace(owner, record.placement.model, owner.block_size)
            namespace = replace(namespace, tenant=request.cache_tenant)
            self._assumed.placed(record.placement.placement_id, request, holder, namespace, now_s)

    def _admit(self, record: PlacementRecord) -> None:
        """Raises RejectedError; what was estimated is given back then."""
        estimates = record.candidates
        assert estimates is not None
        placement, choice = record.placement, record.choice
        rejection = self.gate.judge(estimates, choice, placement.predicted_ttft_s, self.cluster.tables)
        if rejection is not None:
            self._estimator.recycle(estimates)
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
            self._step_s(record.decode, instance),
            record.request.tbt_objective_s or self.objectives.tbt_s,
            now_s,
            self.cluster.tables,
        )
        if rejection is not None:
            self._end(record.placement.placement_id, now_s, "rejected")
            raise RejectedError(rejection.reason, rejection.stage, rejection.retry_after_s)

    def _reserve(self, record: PlacementRecord, now_s: float) -> None:
        """Book the work and the transfers of a placement, so that the next decision sees them."""
        placement, request = record.placement, record.request
        record.prefill.add_prefill(
            placement.placement_id,
            PendingPrefill(
                placement.plan.prefill_s,
                request.prompt_tokens - placement.plan.tokens,
                # The end of a prefill shows when it hands off or when the first token streams.
                observed=request.streamed or placement.disaggregated,
            ),
            now_s,
        )
        record.decode.add_decode(placement.placement_id, request.prompt_tokens + record.output_tokens // 2)
        record.prefill.placements += 1
        if record.decode is not record.prefill:
            record.decode.placements += 1
        self.cluster.write(record.prefill)
        self.cluster.write(record.decode)
        if record.peer is not None:
            self._transfer(record, record.peer, record.prefill)

    def _transfer(self, record: PlacementRecord, giver: RankState, taker: RankState) -> None:
        """A transfer begins: a fetch with the placement, a hand-off when the prefill has ended."""
        record.transfer = (giver, taker)
        giver.transfers_out += 1
        taker.transfers_in += 1
        self.cluster.write(giver)
        self.cluster.write(taker)

    def _end_transfer(self, record: PlacementRecord) -> None:
        if record.transfer is not None:
            giver, taker = record.transfer
            record.transfer = None
            giver.transfers_out -= 1
            taker.transfers_in -= 1
            self.cluster.write(giver)
            self.cluster.write(taker)

    def _end_prefill(self, record: PlacementRecord, now_s: float, *, learn: bool) -> None:
        """Release the prefill reservation; its service time teaches the calibration if ``learn``."""
        self._lookup.prefill_ended(record.placement.placement_id)
        service_s = record.prefill.end_prefill(record.placement.placement_id, now_s)
        self.cluster.write(record.prefill)
        instance = self.cluster.get(record.placement.prefill.instance_id)
        if learn and service_s is not None and instance is not None:
            calibration = self.calibration(instance.instance_class)
            calibration.observe_prefill(record.placement.plan.prefill_s, service_s)
            self._apply(instance.instance_class, calibration)

    def _learn_decode(self, record: PlacementRecord, now_s: float) -> None:
        """The mean gap between a streamed answer's tokens, beside what the decode rank's load predicts.

        The load changed while the answer ran, so the prediction is the mean of those at its first and last token.
        """
        usage, started_s = record.usage, record.first_token_s
        instance = self.cluster.get(record.placement.decode.instance_id)
        if (
            usage is None
            or usage.output_tokens is None
            or usage.output_tokens < _MIN_OBSERVED_TOKENS
            or started_s is None
            or record.step_at_first_token_s is None
            or instance is None
        ):
            return
        observed_s = (now_s - started_s) / (usage.output_tokens - 1)
        calibration = self.calibration(instance.instance_class)
        predicted_s = 0.5 * (record.step_at_first_token_s + self._step_s(record.decode, instance))
        calibration.observe_decode(predicted_s, observed_s)
        self._apply(instance.instance_class, calibration)

    def _step_s(self, rank: RankState, instance: InstanceState) -> float:
        """A decode step of what is on ``rank`` now."""
        c = instance.instance_class
        step_s = (
            c.decode_base_s
            + c.decode_s_per_sequence * len(rank.decodes)
            + c.decode_s_per_context_token * rank.context_tokens
        )
        return self.calibration(c).decode.factor * step_s

    def _apply(self, instance_class: InstanceClass, calibration: Calibration) -> None:
        self.cluster.tables.calibrate(instance_class, calibration.prefill.factor, calibration.decode.factor)

    def _succeeded(self, instance_id: str) -> None:
        instance = self.cluster.get(instance_id)
        if instance is not None:
            instance.consecutive_failures = 0

    def _end(
        self, placement_id: str, now_s: float, outcome: str, usage: Usage | None = None
    ) -> PlacementRecord | None:
        self._assumed.ended(placement_id, usage)
        record = self._active.pop(placement_id, None)
        if record is None:
            return None
        record.usage = usage
        self.gate.ended(placement_id)
        if outcome == "finished" and usage is not None and usage.output_tokens:
            self.gate.observe(record.request, usage.output_tokens)
        self._end_prefill(record, now_s, learn=False)
        self._end_transfer(record)
        if outcome == "finished" and record.request.streamed:
            self._learn_decode(record, now_s)
        record.decode.end_decode(placement_id)
        self.cluster.write(record.decode)
        record.ended_s, record.outcome = now_s, outcome
        self.outcomes.ended(
            record,
            record.request.ttft_objective_s or self.objectives.ttft_s,
            record.request.tbt_objective_s or self.objectives.tbt_s,
        )
        return record

    def _why_unknown(self, model: str) -> str:
        served = [card.model for card in self.models()]
        if not served:
            waiting = _join(i.instance_id for i in self.cluster)
            return f"no instance is up yet, so no model is served (configured: {waiting}); retry shortly"
        return f"the model {model!r} is not served here; served: {', '.join(served)}"

    @staticmethod
    def _why_none(model: str, candidates: Candidates) -> str:
        reasons = [f"{name} ({why})" for name, why in candidates.excluded.items()]
        if candidates.can_prefill.any() and not candidates.can_decode.any():
            reasons.append("prefill instances are up but no decode instance is")
        if candidates.can_decode.any() and not candidates.can_prefill.any():
            reasons.append("decode instances are up but no prefill instance is")
        return f"no instance can take a request for {model!r} now: {'; '.join(reasons) or 'none is up'}"


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
