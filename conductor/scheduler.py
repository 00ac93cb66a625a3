"""The scheduler: requests, progress, failures and load reports in; placements out.

A state machine without I/O. Time comes in as an argument (seconds of one monotonic clock), cache contents
through the index, engine facts and gauges through the `instance_up` / `report_load` events; the router, the
REST API and the simulator drive the same object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from cache_index import CacheIndex, Tier, sequence_hashes
from conductor.assumed_cache import AssumedCache
from conductor.cluster import (
    Cluster,
    EngineFacts,
    Health,
    PendingPrefill,
    RankState,
    ReportedLoad,
)
from conductor.costs import InstanceClass, Ints, PrefillCalibration
from conductor.explanation import PlacementRecord, RecordLog
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementRequest,
    Role,
    UnknownModelError,
    Usage,
)
from conductor.policies import Candidates, Policy
from conductor.roster import LoadTable, Roster, cache_namespace, make_roster

# The length of an answer that nobody bounded, until it is learned: enters only decode capacity estimates.
_ASSUMED_OUTPUT_TOKENS = 256


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
        calibrations: dict[str, PrefillCalibration] | None = None,
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
        self.calibrations = calibrations if calibrations is not None else {}
        self._id_prefix = id_prefix
        self._placed = 0
        self._rosters: dict[str, Roster] = {}
        self._loads = LoadTable()
        for instance in cluster:
            for rank in instance.ranks:
                self._loads.update(rank)
        self._active: dict[str, PlacementRecord] = {}
        self._assumed = AssumedCache(index)

    # ---- requests ----

    def place(self, request: PlacementRequest, now_s: float) -> Placement:
        """Choose where the request runs and reserve its load there.

        Raises UnknownModelError when no instance serves the model, NoInstanceError when none can take it now.
        """
        model = self.aliases.get(request.model, request.model)
        candidates = self._candidates(request, model, now_s)
        choice = self.policy.choose(candidates)
        if choice is None:
            raise NoInstanceError(self._why_none(model, candidates))
        prefill, decode = candidates.ranks[choice.prefill], candidates.ranks[choice.decode]
        ttft_s = float(candidates.ttft_s[choice.prefill])
        if choice.prefill != choice.decode:
            ttft_s += float(candidates.hand_off_s[choice.decode])
        self._placed += 1
        placement = Placement(
            placement_id=f"{self._id_prefix}{self._placed}",
            request_id=request.request_id,
            model=model,
            prefill=prefill.target,
            decode=decode.target,
            overlap_tokens=int(candidates.overlap_tokens[choice.prefill]),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=float(candidates.tbt_s[choice.decode]),
        )
        record = PlacementRecord(
            placement=placement,
            request=request,
            policy=self.policy.name,
            candidates=candidates,
            choice=choice,
            placed_s=now_s,
            queue_s=float(candidates.queue_s[choice.prefill]),
            prefill_s=float(candidates.prefill_s[choice.prefill]),
        )
        # The end of a prefill shows when it hands off or when the first token streams.
        pending = PendingPrefill(record.prefill_s, observed=request.streamed or placement.disaggregated)
        prefill.add_prefill(placement.placement_id, pending, now_s)
        decode.add_decode(
            placement.placement_id,
            request.prompt_tokens + (request.max_output_tokens or _ASSUMED_OUTPUT_TOKENS) // 2,
        )
        for rank in {prefill.row: prefill, decode.row: decode}.values():
            rank.placements += 1
            self._loads.update(rank)
        self._active[placement.placement_id] = record
        self.records.add(record)
        owner = self.cluster[prefill.holder.instance_id]
        if self._assumed.is_assumed(prefill.holder) and len(request.tokens) and owner.block_size is not None:
            namespace = replace(cache_namespace(owner, model, owner.block_size), tenant=request.tenant)
            self._assumed.placed(placement.placement_id, request, prefill.holder, namespace, now_s)
        return placement

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        """The prefill leg of a disaggregated placement answered."""
        record = self._active.get(placement_id)
        if record is not None and record.prefill_finished_s is None:
            record.prefill_finished_s = now_s
            self._end_prefill(record, now_s, learn=True)
            self._succeeded(record.placement.prefill.instance_id)

    def first_token(self, placement_id: str, now_s: float) -> None:
        """The first byte of the answer arrived."""
        record = self._active.get(placement_id)
        if record is None or record.first_token_s is not None:
            return
        record.first_token_s = now_s
        # An answer that is not streamed comes whole: its first byte says nothing about the prefill.
        self._end_prefill(record, now_s, learn=record.request.streamed)
        self._succeeded(record.placement.decode.instance_id)

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        """The answer was sent completely."""
        record = self._end(placement_id, now_s, "finished", usage)
        if record is not None:
            record.usage = usage

    def cancelled(self, placement_id: str, now_s: float) -> None:
        """The client went away, or the router gave the request up."""
        self._end(placement_id, now_s, "cancelled")

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
        if instance.consecutive_failures >= self.suspension.after_failures and instance.health is Health.UP:
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
        instance.facts = facts
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
            rank.reported = None

    def report_load(self, instance_id: str, rank: int, load: ReportedLoad) -> None:
        """Gauges of one rank, polled from its engine."""
        self.cluster[instance_id].ranks[rank].reported = load

    def calibration(self, instance_class: InstanceClass) -> PrefillCalibration:
        """The learned correction for a class of instances."""
        return self.calibrations.setdefault(instance_class.name, PrefillCalibration())

    @property
    def active_placements(self) -> int:
        return len(self._active)

    def check_invariants(self) -> None:
        """Assert that reservations and active placements agree; for tests."""
        for instance in self.cluster:
            for rank in instance.ranks:
                assert rank.prefills.keys() <= self._active.keys(), "a prefill outlived its placement"
                assert rank.decodes.keys() <= self._active.keys(), "a decode outlived its placement"
                assert self._loads.active_decodes[rank.row] == len(rank.decodes), "a row is stale"
                assert rank.context_tokens == sum(rank.decodes.values()), "context tokens drifted"
        for record in self._active.values():
            decode = self._rank(record.placement.decode.instance_id, record.placement.decode.rank)
            assert record.placement.placement_id in decode.decodes, "an active placement lost its decode"

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

    def _candidates(self, request: PlacementRequest, model: str, now_s: float) -> Candidates:
        roster = self._roster(request, model, now_s)
        n, size, rows = request.prompt_tokens, len(roster.ranks), roster.rows
        overlap = self._overlap_tokens(request, roster)
        pending, decodes = self._loads.pending_prefills[rows], self._loads.active_decodes[rows]
        context = self._loads.context_tokens[rows]
        prefill_s, hand_off_s, tbt_s, queue_s = (np.zeros(size) for _ in range(4))
        for instance_class, members in roster.class_groups:
            scale = self.calibration(instance_class).scale
            cached = overlap[members]
            prefill_s[members] = scale * instance_class.prefill_s(n, cached)
            hand_off_s[members] = instance_class.hand_off_s(np.maximum(n - cached, 0))
            tbt_s[members] = instance_class.decode_step_s(decodes[members] + 1, context[members] + n)
        for i in np.flatnonzero(pending):
            queue_s[i] = roster.ranks[i].queue_s(now_s)
        return Candidates(
            ranks=roster.ranks,
            can_prefill=roster.can_prefill,
            can_decode=roster.can_decode,
            is_mixed=roster.is_mixed,
            prompt_tokens=n,
            overlap_tokens=overlap,
            queue_s=queue_s,
            prefill_s=prefill_s,
            hand_off_s=hand_off_s,
            tbt_s=tbt_s,
            context_tokens=context,
            pending_prefills=pending,
            active_decodes=decodes,
            placements=self._loads.placements[rows],
            excluded=roster.excluded,
            ttft_objective_s=self.objectives.ttft_s,
            tbt_objective_s=self.objectives.tbt_s,
        )

    def _overlap_tokens(self, request: PlacementRequest, roster: Roster) -> Ints:
        """Usable cached prefix of each rank: a fully cached prompt still recomputes its last block."""
        overlap = np.zeros(len(roster.ranks), dtype=np.int64)
        if not len(request.tokens):
            return overlap
        for group in roster.cache_groups:
            size = group.namespace.block_size
            hashes = sequence_hashes(request.tokens, size, cache_salt=request.cache_salt)
            namespace = group.namespace
            if request.tenant != namespace.tenant:
                namespace = replace(namespace, tenant=request.tenant)
            matched = self.index.match(namespace, hashes)[group.holder_ids, Tier.DEVICE]
            usable = (len(request.tokens) - 1) // size * size
            overlap[group.members] = np.minimum(matched.astype(np.int64) * size, usable)
        return overlap

    # ---- books ----

    def _rank(self, instance_id: str, rank: int) -> RankState:
        return self.cluster[instance_id].ranks[rank]

    def _end_prefill(self, record: PlacementRecord, now_s: float, *, learn: bool) -> None:
        """Release the prefill reservation; its service time teaches the calibration if ``learn``."""
        target = record.placement.prefill
        rank = self._rank(target.instance_id, target.rank)
        service_s = rank.end_prefill(record.placement.placement_id, now_s)
        self._loads.update(rank)
        if learn and service_s is not None:
            instance_class = self.cluster[target.instance_id].instance_class
            self.calibration(instance_class).observe(record.prefill_s, service_s)

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
        self._end_prefill(record, now_s, learn=False)
        decode = record.placement.decode
        rank = self._rank(decode.instance_id, decode.rank)
        rank.end_decode(placement_id)
        self._loads.update(rank)
        record.ended_s, record.outcome = now_s, outcome
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
