"""What placements under way leave in the books: what those aboard bear, and what their course teaches."""

import numpy as np
import pytest
from cluster_factory import make_scheduler, request

from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import tables as t
from conductor.placement import Placement, Usage
from conductor.scheduler import Scheduler

LONG = 16_384  # tokens: many steps' time


def harm(scheduler: Scheduler, now_s: float) -> float:
    record = scheduler.consider(request(LONG, seed=99), now_s)
    assert record.candidates is not None
    return float(record.candidates.harm[record.choice.prefill])


def begun(scheduler: Scheduler, now_s: float, *, seed: int) -> Placement:
    placement = scheduler.place(request(seed=seed), now_s)
    scheduler.first_token(placement.placement_id, now_s)
    return placement


def test_a_prefill_harms_those_aboard_until_they_have_ended() -> None:
    scheduler = make_scheduler("m")
    assert harm(scheduler, 0.0) == 0.0
    one, two = begun(scheduler, 0.0, seed=1), begun(scheduler, 0.0, seed=2)
    both = harm(scheduler, 0.0)
    assert 0.0 < both < 2.0
    scheduler.finished(one.placement_id, 0.1, Usage(1024, 100, 0))
    assert 0.0 < harm(scheduler, 0.1) < both
    scheduler.cancelled(two.placement_id, 0.1)
    assert harm(scheduler, 0.1) == 0.0


def test_requests_with_an_objective_of_their_own_bear_what_it_allows() -> None:
    patient, impatient = make_scheduler("m"), make_scheduler("m")
    for scheduler, tbt_s in ((patient, 1.0), (impatient, 0.02)):
        placement = scheduler.place(request(tbt_objective_s=tbt_s), 0.0)
        scheduler.first_token(placement.placement_id, 0.0)
    assert harm(patient, 0.0) < harm(impatient, 0.0)


def test_a_prefill_elsewhere_harms_nobody() -> None:
    scheduler = make_scheduler("pd")
    begun(scheduler, 0.0, seed=1)
    assert harm(scheduler, 0.0) == 0.0


def stored(scheduler: Scheduler) -> dict[str, float]:
    loads = scheduler.cluster.tables.loads
    return {
        instance.instance_id: float(loads[instance.ranks[0].row, t.STORED_TOKENS])
        for instance in scheduler.cluster
    }


def test_what_placements_leave_in_caches_is_in_the_books_until_the_instance_dies() -> None:
    scheduler = make_scheduler("mm")
    placement = scheduler.place(request(seed=1), 0.0)
    here = placement.prefill.instance_id
    record = scheduler.find(placement.placement_id)
    assert record is not None
    assert stored(scheduler)[here] == 1024 + record.output_tokens
    assert sum(stored(scheduler).values()) == stored(scheduler)[here]
    scheduler.instance_down(here, "it died")
    assert stored(scheduler)[here] == 0.0


def test_both_ranks_of_a_pair_store_the_prompt() -> None:
    scheduler = make_scheduler("pd")
    placement = scheduler.place(request(seed=1), 0.0)
    record = scheduler.find(placement.placement_id)
    assert record is not None
    assert stored(scheduler)[placement.prefill.instance_id] == 1024
    assert stored(scheduler)[placement.decode.instance_id] == 1024 + record.output_tokens


def test_the_pace_of_decoding_is_learned_without_the_prefills_beside_it() -> None:
    scheduler = make_scheduler("m")
    step_s = float(LLAMA_8B_H100.decode_step_s(np.array([1]), np.array([1024]))[0])
    now_s, tokens = 0.0, 100
    for seed in range(40):
        answer = begun(scheduler, now_s, seed=2 * seed)
        beside = scheduler.place(request(LONG, seed=2 * seed + 1), now_s)
        now_s += beside.plan.prefill_s
        scheduler.first_token(beside.placement_id, now_s)
        scheduler.cancelled(beside.placement_id, now_s)
        now_s += (tokens - 1) * step_s
        scheduler.finished(answer.placement_id, now_s, Usage(1024, tokens, 0))
    assert scheduler.calibrations[LLAMA_8B_H100.name].decode.factor == pytest.approx(1.0, rel=0.1)
