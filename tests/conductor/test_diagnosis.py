"""One worked example for every limit, in the order in which they are looked for, and for none."""

from dataclasses import replace

import pytest

from conductor.diagnosis import Cause, Diagnosis, Evidence, Finding, Pace, Snapshot, diagnose

# Four prefill and four decode ranks at two thirds of what they can do: 10 requests a second of 6,000 tokens.
HEALTHY = Snapshot(
    window_s=120.0,
    ttft_objective_s=2.0,
    tbt_objective_s=0.05,
    finished=1200,
    ttft_s=0.6,
    tbt_s=0.03,
    ttft_attainment=0.98,
    tbt_attainment=0.99,
    prefill_load=0.65,
    queue_s=0.1,
    earlier=Pace(60.0, 60_000.0),
    later=Pace(62.0, 61_000.0),
    preemptions=0,
    kv_usage=0.8,
    kv_usage_mean=0.6,
    engine_waiting=0,
    decode_batch=40.0,
    decode_step_s=0.03,
    decode_compute_share=0.35,
    hand_offs=1200,
    hand_off_s=0.05,
    hand_off_predicted_s=0.04,
    handed_prefill_s=0.4,
    ttft_apart_s=None,
    ttft_whole_s=None,
    dispatch_s=0.001,
)


def finding(diagnosis: Diagnosis, cause: Cause) -> Finding:
    return next(f for f in diagnosis.findings if f.cause is cause)


def evidence(found: Finding, name: str) -> Evidence:
    return next(e for e in found.evidence if e.name == name)


def test_nothing_is_wrong() -> None:
    diagnosis = diagnose(HEALTHY)
    assert diagnosis.limit is None
    assert diagnosis.summary == "nothing is wrong"
    assert [f.cause for f in diagnosis.findings] == list(Cause)
    assert not any(f.limits for f in diagnosis.findings)


def test_compute_when_more_concurrency_brings_no_more_throughput() -> None:
    loaded = replace(HEALTHY, prefill_load=1.2, earlier=Pace(60.0, 90_000.0), later=Pace(90.0, 91_000.0))
    diagnosis = diagnose(loaded)
    assert diagnosis.limit is Cause.COMPUTE
    assert "concurrency rose from 60.0 to 90.0" in diagnosis.summary
    found = finding(diagnosis, Cause.COMPUTE)
    assert evidence(found, "prefill_load") == Evidence("prefill_load", 1.2, "busy seconds/s", 0.95)
    assert found.basis.startswith("inferred: engines do not report GPU utilisation")
    assert "prefill instances" in found.remedy


def test_compute_when_prompts_wait_wherever_they_are_sent() -> None:
    assert diagnose(replace(HEALTHY, prefill_load=1.0, queue_s=1.0)).limit is Cause.COMPUTE


def test_busy_and_growing_is_no_limit() -> None:
    growing = replace(HEALTHY, prefill_load=1.0, earlier=Pace(60.0, 60_000.0), later=Pace(90.0, 90_000.0))
    assert diagnose(growing).limit is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preemptions": 40}, "preempted 40 requests while 1200 finished"),
        ({"kv_usage": 0.97, "engine_waiting": 7}, "97% full and 7 requests wait"),
    ],
)
def test_memory_capacity(change: dict, said: str) -> None:
    diagnosis = diagnose(replace(HEALTHY, **change))
    assert diagnosis.limit is Cause.MEMORY
    assert said in diagnosis.summary
    assert evidence(finding(diagnosis, Cause.MEMORY), "kv_usage_max").limit == 0.95


def test_full_memory_without_anybody_waiting_is_as_it_should_be() -> None:
    assert diagnose(replace(HEALTHY, kv_usage=0.99)).limit is None
    assert diagnose(replace(HEALTHY, preemptions=3)).limit is None


def test_bandwidth_when_steps_are_slow_and_little_of_them_is_compute() -> None:
    diagnosis = diagnose(replace(HEALTHY, tbt_s=0.08, tbt_attainment=0.2, decode_compute_share=0.12))
    assert diagnosis.limit is Cause.BANDWIDTH
    assert "80.0 ms (objective 50 ms), and 12% of a decode step is compute" in diagnosis.summary
    assert diagnose(replace(HEALTHY, tbt_s=0.08, decode_compute_share=0.6)).limit is None
    assert diagnose(replace(HEALTHY, tbt_s=0.04, decode_compute_share=0.12)).limit is None


def test_network_when_a_hand_off_takes_longer_than_the_prefill_it_saves() -> None:
    slow = replace(HEALTHY, hand_off_s=0.9, ttft_apart_s=1.4, ttft_whole_s=0.7)
    diagnosis = diagnose(slow)
    assert diagnosis.limit is Cause.NETWORK
    assert "900 ms, the prefill that it saves the decode rank 400 ms" in diagnosis.summary
    assert "TTFT is 1.40 s apart and 0.70 s on one instance" in diagnosis.summary


def test_scheduling_when_requests_wait_before_they_are_dispatched() -> None:
    diagnosis = diagnose(replace(HEALTHY, dispatch_s=0.5))
    assert diagnosis.limit is Cause.SCHEDULING
    assert evidence(finding(diagnosis, Cause.SCHEDULING), "dispatch") == Evidence("dispatch", 0.5, "s", 0.2)


def test_the_first_limit_in_order_is_named_and_all_are_listed() -> None:
    everything = replace(
        HEALTHY, prefill_load=1.2, queue_s=3.0, preemptions=500, tbt_s=0.09, decode_compute_share=0.1,
        hand_off_s=2.0, dispatch_s=5.0,
    )  # fmt: skip
    diagnosis = diagnose(everything)
    assert diagnosis.limit is Cause.COMPUTE
    assert all(f.limits for f in diagnosis.findings)
    assert diagnose(replace(everything, prefill_load=0.5)).limit is Cause.MEMORY


def test_what_cannot_be_known_is_said() -> None:
    blind = replace(HEALTHY, tbt_s=None, decode_compute_share=None, preemptions=None, kv_usage=None)
    diagnosis = diagnose(blind)
    assert diagnosis.limit is None
    assert finding(diagnosis, Cause.MEMORY).limits is None
    assert diagnosis.summary == "nothing is wrong; not known: memory capacity, bandwidth"


def test_missed_objectives_without_a_limit_are_not_called_healthy() -> None:
    summary = diagnose(replace(HEALTHY, ttft_attainment=0.4)).summary
    assert summary == "no limit was found, although TTFT is met by 40% of the requests only"


def test_too_few_requests_are_not_judged() -> None:
    idle = replace(HEALTHY, finished=3, ttft_s=None, tbt_s=None, dispatch_s=None, prefill_load=None)
    assert diagnose(idle).summary.startswith("too little was seen to judge: 3 requests finished")
