"""The scheduler as a state machine: events in, placements out, books that balance."""

from collections.abc import Callable

import numpy as np
import pytest
from cluster_factory import BLOCK, facts, hold, make_scheduler, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, Health, make_instance
from conductor.costs import DEFAULT_LINKS, Distance
from conductor.explanation import explain
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    NoInstanceError,
    Objectives,
    Role,
    UnknownModelError,
    Usage,
)
from conductor.policies import make_policy
from conductor.scheduler import Scheduler


def test_the_instance_that_holds_the_prefix_prefills() -> None:
    scheduler = make_scheduler()
    wanted = request(4096)
    hold(scheduler, "p1", wanted.tokens[:2048])
    placement = scheduler.place(wanted, 0.0)
    assert placement.prefill.instance_id == "p1"
    assert placement.decode.instance_id in ("d2", "d3")
    assert placement.overlap_tokens == 2048
    assert placement.disaggregated


def test_a_fully_cached_prompt_recomputes_its_last_block() -> None:
    scheduler = make_scheduler("m")
    wanted = request(1024)
    hold(scheduler, "m0", wanted.tokens)
    assert scheduler.place(wanted, 0.0).overlap_tokens == 1024 - BLOCK


def test_the_prediction_is_queue_plus_prefill_plus_hand_off() -> None:
    scheduler = make_scheduler("pd")
    first = scheduler.place(request(8192, seed=1), 0.0)
    prefill_s = LLAMA_8B_H100.prefill_s(8192, np.array([0]))[0]
    link_s = DEFAULT_LINKS[Distance.RACK].latency_s
    hand_off_s = LLAMA_8B_H100.hand_off_s(np.array([8192]))[0] + link_s
    assert first.predicted_ttft_s == pytest.approx(prefill_s + hand_off_s)
    second = scheduler.place(request(8192, seed=2), 0.01)
    assert second.predicted_ttft_s == pytest.approx(2 * prefill_s - 0.01 + hand_off_s)
    assert second.predicted_tbt_s > first.predicted_tbt_s


def test_a_burst_does_not_herd() -> None:
    scheduler = make_scheduler("ppdd")
    placements = [scheduler.place(request(2048, seed=i), 0.0) for i in range(8)]
    assert sorted(p.prefill.instance_id for p in placements) == ["p0"] * 4 + ["p1"] * 4
    assert sorted(p.decode.instance_id for p in placements) == ["d2"] * 4 + ["d3"] * 4


def test_namespaces_do_not_share_cache() -> None:
    scheduler = make_scheduler("m")
    wanted = request(1024)
    hold(scheduler, "m0", wanted.tokens, lora="adapter")
    assert scheduler.place(wanted, 0.0).overlap_tokens == 0
    assert scheduler.place(request(1024, model="adapter"), 0.0).overlap_tokens == 1024 - BLOCK
    assert scheduler.place(request(1024, model="adapter", cache_salt="s"), 0.0).overlap_tokens == 0
    assert scheduler.place(request(1024, model="adapter", cache_tenant="t"), 0.0).overlap_tokens == 0


def test_aliases_are_resolved_and_listed() -> None:
    scheduler = make_scheduler("m", aliases={"gpt-4": "llama", "gone": "absent"})
    assert scheduler.place(request(model="gpt-4"), 0.0).model == "llama"
    assert [card.model for card in scheduler.models()] == ["llama", "adapter", "gpt-4"]


def test_work_that_is_no_load_goes_to_every_instance_in_turn_and_reserves_nothing() -> None:
    scheduler = make_scheduler()
    asked = request(64)
    placements = [scheduler.anywhere(asked, 0.0) for _ in range(8)]
    names = [placement.decode.instance_id for placement in placements]
    assert sorted(names) == sorted(2 * [instance.instance_id for instance in scheduler.cluster])
    assert not any(placement.disaggregated or placement.placement_id for placement in placements)
    scheduler.finished("", 1.0, Usage(64, 0, 0))
    assert scheduler.active_placements == 0
    scheduler.check_invariants()
    with pytest.raises(UnknownModelError):
        scheduler.anywhere(request(64, model="unknown"), 0.0)
    every = frozenset(names)
    with pytest.raises(NoInstanceError, match="failed this request before"):
        scheduler.anywhere(request(64, excluded=every), 0.0)


def test_an_unknown_model_is_refused_with_those_served() -> None:
    with pytest.raises(UnknownModelError, match=r"'gpt-5' is not served here; served: llama, adapter"):
        make_scheduler().place(request(model="gpt-5"), 0.0)


def test_before_any_instance_is_up_no_model_is_unknown() -> None:
    """Clients come again after 503, and give up after 404."""
    scheduler = make_scheduler("")
    scheduler.cluster.add(
        make_instance(
            instance_id="m0",
            url="http://10.0.0.1:8000",
            role=Role.MIXED,
            instance_class=LLAMA_8B_H100,
            protocol="vllm-nixl",
        )
    )
    for place in (scheduler.place, scheduler.anywhere):
        with pytest.raises(NoInstanceError, match=r"no instance is up.*configured: m0"):
            place(request(64), 0.0)


def test_half_a_cluster_cannot_serve_and_says_what_is_missing() -> None:
    scheduler = make_scheduler("pd")
    assert scheduler.why_not_ready(0.0) is None
    scheduler.instance_down("d1", "connection refused")
    with pytest.raises(NoInstanceError, match=r"d1 \(down: connection refused\).*no decode instance"):
        scheduler.place(request(), 0.0)
    assert scheduler.why_not_ready(0.0) == "no decode instance is up"


def test_an_unreachable_instance_is_down_at_once_and_forgets_its_cache() -> None:
    scheduler = make_scheduler("mm")
    wanted = request(1024)
    hold(scheduler, "m0", wanted.tokens)
    placement = scheduler.place(wanted, 0.0)
    assert placement.prefill.instance_id == "m0"
    failure = InstanceFailure("m0", FailureKind.UNREACHABLE, "connection refused")
    scheduler.failed(placement.placement_id, 0.1, failure)
    assert scheduler.cluster["m0"].health is Health.DOWN
    again = scheduler.place(wanted, 0.2)
    assert again.prefill.instance_id == "m1"
    scheduler.instance_up("m0", facts())
    scheduler.cancelled(again.placement_id, 0.25)
    assert scheduler.place(wanted, 0.3).overlap_tokens == 0
    scheduler.check_invariants()


def test_repeated_errors_suspend_an_instance_for_a_while() -> None:
    scheduler = make_scheduler("mm")
    for _ in range(2):
        placement = scheduler.place(request(excluded=frozenset({"m1"})), 1.0)
        scheduler.failed(placement.placement_id, 1.0, InstanceFailure("m0", FailureKind.ERROR, "HTTP 500"))
    assert scheduler.cluster["m0"].health is Health.SUSPENDED
    assert {scheduler.place(request(seed=i), 2.0).prefill.instance_id for i in range(4)} == {"m1"}
    assert scheduler.place(request(excluded=frozenset({"m1"})), 6.1).prefill.instance_id == "m0"


@pytest.mark.parametrize("whole", [False, True])
def test_a_success_between_errors_forgives_them(whole: bool) -> None:
    scheduler = make_scheduler("m")
    for _ in range(5):
        placement = scheduler.place(request(), 0.0)
        scheduler.failed(placement.placement_id, 0.0, InstanceFailure("m0", FailureKind.TIMEOUT, "slow"))
        answered = scheduler.place(request(streamed=not whole), 0.0).placement_id
        if whole:
            scheduler.finished(answered, 0.0, Usage())
        else:
            scheduler.first_token(answered, 0.0)
    assert scheduler.cluster["m0"].health is Health.UP


def test_excluded_instances_are_not_chosen_and_the_reason_is_kept() -> None:
    scheduler = make_scheduler("mm")
    placement = scheduler.place(request(excluded=frozenset({"m0"}), retry_of="1"), 0.0)
    assert placement.prefill.instance_id == "m1"
    record = scheduler.records.get(placement.placement_id)
    assert record is not None
    explained = explain(record, 1.0)
    assert explained["excluded"] == {"m0": "failed this request before"}
    assert explained["retry_of"] == "1"


def test_calibration_learns_from_observed_prefills() -> None:
    scheduler = make_scheduler("pd")
    now_s = 0.0
    for seed in range(200):
        placement = scheduler.place(request(4096, seed=seed), now_s)
        now_s += 2.0 * LLAMA_8B_H100.prefill_s(4096, np.array([0]))[0]
        scheduler.prefill_finished(placement.placement_id, now_s)
        scheduler.first_token(placement.placement_id, now_s)
        scheduler.finished(placement.placement_id, now_s, Usage(4096, 1, 0))
    assert scheduler.calibrations[LLAMA_8B_H100.name].prefill.factor == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("roles", ["m", "pd"])
def test_the_first_byte_of_an_answer_that_comes_whole_tells_of_its_end_only(roles: str) -> None:
    scheduler = make_scheduler(roles)
    placement = scheduler.place(request(4_000, streamed=False), 0.0)
    if placement.disaggregated:
        scheduler.prefill_finished(placement.placement_id, 0.5)
    before = scheduler.cluster.tables.loads.copy()
    scheduler.first_token(placement.placement_id, 1.0)
    assert np.array_equal(scheduler.cluster.tables.loads, before)
    scheduler.finished(placement.placement_id, 1.0, Usage(4_000, 9, 0))
    scheduler.check_invariants()
    for rank in (rank for instance in scheduler.cluster for rank in instance.ranks):
        assert not rank.under_way()
        assert rank.transfers_in == rank.transfers_out == 0


def test_records_are_bounded() -> None:
    cluster_scheduler = make_scheduler("m")
    cluster_scheduler.records._capacity = 3
    ids = [cluster_scheduler.place(request(64), 0.0).placement_id for _ in range(5)]
    kept = [record.placement.placement_id for record in cluster_scheduler.records.latest(10)]
    assert kept == ids[:1:-1]


def test_records_are_found_by_id() -> None:
    scheduler = make_scheduler("m")
    scheduler.records._capacity = 25
    ids = [scheduler.place(request(64), 0.0).placement_id for _ in range(110)]
    found = [scheduler.records.get(placement_id) for placement_id in ids]
    assert found[:85] == [None] * 85
    assert [record.placement.placement_id for record in found[85:] if record is not None] == ids[85:]
    for unknown in ("", "1000000", "someone-else's", ids[90] + "0", ids[90][:-1]):
        assert scheduler.records.get(unknown) is None


def test_records_of_what_was_answered_keep_no_long_prompts() -> None:
    scheduler = make_scheduler("mm")
    asked = request(2_000)
    placement = scheduler.place(asked, 0.0)
    (record,) = scheduler.records.latest(1)
    assert record.request is asked and asked.known_hashes.keys() == {BLOCK}
    before = explain(record, 1.0)
    scheduler.finished(placement.placement_id, 1.0, Usage(2_000, 9, 0))
    assert not len(record.request.tokens) and not record.request.known_hashes
    assert len(asked.tokens) == 2_000
    after = explain(record, 1.0)
    assert {name for name in after if after[name] != before[name]} == {"outcome", "observed"}


def test_without_a_log_only_what_is_under_way_is_known() -> None:
    scheduler = make_scheduler("m")
    scheduler.records._capacity = 0
    first, second = (scheduler.place(request(64), 0.0).placement_id for _ in range(2))
    scheduler.finished(first, 1.0, Usage(64, 1, 0))
    assert list(scheduler.records.latest(10)) == []
    assert scheduler.find(first) is None
    record = scheduler.find(second)
    assert record is not None
    assert record.candidates is None


def test_late_reports_of_an_ended_placement_change_nothing() -> None:
    scheduler = make_scheduler("m")
    placement_id = scheduler.place(request(), 0.0).placement_id
    scheduler.cancelled(placement_id, 0.1)
    scheduler.first_token(placement_id, 0.2)
    scheduler.finished(placement_id, 0.3, Usage())
    record = scheduler.records.get(placement_id)
    assert record is not None
    assert (record.outcome, record.ended_s, record.first_token_s) == ("cancelled", 0.1, None)
    assert scheduler.active_placements == 0


def without_events(roles: str) -> Scheduler:
    scheduler = make_scheduler(roles)
    for instance in scheduler.cluster:
        scheduler.instance_up(instance.instance_id, facts(publishes_events=False))
    return scheduler


def test_without_events_what_was_routed_is_assumed_to_be_cached() -> None:
    scheduler = without_events("mm")
    first = scheduler.place(request(1024), 0.0)
    assert first.overlap_tokens == 0
    scheduler.finished(first.placement_id, 0.1, Usage(1024, 8, 0))
    second = scheduler.place(request(1024), 0.2)
    assert second.prefill.instance_id == first.prefill.instance_id
    assert second.overlap_tokens == 1024 - BLOCK
    scheduler.finished(second.placement_id, 0.3, Usage(1024, 8, 1024 - BLOCK))
    assert scheduler.place(request(1024), 0.4).overlap_tokens == 1024 - BLOCK, "the last block is recomputed"


def test_an_eviction_that_shows_tells_of_all_that_was_used_before() -> None:
    scheduler = without_events("m")
    for seed, now_s in ((1, 0.0), (2, 1.0), (3, 2.0)):
        scheduler.finished(
            scheduler.place(request(1024, seed=seed), now_s).placement_id, now_s, Usage(1024, 8, 0)
        )
    again = scheduler.place(request(1024, seed=2), 3.0)
    assert again.overlap_tokens == 1024 - BLOCK
    scheduler.finished(again.placement_id, 3.1, Usage(1024, 8, 0))
    overlaps = [scheduler.place(request(1024, seed=seed), 4.0).overlap_tokens for seed in (1, 2, 3)]
    assert overlaps == [0, 1024 - BLOCK, 1024 - BLOCK], "1 was older than 2, which has been computed again"


def test_an_engine_that_went_down_is_not_assumed_to_hold_anything() -> None:
    scheduler = without_events("m")
    scheduler.finished(scheduler.place(request(1024), 0.0).placement_id, 0.1, Usage())
    scheduler.instance_down("m0", "gone")
    scheduler.instance_up("m0", facts(publishes_events=False))
    assert scheduler.place(request(1024), 0.2).overlap_tokens == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Any interleaving of events keeps the books balanced, and everything ends released."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler("ppddm")
        self.now_s = 0.0
        self.open: list[str] = []

    @rule(
        tokens=st.integers(1, 5000),
        streamed=st.booleans(),
        exclude=st.sets(st.sampled_from(["p0", "d2", "m4"])),
    )
    def place(self, tokens: int, streamed: bool, exclude: set[str]) -> None:
        wanted = request(tokens, seed=tokens % 7, streamed=streamed, excluded=frozenset(exclude))
        try:
            self.open.append(self.scheduler.place(wanted, self.now_s).placement_id)
        except NoInstanceError:
            assert self.scheduler.why_not_ready(self.now_s) is not None or exclude

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def _progress(self, call: Callable[[str], None], data: st.DataObject, *, ends: bool) -> None:
        if self.open:
            placement_id = data.draw(st.sampled_from(self.open))
            call(placement_id)
            if ends:
                self.open.remove(placement_id)

    @rule(data=st.data())
    def prefill_finished(self, data: st.DataObject) -> None:
        self._progress(lambda p: self.scheduler.prefill_finished(p, self.now_s), data, ends=False)

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self._progress(lambda p: self.scheduler.first_token(p, self.now_s), data, ends=False)

    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        self._progress(lambda p: self.scheduler.finished(p, self.now_s, Usage()), data, ends=True)

    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        self._progress(lambda p: self.scheduler.cancelled(p, self.now_s), data, ends=True)

    @rule(
        data=st.data(),
        kind=st.sampled_from(FailureKind),
        instance=st.sampled_from(["p0", "p1", "d2", "d3", "m4"]),
    )
    def failed(self, data: st.DataObject, kind: FailureKind, instance: str) -> None:
        failure = InstanceFailure(instance, kind, "test")
        self._progress(lambda p: self.scheduler.failed(p, self.now_s, failure), data, ends=True)

    @rule(instance=st.sampled_from(["p0", "p1", "d2", "d3", "m4"]))
    def up(self, instance: str) -> None:
        self.scheduler.instance_up(instance, facts())

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.active_placements == len(self.open)
        for instance in self.scheduler.cluster:
            for rank in instance.ranks:
                assert rank.queue_s(self.now_s) >= 0.0

    def teardown(self) -> None:
        for placement_id in self.open:
            self.scheduler.cancelled(placement_id, self.now_s)
        for instance in self.scheduler.cluster:
            for rank in instance.ranks:
                assert not rank.under_way()
                assert rank.context_tokens == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_data_parallel_ranks_are_targets_of_their_own() -> None:
    cluster = Cluster()
    cluster.add(
        make_instance(
            instance_id="dp",
            url="http://10.0.0.1:8000",
            role=Role.MIXED,
            instance_class=LLAMA_8B_H100,
            protocol="vllm-nixl",
            ranks=2,
        )
    )
    scheduler = Scheduler(cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy())
    scheduler.instance_up("dp", facts())
    wanted = request(4096)
    namespace = Namespace(model="llama", block_size=BLOCK)
    scheduler.index.store(Holder("dp", 1), Tier.DEVICE, namespace, sequence_hashes(wanted.tokens, BLOCK))
    placement = scheduler.place(wanted, 0.0)
    assert (placement.prefill.rank, placement.decode.rank) == (1, 1)
    assert placement.overlap_tokens == 4096 - BLOCK
    assert scheduler.place(request(4096, seed=9), 0.0).prefill.rank == 0, "the other rank is idle"


def test_a_prefix_is_fetched_from_a_peer_that_is_too_busy_to_take_the_request() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.add(
            make_instance(
                instance_id=name,
                url="http://10.0.0.1:8000",
                role=Role.MIXED,
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
                fetches_from_peers=True,
            )
        )
    scheduler = Scheduler(cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy())
    for name in ("a", "b"):
        scheduler.instance_up(name, facts())
    wanted = request(16_384)
    hold(scheduler, "a", wanted.tokens)
    busy = scheduler.place(request(60_000, seed=7, prefill_on=Holder("a")), 0.0)
    placement = scheduler.place(wanted, 0.0)
    assert busy.prefill.instance_id == "a"
    assert placement.prefill.instance_id == "b"
    (segment,) = placement.plan.segments
    assert (segment.holder, segment.start, segment.stop) == (Holder("a"), 0, 16_384 - BLOCK)
    assert scheduler.cluster["a"].ranks[0].transfers_out == 1
    scheduler.first_token(placement.placement_id, 0.5)
    assert scheduler.cluster["a"].ranks[0].transfers_out == 0
    scheduler.check_invariants()


@pytest.mark.parametrize(("protocol", "skipped"), [("vllm-nixl", True), ("sglang", False)])
def test_prefill_is_skipped_where_decode_holds_the_prefix_and_may_compute(
    protocol: str, skipped: bool
) -> None:
    scheduler = make_scheduler("pd", protocol=protocol)
    asked = request(4096)
    assert scheduler.place(asked, 0.0).disaggregated  # nobody has it
    hold(scheduler, "d1", asked.tokens[:3840])
    placement = scheduler.place(request(4096, request_id="again"), 0.1)
    assert placement.disaggregated is not skipped
    assert placement.prefill.instance_id == ("d1" if skipped else "p0")
    assert scheduler.outcomes.total().prefills_skipped == int(skipped)
    record = scheduler.find(placement.placement_id)
    assert record is not None
    assert ("computes the other 256 tokens itself" in explain(record, 0.2)["why"]) is skipped
