"""What became of placements lately: windows age, totals do not."""

import pytest
from cluster_factory import make_scheduler, request

from conductor.diagnosis import Cause, diagnose
from conductor.outcomes import Outcomes
from conductor.overview import overview, snapshot
from conductor.placement import NoInstanceError, Usage
from conductor.rank import ReportedLoad
from conductor.scheduler import Scheduler


def serve(scheduler: Scheduler, at_s: float, *, hand_off_s: float = 0.05, seed: int = 0) -> None:
    """One disaggregated request: prefill 0.2 s, the hand-off, then 100 gaps of 10 ms."""
    placement = scheduler.place(request(8192, seed=seed), at_s)
    assert placement.disaggregated
    scheduler.prefill_finished(placement.placement_id, at_s + 0.2)
    scheduler.first_token(placement.placement_id, at_s + 0.2 + hand_off_s)
    scheduler.finished(placement.placement_id, at_s + 1.2 + hand_off_s, Usage(8192, 101, 0))


def test_old_outcomes_leave_the_window_and_stay_in_the_total() -> None:
    scheduler = make_scheduler()
    for i in range(3):
        serve(scheduler, 10.0 * i, seed=i)
    serve(scheduler, 30.0 + Outcomes.WINDOW_S, seed=9)
    now_s = 32.0 + Outcomes.WINDOW_S
    assert scheduler.outcomes.between(now_s - Outcomes.WINDOW_S, now_s).placed == 1
    assert scheduler.outcomes.total().placed == 4
    assert scheduler.outcomes.total().ended == {"finished": 4}
    assert overview(scheduler, now_s, 1e9)["window"]["seconds"] == Outcomes.WINDOW_S


def test_times_are_judged_by_the_objectives_of_each_request() -> None:
    scheduler = make_scheduler("pd")
    strict = scheduler.place(request(8192, ttft_objective_s=0.01, tbt_objective_s=0.001), 0.0)
    scheduler.first_token(strict.placement_id, 0.25)
    scheduler.finished(strict.placement_id, 1.25, Usage(8192, 101, None))
    serve(scheduler, 2.0, seed=1)
    tally = scheduler.outcomes.total()
    assert (tally.ttft_seen, tally.ttft_met, tally.tbt_seen, tally.tbt_met) == (2, 1, 2, 1)
    assert (tally.judged, tally.good) == (2, 1)
    assert tally.tbt_s == pytest.approx(0.02)


def test_what_was_not_seen_is_not_judged() -> None:
    scheduler = make_scheduler("pd")
    whole = scheduler.place(request(8192, streamed=False), 0.0)
    scheduler.first_token(whole.placement_id, 3.0)
    scheduler.finished(whole.placement_id, 3.0, Usage(8192, 101, 0))
    with pytest.raises(NoInstanceError):
        scheduler.place(request(64, excluded=frozenset({"p0", "d1"})), 3.0)
    tally = scheduler.outcomes.total()
    assert (tally.ttft_seen, tally.judged, tally.refused) == (0, 0, 1)


def test_only_new_preemptions_count_and_a_restart_is_none() -> None:
    scheduler = make_scheduler("m")
    for at_s, counted in enumerate((None, 5, 7, 7, 2, 3)):
        scheduler.report_load("m0", 0, ReportedLoad(1, 0, 0.5, float(at_s), preemptions=counted))
    assert scheduler.outcomes.total().preemptions == 3


def test_slow_hand_offs_of_a_live_scheduler_are_diagnosed() -> None:
    fast, slow = make_scheduler("ppd"), make_scheduler("ppd")
    for i in range(40):
        serve(fast, 2.0 * i, seed=i)
        serve(slow, 2.0 * i, seed=i, hand_off_s=1.5)
    assert diagnose(snapshot(fast, 80.0, 80.0)).limit is None
    found = diagnose(snapshot(slow, 81.0, 90.0))
    assert found.limit is Cause.NETWORK
    evidence = {e.name: e.value for f in found.findings for e in f.evidence}
    assert evidence["hand_offs"] == 40
    assert evidence["hand_off"] == pytest.approx(1.5, abs=0.05)


def test_held_requests_are_diagnosed_as_scheduling() -> None:
    scheduler = make_scheduler("ppd")
    for i in range(30):
        placement = scheduler.place(request(512, seed=i, arrived_s=2.0 * i - 0.5), 2.0 * i)
        scheduler.first_token(placement.placement_id, 2.0 * i + 0.05)
        scheduler.finished(placement.placement_id, 2.0 * i + 0.5, Usage(512, 40, 0))
    found = diagnose(snapshot(scheduler, 60.0, 60.0))
    assert found.limit is Cause.SCHEDULING
    assert "500.0 ms from arrival to dispatch" in found.summary
