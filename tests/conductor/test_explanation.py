"""Why a placement was made, told at any later time as it was at the decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster_factory import BLOCK, facts, hold, make_scheduler, request

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Codec, Speed
from conductor.explanation import explain
from conductor.placement import Usage
from conductor.policies.candidates import NO_PEER
from conductor.prefix_lookup import IndexLookup
from conductor.rank import ReportedLoad
from conductor.scheduler import Scheduler
from conductor.shared_pools import SharedPool


@pytest.fixture
def busy() -> Scheduler:
    """Two prefill and two decode instances with some requests on them."""
    scheduler = make_scheduler("ppdd")
    for number in range(5):
        placement = scheduler.place(request(3000, seed=number), 0.0)
        if number % 2:
            scheduler.prefill_finished(placement.placement_id, 0.0)
    return scheduler


def test_every_candidate_and_the_course_of_the_request_are_told() -> None:
    scheduler = make_scheduler()
    wanted = request(2048)
    hold(scheduler, "p0", wanted.tokens[:1024])
    placement = scheduler.place(wanted, 10.0)
    scheduler.prefill_finished(placement.placement_id, 10.05)
    scheduler.first_token(placement.placement_id, 10.06)
    scheduler.finished(placement.placement_id, 11.0, Usage(2048, 100, 1024))
    record = scheduler.records.get(placement.placement_id)
    assert record is not None
    explained = explain(record, 12.0)
    assert [c["instance"] for c in explained["candidates"]] == ["p0", "p1", "d2", "d3"]
    assert [c["overlap_tokens"] for c in explained["candidates"]] == [1024, 0, 0, 0]
    assert explained["observed"]["prefill_ms"] == pytest.approx(50)
    assert explained["observed"]["ttft_ms"] == pytest.approx(60)
    assert explained["observed"]["duration_ms"] == pytest.approx(1000)
    assert explained["observed"]["cached_tokens"] == 1024
    assert explained["outcome"] == "finished"
    assert "p0 holds 1024 of 2048 prompt tokens" in explained["why"]


def test_what_is_told_of_the_decision_does_not_follow_the_load(busy: Scheduler) -> None:
    placement_id = busy.place(request(4096, seed=50), 0.1).placement_id
    record = busy.records.get(placement_id)
    assert record is not None
    before = explain(record, 0.1)
    decoding = record.decode.active_decodes - 1
    assert decoding > 0
    assert f"decodes with {decoding} others" in before["why"]

    for number in range(12):
        placed = busy.place(request(5000, seed=100 + number), 0.2)
        busy.prefill_finished(placed.placement_id, 0.9)  # later than predicted: the estimates are corrected
        busy.first_token(placed.placement_id, 1.0)
    for name in ("p0", "p1", "d2", "d3"):
        busy.report_load(name, 0, ReportedLoad(running=50, waiting=7, kv_usage=0.9, at_s=1.0))
    busy.finished(placement_id, 2.0, Usage(4096, 10, 0))
    busy.remove_instance("p1")
    busy.instance_up("d3", facts("another-model"))

    after = explain(record, 2.0)
    assert after["observed"]["duration_ms"] == 1900
    told = ("why", "predicted", "plan", "objectives", "counterfactual", "candidates", "excluded")
    assert {name: after[name] for name in told} == {name: before[name] for name in told}


def test_every_candidate_is_told_as_it_was_estimated(busy: Scheduler) -> None:
    wanted = request(4096, seed=3)
    hold(busy, "p1", wanted.tokens[:2048])
    record = busy.consider(wanted, 0.1)
    c = record.candidates
    assert c is not None
    explained = explain(record, 0.1)
    assert explained["candidates_total"] == len(c.ranks) == 4
    place = {rank.holder.instance_id: i for i, rank in enumerate(c.ranks)}
    told = explained["candidates"]
    assert [each["ttft_ms"] for each in told] == sorted(each["ttft_ms"] for each in told)
    for each in told:
        i = place[each["instance"]]
        assert each["queue_ms"] == pytest.approx(1e3 * c.queue_s[i], abs=1e-3)
        assert each["prefill_ms"] == pytest.approx(1e3 * c.prefill_s[i], abs=1e-3)
        assert each["tbt_ms"] == pytest.approx(1e3 * c.tbt_s[i], abs=1e-3)
        assert each["inflicted_ms"] == pytest.approx(1e3 * c.inflicted_s[i], abs=1e-3)
        assert each["eviction_ms"] == pytest.approx(1e3 * c.eviction_s[i], abs=1e-3)
        assert each["harmed_requests"] == pytest.approx(c.harm[i], abs=1e-4)
        assert list(each["cached_tokens"].values()) == c.local_tokens[:, i].tolist()
        assert each["overlap_tokens"] == each["cached_tokens"][Tier.DEVICE.name.lower()]
        assert (each["plan_peer"] is None) == (c.plan_peer[i] == NO_PEER)
        assert (each["hand_off_ms"] is None) == (each["role"] != "decode")
        legs = {"prefill": record.choice.prefill, "decode": record.choice.decode}
        assert each["chosen_for"] == [leg for leg, chosen in legs.items() if chosen == i]
        assert each["ruled_out"] == []
    assert [each["instance"] for each in explain(record, 0.1, limit=2)["candidates"]] == [
        each["instance"] for each in told[:2]
    ]


def test_harm_to_those_aboard_is_told() -> None:
    scheduler = make_scheduler("m")
    aboard = scheduler.place(request(), 0.0)
    scheduler.first_token(aboard.placement_id, 0.0)
    explained = explain(scheduler.consider(request(16_384, seed=9), 0.0), 0.0)
    assert 0.0 < explained["predicted"]["harmed_requests"] <= 1.0
    assert explained["candidates"][0]["harmed_requests"] == explained["predicted"]["harmed_requests"]


def test_what_could_not_be_chosen_says_why() -> None:
    def ruled_out(**options: Any) -> dict[str, list[str]]:
        scheduler = make_scheduler("ppdm")
        scheduler.cluster["d2"].protocol = "other"
        record = scheduler.consider(request(512, **options), 0.0)
        return {each["instance"]: each["ruled_out"] for each in explain(record, 0.0)["candidates"]}

    no_partner = ["no decode rank of its hand-off protocol"]
    assert ruled_out() == {
        "p0": no_partner,
        "p1": no_partner,
        "d2": ["no prefill rank of its hand-off protocol"],
        "m3": [],
    }
    assert ruled_out(prefill_on=Holder("m3")) == {
        "p0": ["another prefill rank was asked for"],
        "p1": ["another prefill rank was asked for"],
        "d2": ["no prefill rank of its hand-off protocol"],
        "m3": [],
    }


@pytest.mark.parametrize(
    ("codec", "rate", "told"),
    [
        (None, 5e9, ""),
        (Codec(4.0, 1e9, 1e12), 20e9, "encoded to 1/4 and decoded beside the load"),
        (Codec(4.0, 1e9, 1e10), 10e9, "encoded to 1/4 and decoded beside the load"),
    ],
)
def test_a_load_from_a_tier_that_encodes_is_told_with_its_decoding(
    codec: Codec | None, rate: float, told: str
) -> None:
    kind = replace(
        LLAMA_8B_H100,
        name=f"with {codec}",
        prefill_s_per_token=1e-3,
        tiers={**LLAMA_8B_H100.tiers, Tier.REMOTE: Speed(5e9, 0.01, codec)},
    )
    pool, index, wanted = Holder("pool"), CacheIndex(), request(4096)
    lookup = IndexLookup(index, pools=[SharedPool(pool, Tier.REMOTE)])
    scheduler = make_scheduler("m", lookup=lookup, index=index, instance_class=kind)
    index.register(pool)
    index.store(pool, Tier.REMOTE, Namespace("llama", BLOCK), sequence_hashes(wanted.tokens, BLOCK)[:128])
    record = scheduler.records.get(scheduler.place(wanted, 0.0).placement_id)
    assert record is not None
    explained = explain(record, 0.1)
    (candidate,) = explained["candidates"]
    seconds = 0.01 + 2048 * kind.kv_bytes_per_token / rate
    assert candidate["fetch_ms"] == pytest.approx(seconds * 1e3, abs=1e-3)
    assert "2048 tokens come from the remote tier of m0" in explained["why"]
    assert told in explained["why"]
    assert ("encoded" in explained["why"]) == (codec is not None)
