"""A scheduler that tells everything that enters it, and what it decides, to whoever records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import numpy as np

from cache_index import CacheIndex, Holder, sequence_hashes
from conductor import __version__
from conductor import journal as j
from conductor.admission import Gate
from conductor.cluster import Cluster, EngineFacts, InstanceState
from conductor.costs import Calibration, Distance, InstanceClass
from conductor.explanation import PlacementRecord
from conductor.placement import (
    InstanceFailure,
    Placement,
    PlacementError,
    PlacementRequest,
    RejectedError,
    Usage,
)
from conductor.prefix_lookup import IndexLookup, Levels, PrefixLookup
from conductor.rank import PlacedElsewhere, ReportedLoad
from conductor.roster import CacheGroup
from conductor.scheduler import Scheduler

Sink = Callable[[j.Frame], None]


class _OpenFrame:
    """A frame while its event is handled. Events inside of it are its consequences and no frames of their own."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._depth = 0
        self._event: j.AnyEvent | None = None
        self.found: list[Any] = []
        self.answers: list[int] = []
        self.decided: list[j.Decision | j.Refusal] = []
        self.prompt: j.Prompt | None = None

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    def of(self, event: j.AnyEvent) -> _OpenFrame:
        if self._depth == 0:
            self._event = event
            self.found, self.answers, self.decided, self.prompt = [], [], [], None
        return self

    def __enter__(self) -> _OpenFrame:
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        # What was refused as a mistake changed nothing.
        if (
            self._depth == 0
            and self._event is not None
            and (kind is None or issubclass(kind, PlacementError))
        ):
            self.sink(j.Frame(self._event, self.found, self.answers, self.decided, self.prompt))

    def refused(self, error: PlacementError) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, RejectedError) else None
        self.decided.append(j.Refusal(type(error).__name__, str(error), retry_after_s))


class _RecordingLookup:
    """Another lookup, whose answers are kept in the frame that is open."""

    def __init__(self, lookup: PrefixLookup, frame: _OpenFrame) -> None:
        self._lookup = lookup
        self._frame = frame

    def levels(self, request: PlacementRequest, group: CacheGroup) -> Levels | None:
        levels = self._lookup.levels(request, group)
        if self._frame.is_open:
            self._frame.found.append(None if levels is None else _held(levels, group))
        return levels

    def prefill_begins(
        self, placement_id: str, request: PlacementRequest, group: CacheGroup, holder: Holder
    ) -> None:
        self._lookup.prefill_begins(placement_id, request, group, holder)

    def prefill_ended(self, placement_id: str) -> None:
        self._lookup.prefill_ended(placement_id)

    def holder_left(self, holder: Holder) -> None:
        self._lookup.holder_left(holder)


class _RecordingGate(Gate):
    """Another gate's rule and predictions, which are kept in the frame that is open."""

    def __init__(self, gate: Gate, frame: _OpenFrame) -> None:
        super().__init__(gate.rule, gate.lengths)
        self._gate = gate
        self._frame = frame

    def output_tokens(self, request: PlacementRequest, beginning: int | None) -> int:
        tokens = self._gate.output_tokens(request, beginning)
        if self._frame.is_open:
            self._frame.answers.append(tokens)
        return tokens

    def observe(self, request: PlacementRequest, beginning: int | None, output_tokens: int) -> None:
        self._gate.observe(request, beginning, output_tokens)


def _held(levels: Levels, group: CacheGroup) -> Levels:
    """[position in the group, blocks by tier] of those that hold anything; tiers are cumulative."""
    positions = np.flatnonzero(levels[group.holder_ids, -1])
    held = levels[group.holder_ids[positions]]
    return np.column_stack((positions.astype(np.int32), held))


class RecordedScheduler(Scheduler):
    """Every method that changes the scheduler's state is one frame; see `conductor.journal`."""

    def __init__(
        self,
        cluster: Cluster,
        index: CacheIndex,
        *arguments: Any,
        lookup: PrefixLookup | None = None,
        gate: Gate | None = None,
        **options: Any,
    ) -> None:
        """As `Scheduler`. Nothing is recorded before `record_to`."""
        self._frame = _OpenFrame(lambda frame: None)
        super().__init__(
            cluster,
            index,
            *arguments,
            lookup=_RecordingLookup(lookup or IndexLookup(index), self._frame),
            gate=_RecordingGate(gate or Gate(), self._frame),
            **options,
        )

    def record_to(self, sink: Sink) -> None:
        """From now on every frame goes to ``sink``."""
        self._frame.sink = sink

    def place(self, request: PlacementRequest, now_s: float) -> Placement:
        with self._frame.of(j.Placed(now_s, _recorded_request(request))) as frame:
            try:
                placement = super().place(request, now_s)
            except PlacementError as error:
                frame.refused(error)
                raise
            record = self._active[placement.placement_id]
            frame.decided.append(_decision(record))
            if getattr(self.policy, "remembers_prompts", False):
                frame.prompt = _prompt(record)
            return placement

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        with self._frame.of(j.PrefillFinished(now_s, placement_id)) as frame:
            try:
                super().prefill_finished(placement_id, now_s)
            except PlacementError as error:
                frame.refused(error)
                raise

    def first_token(self, placement_id: str, now_s: float) -> None:
        with self._frame.of(j.FirstToken(now_s, placement_id)):
            super().first_token(placement_id, now_s)

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        with self._frame.of(j.Finished(now_s, placement_id, usage)):
            super().finished(placement_id, now_s, usage)

    def cancelled(self, placement_id: str, now_s: float) -> None:
        with self._frame.of(j.Cancelled(now_s, placement_id)):
            super().cancelled(placement_id, now_s)

    def expired(self, placement_id: str, now_s: float) -> None:
        with self._frame.of(j.Expired(now_s, placement_id)):
            super().expired(placement_id, now_s)

    def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None:
        with self._frame.of(j.Failed(now_s, placement_id, failure)):
            super().failed(placement_id, now_s, failure)

    def instance_up(self, instance_id: str, facts: EngineFacts) -> None:
        with self._frame.of(j.InstanceUp(instance_id, facts)):
            super().instance_up(instance_id, facts)

    def instance_down(self, instance_id: str, reason: str) -> None:
        with self._frame.of(j.InstanceDown(instance_id, reason)):
            super().instance_down(instance_id, reason)

    def report_load(self, instance_id: str, rank: int, load: ReportedLoad) -> None:
        with self._frame.of(j.LoadReported(instance_id, rank, load)):
            super().report_load(instance_id, rank, load)

    def placed_elsewhere(self, placed: Mapping[Holder, PlacedElsewhere]) -> None:
        told = [(holder.instance_id, holder.rank, load) for holder, load in placed.items()]
        with self._frame.of(j.ElsewherePlaced(told)):
            super().placed_elsewhere(placed)

    def add_instance(self, instance: InstanceState) -> None:
        with self._frame.of(j.InstanceAdded(_recorded_instance(instance), instance.instance_class)):
            super().add_instance(instance)

    def drain_instance(self, instance_id: str) -> None:
        with self._frame.of(j.InstanceDrained(instance_id)):
            super().drain_instance(instance_id)

    def withhold_instance(self, instance_id: str, reason: str) -> None:
        with self._frame.of(j.InstanceWithheld(instance_id, reason)):
            super().withhold_instance(instance_id, reason)

    def readmit_instance(self, instance_id: str) -> None:
        with self._frame.of(j.InstanceReadmitted(instance_id)):
            super().readmit_instance(instance_id)

    def remove_instance(self, instance_id: str) -> None:
        with self._frame.of(j.InstanceRemoved(instance_id)):
            super().remove_instance(instance_id)

    def reset_calibration(self, class_name: str) -> None:
        with self._frame.of(j.CalibrationReset(class_name)):
            super().reset_calibration(class_name)


def make_header(
    scheduler: Scheduler,
    policy: j.RecordedPolicy,
    admission: j.RecordedPolicy | None = None,
    *,
    id_prefix: str = "",
    started: datetime | None = None,
) -> j.Header:
    """The first line of a recording. Raises ValueError when the scheduler has a past already."""
    instances = list(scheduler.cluster)
    if scheduler.active_placements or any(instance.facts is not None for instance in instances):
        raise ValueError("a recording must begin before the first instance is up")
    classes: dict[str, InstanceClass] = {i.instance_class.name: i.instance_class for i in instances}
    links = scheduler.cluster.topology.links
    return j.Header(
        recording=j.FORMAT,
        version=j.VERSION,
        written_by=__version__,
        started=(started or datetime.now(UTC)).isoformat(),
        policy=policy,
        ttft_objective_s=scheduler.objectives.ttft_s,
        tbt_objective_s=scheduler.objectives.tbt_s,
        tbt_share=scheduler.objectives.tbt_share,
        suspension=scheduler.suspension,
        id_prefix=id_prefix,
        admission=admission or j.RecordedPolicy("accept_all"),
        links=[links[distance] for distance in Distance],
        pool_links=list(scheduler.cluster.topology.pool_links),
        classes=list(classes.values()),
        instances=[_recorded_instance(instance) for instance in instances],
        aliases=scheduler.aliases,
        calibrations={name: _learned(each) for name, each in scheduler.calibrations.items()},
    )


def _learned(calibration: Calibration) -> tuple[j.LearnedFactor, j.LearnedFactor]:
    prefill, decode = calibration.prefill, calibration.decode
    return (
        j.LearnedFactor(prefill.factor, prefill.observations, prefill.raw_s),
        j.LearnedFactor(decode.factor, decode.observations, decode.raw_s),
    )


def _recorded_instance(instance: InstanceState) -> j.RecordedInstance:
    return j.RecordedInstance(
        id=instance.instance_id,
        url=instance.url,
        role=instance.role,
        instance_class=instance.instance_class.name,
        protocol=instance.protocol,
        ranks=len(instance.ranks),
        block_size=instance.block_size_override,
        location=instance.location,
        fetches_from_peers=instance.fetches_from_peers,
        streams_layers=instance.streams_layers,
    )


def _recorded_request(request: PlacementRequest) -> j.RecordedRequest:
    on = request.prefill_on
    return j.RecordedRequest(
        request_id=request.request_id,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        token_source=request.token_source,
        streamed=request.streamed,
        max_output_tokens=request.max_output_tokens,
        tenant=request.tenant,
        route=request.route,
        session=request.session,
        priority=request.priority,
        arrived_s=request.arrived_s,
        ttft_objective_s=request.ttft_objective_s,
        tbt_objective_s=request.tbt_objective_s,
        prefill_on=None if on is None else (on.instance_id, on.rank),
        excluded=sorted(request.excluded),
        retry_of=request.retry_of,
        hedge_of=request.hedge_of,
    )


def _decision(record: PlacementRecord) -> j.Decision:
    placement, plan = record.placement, record.placement.plan
    return j.Decision(
        id=placement.placement_id,
        prefill=(placement.prefill.instance_id, placement.prefill.rank),
        decode=(placement.decode.instance_id, placement.decode.rank),
        overlap_tokens=placement.overlap_tokens,
        plan_tokens=plan.tokens,
        segments=[
            j.RecordedSegment(s.start, s.stop, s.holder.instance_id, s.holder.rank, int(s.tier))
            for s in plan.segments
        ],
        fetch_s=plan.fetch_s,
        prefill_s=plan.prefill_s,
        queue_s=record.queue_s,
        hand_off_s=record.hand_off_s,
        ttft_s=placement.predicted_ttft_s,
        tbt_s=placement.predicted_tbt_s,
    )


def _prompt(record: PlacementRecord) -> j.Prompt | None:
    """The hashes as the policy saw them."""
    request = record.request
    if request.hashes is not None and request.hashes_block_size:
        return j.Prompt(request.hashes_block_size, request.hashes.tolist())
    if not len(request.tokens) or record.candidates is None:
        return None
    size = record.candidates.block_size
    hashes = sequence_hashes(request.tokens, size, cache_salt=request.cache_salt)
    return j.Prompt(size, hashes.tolist())
