"""Recorded decisions come out the same when they are decided again, whatever happened."""

import contextlib
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster_factory import BLOCK, facts, hold, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from recorded import make_recorded, make_state
from typer.testing import CliRunner

from cache_index import Holder, Namespace, Tier, sequence_hashes
from conductor import journal
from conductor.cli import app
from conductor.costs import PoolLink
from conductor.decision_replay import DecisionReplay, ReplayError
from conductor.journal import Decision, Frame, Header, RecordingError, open_recording
from conductor.journal_writer import JournalWriter
from conductor.placement import FailureKind, InstanceFailure, PlacementError, Usage
from conductor.policies import make_policy
from conductor.rank import PlacedElsewhere, ReportedLoad
from conductor.recorded_scheduler import RecordedScheduler, make_header

POLICIES: list[tuple[str, dict[str, str | int], str]] = [
    ("slo", {}, "accept_all"),
    ("slo", {}, "predicted"),
    ("slo", {}, "baseline"),
    ("mooncake", {}, "early_predicted"),
    ("random", {}, "accept_all"),
    ("round_robin", {}, "accept_all"),
    ("smg", {"mode": "approximate"}, "accept_all"),
]


def write(path: Path, header: Header, frames: list[Frame]) -> Path:
    writer = JournalWriter(path, header)
    for frame in frames:
        writer.put(frame)
    writer.close()
    assert (writer.frames, writer.dropped) == (len(frames), 0)
    return path


def recorded_run(path: Path, policy: str = "slo", requests: int = 12) -> Path:
    """A short run with cached prefixes, loads and endings."""
    scheduler, header, frames = make_recorded(policy=policy)
    for instance in scheduler.cluster:
        scheduler.instance_up(instance.instance_id, facts())
    for i in range(requests):
        wanted = request(2048, seed=i % 3)
        hold(scheduler, "p1", wanted.tokens[: 256 * (i % 4)])
        placement = scheduler.place(wanted, 0.1 * i)
        if i % 2:
            scheduler.first_token(placement.placement_id, 0.1 * i + 0.05)
            scheduler.finished(placement.placement_id, 0.1 * i + 0.09, Usage(2048, 20, 0))
    return write(path, header, frames)


class RecordedMachine(RuleBasedStateMachine):
    """Any events, some of them nonsense; what was recorded replays to the same decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.open: list[str] = []

    @initialize(chosen=st.sampled_from(POLICIES), up=st.integers(3, 5))
    def begin(self, chosen: tuple[str, dict[str, str | int], str], up: int) -> None:
        policy, parameters, admission = chosen
        self.scheduler, self.header, self.frames = make_recorded(
            policy=policy, parameters=parameters, admission=admission
        )
        for instance in list(self.scheduler.cluster)[:up]:
            self.scheduler.instance_up(instance.instance_id, facts())

    @rule(
        tokens=st.integers(1, 9000),
        streamed=st.booleans(),
        exclude=st.sets(st.sampled_from(["p0", "d2", "m4"])),
        model=st.sampled_from(["llama", "gpt-4", "adapter", "absent"]),
        fields=st.fixed_dictionaries(
            {},
            optional={
                "max_output_tokens": st.integers(1, 500),
                "ttft_objective_s": st.floats(0.01, 5),
                "priority": st.integers(-2, 2),
                "tenant": st.sampled_from(["a", "b"]),
            },
        ),
    )
    def place(self, tokens: int, streamed: bool, exclude: set[str], model: str, fields: Any) -> None:
        wanted = request(
            tokens, seed=tokens % 5, model=model, streamed=streamed, excluded=frozenset(exclude), **fields
        )
        with contextlib.suppress(PlacementError):
            self.open.append(self.scheduler.place(wanted, self.now_s).placement_id)

    @rule(count=st.integers(2, 4))
    def place_together(self, count: int) -> None:
        self.scheduler.place_together([request(3000, seed=20 + i) for i in range(count)], self.now_s)

    @rule(tokens=st.integers(1, 4000))
    def ask_without_placing(self, tokens: int) -> None:
        with contextlib.suppress(PlacementError):
            self.scheduler.consider(request(tokens), self.now_s)
        self.scheduler.why_not_ready(self.now_s)

    @rule(seed=st.integers(0, 4), output_tokens=st.integers(8, 2000), took_s=st.floats(0.01, 3))
    def serve(self, seed: int, output_tokens: int, took_s: float) -> None:
        """A request from beginning to end: something is learned from it."""
        with contextlib.suppress(PlacementError):
            placement_id = self.scheduler.place(request(3000, seed=seed), self.now_s).placement_id
            self.now_s += took_s
            self.scheduler.prefill_finished(placement_id, self.now_s)
            self.scheduler.first_token(placement_id, self.now_s)
            self.now_s += took_s
            self.scheduler.finished(placement_id, self.now_s, Usage(3000, output_tokens, 0))

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(data=st.data(), what=st.sampled_from(["prefill", "first", "finish", "cancel", "expire", "fail"]))
    def progress(self, data: st.DataObject, what: str) -> None:
        if not self.open:
            return
        placement_id, scheduler = data.draw(st.sampled_from(self.open)), self.scheduler
        if what == "prefill":
            with contextlib.suppress(PlacementError):
                scheduler.prefill_finished(placement_id, self.now_s)
        elif what == "first":
            scheduler.first_token(placement_id, self.now_s)
        elif what == "finish":
            scheduler.finished(placement_id, self.now_s, Usage(100, data.draw(st.integers(0, 900)), None))
        elif what == "cancel":
            scheduler.cancelled(placement_id, self.now_s)
        elif what == "expire":
            scheduler.expired(placement_id, self.now_s)
        else:
            at = data.draw(st.sampled_from(["p0", "p1", "d2", "m4", "gone"]))
            kind = data.draw(st.sampled_from(list(FailureKind)))
            scheduler.failed(placement_id, self.now_s, InstanceFailure(at, kind, "it broke"))

    @rule(
        instance=st.sampled_from(["p0", "p1", "m4", "p9"]),
        blocks=st.integers(1, 60),
        seed=st.integers(0, 4),
        tier=st.sampled_from([Tier.DEVICE, Tier.HOST]),
    )
    def cache(self, instance: str, blocks: int, seed: int, tier: Tier) -> None:
        if self.scheduler.cluster.get(instance) is not None:
            holder = self.scheduler.cluster[instance].ranks[0].holder
            if self.scheduler.index.holder_id(holder) is not None:
                hashes = sequence_hashes(request(9000, seed=seed).tokens[: BLOCK * blocks], BLOCK)
                self.scheduler.index.store(holder, tier, Namespace("llama", BLOCK), hashes)

    @rule(
        instance=st.sampled_from(["p0", "p1", "d2", "d3", "m4", "p9"]),
        what=st.sampled_from(
            ["up", "down", "load", "elsewhere", "drain", "withhold", "readmit", "remove", "add", "reset"]
        ),
        usage=st.floats(0, 1),
    )
    def change(self, instance: str, what: str, usage: float) -> None:
        scheduler = self.scheduler
        known = scheduler.cluster.get(instance) is not None
        if what == "add" and not known:
            scheduler.add_instance(make_state(instance))
        elif what == "reset":
            with contextlib.suppress(KeyError):
                scheduler.reset_calibration("llama-3.1-8b-h100")
        elif known and what == "up":
            scheduler.instance_up(instance, facts(publishes_events=usage < 0.5))
        elif known and what == "down":
            scheduler.instance_down(instance, "connection refused")
        elif known and what == "load":
            scheduler.report_load(instance, 0, ReportedLoad(3, 1, usage, self.now_s, preemptions=4))
        elif known and what == "elsewhere":
            others = PlacedElsewhere(self.now_s, 4.0 * usage, 2, 4_000, 3, 9_000, 1)
            scheduler.placed_elsewhere({Holder(instance): others} if usage > 0.2 else {})
        elif known and what == "drain":
            scheduler.drain_instance(instance)
        elif known and what == "withhold":
            scheduler.withhold_instance(instance, "its pod is not ready")
        elif known and what == "readmit":
            scheduler.readmit_instance(instance)
        elif known and what == "remove" and len(scheduler.cluster) > 1:
            scheduler.remove_instance(instance)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        decided = [d for frame in self.frames for d in frame.decided]
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "run.jsonl", self.header, self.frames)
            report = DecisionReplay(open_recording(path)).check()
        assert report.difference is None, report.difference.fields()
        assert report.decisions + report.refusals == len(decided)
        assert report.events == len(self.frames)


RecordedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRecordedMachine = RecordedMachine.TestCase


def test_every_event_is_recorded_and_every_other_method_only_reads() -> None:
    reads = {
        "suspension",
        "consider", "models", "why_not_ready", "calibration", "check_invariants", "active_placements", "find",
        "record_to", "objectives", "aliases", "calibrations", "anywhere", "check_served",
    }  # fmt: skip
    made_of_events = {"place_together"}  # one `place` each
    public = {name for name in dir(RecordedScheduler) if not name.startswith("_")}
    recorded = {name for name in vars(RecordedScheduler) if not name.startswith("_")}
    assert public - reads - made_of_events == recorded - {"record_to"}


def test_times_and_factors_read_back_exactly(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl")
    scheduler, _, _ = make_recorded()
    recording = open_recording(path)
    assert recording.header.classes[0] == next(iter(scheduler.cluster)).instance_class
    decisions = [d for _, frame in recording.frames() for d in frame.decided]
    assert len(decisions) == 12
    assert all(isinstance(d, Decision) and d.ttft_s != round(d.ttft_s, 9) for d in decisions)
    assert recording.end is not None and recording.end.end == "closed"


def test_what_lies_in_slower_tiers_is_recorded_too(tmp_path: Path) -> None:
    scheduler, header, frames = make_recorded(roles="mm")
    for instance in scheduler.cluster:
        scheduler.instance_up(instance.instance_id, facts())
    wanted = request(8192)
    holder = scheduler.cluster["m0"].ranks[0].holder
    scheduler.index.store(holder, Tier.HOST, Namespace("llama", BLOCK), sequence_hashes(wanted.tokens, BLOCK))
    placement = scheduler.place(wanted, 0.0)
    assert [s.tier for s in placement.plan.segments] == [Tier.HOST]
    path = write(tmp_path / "run.jsonl", header, frames)
    assert DecisionReplay(open_recording(path)).check().difference is None


def test_what_waits_for_a_pools_link_is_recorded_too(tmp_path: Path) -> None:
    link = PoolLink(Tier.REMOTE, 20e9, frozenset({"m0", "m1"}))
    scheduler, header, frames = make_recorded(roles="mm", pool_links=[link])
    for instance in scheduler.cluster:
        scheduler.instance_up(instance.instance_id, facts())
        holder, wanted = instance.ranks[0].holder, request(8192)
        hashes = sequence_hashes(wanted.tokens, BLOCK)
        scheduler.index.store(holder, Tier.REMOTE, Namespace("llama", BLOCK), hashes)
    loads_s = [scheduler.place(request(8192), 0.0).plan.fetch_s for _ in range(6)]
    assert len(set(loads_s)) > 2
    path = write(tmp_path / "run.jsonl", header, frames)
    recording = open_recording(path)
    assert recording.header.pool_links == [link]
    assert DecisionReplay(recording).check().difference is None


def test_looking_at_the_scheduler_changes_no_decision(tmp_path: Path) -> None:
    scheduler, header, frames = make_recorded(roles="mm")
    for instance in scheduler.cluster:
        scheduler.instance_up(instance.instance_id, facts())
    there = {"excluded": frozenset({"m1"})}
    doomed = [scheduler.place(request(64, **there), 0.0).placement_id for _ in range(3)]
    error = InstanceFailure("m0", FailureKind.ERROR, "HTTP 500")
    scheduler.failed(doomed[0], 0.1, error)
    scheduler.failed(doomed[1], 0.1, error)  # suspended until 2.1
    assert scheduler.why_not_ready(3.0) is None  # which ends the suspension
    scheduler.failed(doomed[2], 3.1, error)  # and this begins another
    assert scheduler.place(request(64), 3.2).prefill.instance_id == "m1"
    with pytest.raises(PlacementError):
        scheduler.place(request(64, **there), 3.2)
    path = write(tmp_path / "run.jsonl", header, frames)
    assert DecisionReplay(open_recording(path)).check().difference is None


def test_a_decision_that_differs_is_named(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl")
    lines = path.read_text().splitlines()
    at = [i for i, line in enumerate(lines) if '"place"' in line][3]
    changed = json.loads(lines[at])
    changed["decided"][0]["ttft_s"] += 1e-15
    lines[at] = json.dumps(changed)
    path.write_text("\n".join(lines) + "\n")
    report = DecisionReplay(open_recording(path)).check()
    assert (report.decisions, report.difference is None) == (3, False)
    assert report.difference is not None
    assert report.difference.line == at + 1
    [said] = report.difference.fields()
    assert said.startswith("ttft_s: recorded ")
    result = CliRunner().invoke(app, ["replay", "--decisions", str(path)])
    assert result.exit_code == 1
    assert f"line {at + 1}: the decision for request 'r' differs, after 3 equal ones" in result.output


def test_the_command_says_that_all_are_equal(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl")
    result = CliRunner().invoke(app, ["replay", "--decisions", str(path)])
    assert result.exit_code == 0, result.output
    assert "12 decisions and 0 refusals of slo" in result.output
    figures = json.loads(CliRunner().invoke(app, ["replay", "--decisions", str(path), "--json", "-"]).output)
    assert (figures["equal"], figures["decisions"], figures["ended"]) == (True, 12, "closed")


def test_another_policy_is_asked_in_the_recorded_states(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl")
    same = DecisionReplay(open_recording(path)).compare(make_policy("slo"))
    assert [c.equal for c in same.choices] == [True] * 12
    assert [c.ttft_s for c in same.choices] == [c.recorded.ttft_s for c in same.choices]
    other = DecisionReplay(open_recording(path)).compare(make_policy("round_robin"))
    assert sum(not c.equal for c in other.choices) > 0
    result = CliRunner().invoke(
        app, ["replay", "--decisions", str(path), "--policy", "round_robin", "--json", "-"]
    )
    figures = json.loads(result.output)
    assert (figures["policy"], figures["recorded_policy"], figures["decisions"]) == ("round_robin", "slo", 12)
    assert figures["equal_share"] == sum(c.equal for c in other.choices) / 12
    assert figures["ttft_s"]["recorded"]["mean"] < figures["ttft_s"]["round_robin"]["mean"]


def test_a_policy_that_remembers_prompts_needs_a_recording_that_has_them(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl")
    smg = make_policy("smg", {"mode": "approximate"})
    with pytest.raises(ReplayError, match="smg remembers prompts, and the recording"):
        DecisionReplay(open_recording(path)).compare(smg)


def test_a_last_line_that_is_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)[:-1]
    path.write_bytes(b"".join(lines)[:-20])
    recording = open_recording(path)
    report = DecisionReplay(recording).check()
    assert (report.difference, report.events, recording.truncated) == (None, len(lines) - 2, True)
    result = CliRunner().invoke(app, ["replay", "--decisions", str(path)])
    assert result.exit_code == 0
    assert "the last line is cut off and was left out" in result.output


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is no recording of decisions"),
        (b'{"timestamp": 1, "input_length": 5}\n', "is no recording of decisions"),
        (b"\x00\xff\n", "is no recording of decisions"),
        (b'{"recording":"conductor decisions","version":99}\n', "has version 99 of the format"),
        (b'{"recording":"conductor decisions","version":3}\n', "line 1: Object missing required field"),
    ],
)
def test_a_foreign_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=reason):
        open_recording(path)
    result = CliRunner().invoke(app, ["replay", "--decisions", str(path)])
    assert (result.exit_code, reason in result.output.replace("\n", " ")) == (2, True)


def test_a_missing_file_and_a_broken_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*No such file"):
        open_recording(tmp_path / "none")
    path = recorded_run(tmp_path / "run.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b'{"do":{"event":"sneeze"}}\n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(RecordingError, match="line 5: Invalid value 'sneeze'"):
        DecisionReplay(open_recording(path)).check()


def test_a_recording_begins_before_anything_is_up() -> None:
    scheduler, header, _ = make_recorded()
    scheduler.instance_up("p0", facts())
    with pytest.raises(ValueError, match="must begin before the first instance is up"):
        make_header(scheduler, header.policy)


def test_a_disk_that_is_too_slow_ends_the_recording_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, header, _ = make_recorded()
    frame = Frame(journal.Cancelled(1.0, "t-1"))
    writer = JournalWriter(tmp_path / "run.jsonl", header, max_waiting=3)
    reached, go_on = threading.Event(), threading.Event()
    write_waiting = writer._write_waiting

    def slowly() -> None:
        reached.set()
        go_on.wait(30)
        write_waiting()

    monkeypatch.setattr(writer, "_write_waiting", slowly)
    assert reached.wait(30)
    for _ in range(5):
        writer.put(frame)
    assert (writer.dropped, (writer.ended or "").startswith("the disk is too slow")) == (2, True)
    go_on.set()
    writer.close()
    recording = open_recording(tmp_path / "run.jsonl")
    assert len(list(recording.frames())) == 3
    assert recording.end is not None
    assert (recording.end.dropped, recording.end.end.startswith("the disk is too slow")) == (2, True)


def test_a_recording_stops_at_its_limit(tmp_path: Path) -> None:
    _, header, _ = make_recorded()
    limit = len(journal.encode(header)) + 500
    writer = JournalWriter(tmp_path / "run.jsonl", header, max_bytes=limit)
    for i in range(100):
        writer.put(Frame(journal.Cancelled(float(i), f"t-{i}")))
    writer.close()
    assert writer.ended == f"the file has reached its limit of {limit} bytes"
    assert writer.frames + writer.dropped == 100
    recording = open_recording(tmp_path / "run.jsonl")
    assert len(list(recording.frames())) == writer.frames
    assert recording.end is not None and recording.end.dropped == writer.dropped


def test_a_former_recording_is_kept(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run.jsonl", requests=2)
    recorded_run(path, requests=5)
    former = DecisionReplay(open_recording(tmp_path / "run.jsonl.1")).check()
    assert (former.decisions, DecisionReplay(open_recording(path)).check().decisions) == (2, 5)
