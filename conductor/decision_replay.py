"""A recording put through the scheduler again: every decision must come out the same, to the last bit.

The prefix lookup answers from the recording, so neither an index nor a prompt is needed. Another policy can be
asked at every decision what it would have chosen in the state that the recorded decisions had led to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_index import CacheIndex, Holder, Tier
from conductor import journal as j
from conductor.admission import AdmissionRule, Gate, make_rule
from conductor.cluster import Cluster, InstanceState, make_instance
from conductor.costs import Calibration, Distance, InstanceClass, Topology
from conductor.costs.calibration import Scale
from conductor.placement import Objectives, PlacementError, PlacementRequest
from conductor.policies import Policy, make_policy
from conductor.prefix_lookup import Levels
from conductor.recorded_scheduler import RecordedScheduler
from conductor.roster import CacheGroup


class ReplayError(Exception):
    """The recording cannot be put through this scheduler; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out otherwise."""

    line: int
    request_id: str
    recorded: j.Decision | j.Refusal | None
    replayed: j.Decision | j.Refusal | None

    def fields(self) -> list[str]:
        """What differs, in words."""
        if self.recorded is None or self.replayed is None or type(self.recorded) is not type(self.replayed):
            return [f"recorded {_short(self.recorded)}, replayed {_short(self.replayed)}"]
        return [
            f"{name}: recorded {getattr(self.recorded, name)!r}, replayed {getattr(self.replayed, name)!r}"
            for name in self.recorded.__struct_fields__
            if getattr(self.recorded, name) != getattr(self.replayed, name)
        ]


@dataclass(slots=True)
class ReplayReport:
    """Counts of one replay; it stops at the first difference."""

    events: int = 0
    decisions: int = 0
    refusals: int = 0
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class OtherChoice:
    """A recorded decision beside another policy's; None where that policy finds no placement."""

    id: str
    recorded: j.Decision
    prefill: tuple[str, int] | None
    decode: tuple[str, int] | None
    ttft_s: float | None
    tbt_s: float | None

    @property
    def equal(self) -> bool:
        return (self.prefill, self.decode) == (self.recorded.prefill, self.recorded.decode)


@dataclass(slots=True)
class PolicyReport:
    """What another policy would have chosen, decision by decision."""

    policy: str
    choices: list[OtherChoice] = field(default_factory=list)


class _RecordedLookup:
    """The answers of one frame, in the order in which they were given."""

    def __init__(self) -> None:
        self._found: Sequence[j.Found] = ()
        self._next = 0

    def answer_from(self, frame: j.Frame) -> None:
        self._found, self._next = frame.found, 0

    def levels(self, request: PlacementRequest, group: CacheGroup) -> Levels | None:
        if self._next >= len(self._found):
            raise ReplayError("the scheduler asks for more cached prefixes than were recorded")
        found = self._found[self._next]
        self._next += 1
        if found is None:
            return None
        levels = np.zeros((int(group.holder_ids.max(initial=-1)) + 1, len(Tier)), np.int32)
        if found:
            rows = np.array(found, np.int32)
            if rows.shape[1] != 1 + len(Tier) or rows[:, 0].max() >= len(group.holder_ids):
                raise ReplayError("the recorded cached prefixes are of another cache group")
            levels[group.holder_ids[rows[:, 0]]] = rows[:, 1:]
        return levels

    def prefill_begins(
        self, placement_id: str, request: PlacementRequest, group: CacheGroup, holder: Holder
    ) -> None:
        pass  # what that changes is in the recorded answers

    def prefill_ended(self, placement_id: str) -> None:
        pass

    def holder_left(self, holder: Holder) -> None:
        pass


class _RecordedGate(Gate):
    """The predictions of one frame; nothing is learned."""

    def __init__(self, rule: AdmissionRule) -> None:
        super().__init__(rule)
        self._answers: Sequence[int] = ()
        self._next = 0

    def answer_from(self, frame: j.Frame) -> None:
        self._answers, self._next = frame.answers, 0

    def output_tokens(self, request: PlacementRequest, beginning: int | None) -> int:
        if self._next >= len(self._answers):
            raise ReplayError("the scheduler asks for more answer lengths than were recorded")
        self._next += 1
        return self._answers[self._next - 1]

    def observe(self, request: PlacementRequest, beginning: int | None, output_tokens: int) -> None:
        pass


class DecisionReplay:
    """A scheduler as the header describes it, and the frames that go through it."""

    def __init__(self, recording: j.Recording) -> None:
        """Raises ReplayError for a header that this conductor cannot follow."""
        header = recording.header
        self._recording = recording
        self._lookup = _RecordedLookup()
        self._replayed: list[j.Frame] = []
        try:
            self._gate = _RecordedGate(make_rule(header.admission.name, _numbers(header.admission)))
            self.scheduler = _make_scheduler(header, self._lookup, self._gate)
        except (KeyError, ValueError) as error:
            raise ReplayError(f"{recording.path}, line 1: {error}") from None
        self.scheduler.record_to(self._replayed.append)

    def check(self) -> ReplayReport:
        """Compare every decision with the recorded one, up to the first difference.

        Raises RecordingError and ReplayError.
        """
        report = ReplayReport()
        for line, frame in self._recording.frames():
            replayed = self._apply(line, frame)
            report.events += 1
            if replayed != frame.decided:
                report.difference = _difference(line, frame, replayed)
                return report
            report.decisions += sum(isinstance(each, j.Decision) for each in replayed)
            report.refusals += sum(isinstance(each, j.Refusal) for each in replayed)
        return report

    def compare(self, policy: Policy) -> PolicyReport:
        """Ask ``policy`` beside every recorded decision; the recorded ones are carried out.

        Raises RecordingError, and ReplayError when the recording itself does not replay.
        """
        report = PolicyReport(policy.name)
        prompts = getattr(policy, "remembers_prompts", False)
        for line, frame in self._recording.frames():
            other: tuple[Any, ...] = (None, None, None, None)
            event = frame.do
            if isinstance(event, j.Placed):
                if prompts and frame.prompt is None and event.request.prompt_tokens:
                    raise ReplayError(
                        f"{policy.name} remembers prompts, and the recording (line {line}) has none: they are "
                        "recorded only under a policy that remembers them"
                    )
                self._answer_from(frame)
                try:
                    record = self.scheduler.consider(
                        _request(event.request, frame.prompt), event.at_s, policy
                    )
                except PlacementError:
                    pass
                else:
                    p = record.placement
                    other = (
                        (p.prefill.instance_id, p.prefill.rank),
                        (p.decode.instance_id, p.decode.rank),
                        p.predicted_ttft_s,
                        p.predicted_tbt_s,
                    )
            replayed = self._apply(line, frame)
            if replayed != frame.decided:
                raise ReplayError(
                    f"line {line}: the recorded policy itself decides otherwise here; run without --policy "
                    "to see the difference"
                )
            for decision in frame.decided:
                if isinstance(decision, j.Decision):
                    report.choices.append(OtherChoice(decision.id, decision, *other))
        return report

    def _apply(self, line: int, frame: j.Frame) -> list[j.Decision | j.Refusal]:
        self._answer_from(frame)
        self._replayed.clear()
        try:
            _happen(self.scheduler, frame)
        except PlacementError:
            pass
        except (ReplayError, KeyError, ValueError, IndexError) as error:
            raise ReplayError(f"line {line}: {frame.do.__struct_config__.tag}: {error}") from None
        return self._replayed[0].decided if self._replayed else []

    def _answer_from(self, frame: j.Frame) -> None:
        self._lookup.answer_from(frame)
        self._gate.answer_from(frame)


def _numbers(rule: j.RecordedPolicy) -> dict[str, float]:
    return {name: float(value) for name, value in rule.parameters.items()}


def _make_scheduler(header: j.Header, lookup: _RecordedLookup, gate: Gate) -> RecordedScheduler:
    classes = {each.name: each for each in header.classes}
    links = dict(zip(Distance, header.links, strict=True))
    cluster = Cluster(Topology(links, header.pool_links))
    for instance in header.instances:
        cluster.add(_instance(instance, classes[instance.instance_class]))
    return RecordedScheduler(
        cluster,
        CacheIndex(),
        make_policy(header.policy.name, header.policy.parameters, header.policy.seed),
        Objectives(header.ttft_objective_s, header.tbt_objective_s, header.tbt_share),
        header.suspension,
        aliases=dict(header.aliases),
        calibrations={
            name: Calibration(
                Scale(prefill.factor, prefill.observations, prefill.raw_s),
                Scale(decode.factor, decode.observations, decode.raw_s),
            )
            for name, (prefill, decode) in header.calibrations.items()
        },
        lookup=lookup,
        gate=gate,
        id_prefix=header.id_prefix,
        records=1,
    )


def _instance(recorded: j.RecordedInstance, instance_class: InstanceClass) -> InstanceState:
    return make_instance(
        instance_id=recorded.id,
        url=recorded.url,
        role=recorded.role,
        instance_class=instance_class,
        protocol=recorded.protocol,
        ranks=recorded.ranks,
        block_size=recorded.block_size,
        location=recorded.location,
        fetches_from_peers=recorded.fetches_from_peers,
        streams_layers=recorded.streams_layers,
    )


def _request(recorded: j.RecordedRequest, prompt: j.Prompt | None) -> PlacementRequest:
    on = recorded.prefill_on
    return PlacementRequest(
        request_id=recorded.request_id,
        model=recorded.model,
        tokens=np.empty(0, np.uint32),
        prompt_tokens=recorded.prompt_tokens,
        token_source=recorded.token_source,
        streamed=recorded.streamed,
        max_output_tokens=recorded.max_output_tokens,
        tenant=recorded.tenant,
        route=recorded.route,
        session=recorded.session,
        priority=recorded.priority,
        arrived_s=recorded.arrived_s,
        ttft_objective_s=recorded.ttft_objective_s,
        tbt_objective_s=recorded.tbt_objective_s,
        hashes=None if prompt is None else np.array(prompt.hashes, np.uint64),
        hashes_block_size=None if prompt is None else prompt.block_size,
        prefill_on=None if on is None else Holder(*on),
        excluded=frozenset(recorded.excluded),
        retry_of=recorded.retry_of,
        hedge_of=recorded.hedge_of,
    )


def _happen(scheduler: RecordedScheduler, frame: j.Frame) -> None:
    """Let the event of a frame enter the scheduler. Raises PlacementError as `Scheduler.place` does."""
    match frame.do:
        case j.Placed(at_s, request):
            scheduler.place(_request(request, frame.prompt), at_s)
        case j.PrefillFinished(at_s, placement_id):
            scheduler.prefill_finished(placement_id, at_s)
        case j.FirstToken(at_s, placement_id):
            scheduler.first_token(placement_id, at_s)
        case j.Finished(at_s, placement_id, usage):
            scheduler.finished(placement_id, at_s, usage)
        case j.Cancelled(at_s, placement_id):
            scheduler.cancelled(placement_id, at_s)
        case j.Expired(at_s, placement_id):
            scheduler.expired(placement_id, at_s)
        case j.Failed(at_s, placement_id, failure):
            scheduler.failed(placement_id, at_s, failure)
        case j.InstanceUp(instance, facts):
            scheduler.instance_up(instance, facts)
        case j.InstanceDown(instance, reason):
            scheduler.instance_down(instance, reason)
        case j.LoadReported(instance, rank, load):
            scheduler.report_load(instance, rank, load)
        case j.ElsewherePlaced(placed):
            scheduler.placed_elsewhere({Holder(instance, rank): load for instance, rank, load in placed})
        case j.InstanceAdded(added, instance_class):
            scheduler.add_instance(_instance(added, instance_class))
        case j.InstanceDrained(instance):
            scheduler.drain_instance(instance)
        case j.InstanceWithheld(instance, reason):
            scheduler.withhold_instance(instance, reason)
        case j.InstanceReadmitted(instance):
            scheduler.readmit_instance(instance)
        case j.InstanceRemoved(instance):
            scheduler.remove_instance(instance)
        case j.CalibrationReset(class_name):
            scheduler.reset_calibration(class_name)


def _difference(line: int, frame: j.Frame, replayed: list[j.Decision | j.Refusal]) -> Difference:
    recorded = frame.decided
    at = next(
        (i for i, pair in enumerate(zip(recorded, replayed, strict=False)) if pair[0] != pair[1]),
        min(len(recorded), len(replayed)),
    )
    request_id = frame.do.request.request_id if isinstance(frame.do, j.Placed) else ""
    return Difference(
        line,
        request_id,
        recorded[at] if at < len(recorded) else None,
        replayed[at] if at < len(replayed) else None,
    )


def _short(decision: j.Decision | j.Refusal | None) -> str:
    if decision is None:
        return "no decision"
    if isinstance(decision, j.Refusal):
        return f"refused ({decision.reason})"
    return f"{decision.prefill[0]} -> {decision.decode[0]}"
