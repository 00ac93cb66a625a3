"""Requests assigned together: a worked example, and never worse than one by one."""

import itertools

import numpy as np
import pytest
from candidate_factory import make_candidates
from cluster_factory import BLOCK, make_scheduler, request
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cache_index import sequence_hashes
from conductor.joint import MAX_TOGETHER, assign
from conductor.placement import BEGINNING_TOKENS, Placement, PlacementRequest, UnknownModelError


def test_the_first_gives_way_to_one_that_has_nowhere_else_to_go() -> None:
    first = make_candidates("mm", prefill_s=[1.0, 1.1])
    second = make_candidates("mm", prefill_s=[1.0, 5.0])
    together = assign([first, second])
    assert together is not None
    assert together.ranks == [1, 0]
    assert together.cost_s == pytest.approx(2.1), "one by one both would queue for the first rank, 3.0 in sum"


def test_on_one_rank_the_shorter_prefill_goes_first() -> None:
    together = assign([make_candidates("m", prefill_s=[3.0]), make_candidates("m", prefill_s=[1.0])])
    assert together is not None
    assert together.order == [1, 0]
    assert together.cost_s == pytest.approx(1.0 + 1.0 + 3.0)


def test_those_aboard_are_spared_where_the_detour_is_short() -> None:
    c = make_candidates("mm", queue_s=[0.0, 0.4], prefill_s=[0.2, 0.2], harm=[0.5, 0.0])
    spared = assign([c])
    assert spared is not None
    assert spared.ranks == [1]


def test_what_is_cached_is_spared_where_the_detour_is_short() -> None:
    c = make_candidates("mm", queue_s=[0.0, 0.4], prefill_s=[0.2, 0.2], eviction_s=[0.5, 0.0])
    spared = assign([c])
    assert spared is not None
    assert spared.ranks == [1]


def test_a_request_that_can_go_nowhere_is_left_to_be_refused() -> None:
    assert assign([make_candidates("m"), make_candidates("m", fits=[False])]) is None


def test_decode_ranks_are_not_assigned_prefills() -> None:
    together = assign([make_candidates("pd", prefill_s=[1.0, 0.1])])
    assert together is not None
    assert together.ranks == [0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_together_is_never_worse_than_one_by_one(data: st.DataObject) -> None:
    requests, ranks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    seconds = st.lists(st.floats(0.01, 5), min_size=ranks, max_size=ranks)
    batch = [
        make_candidates("m" * ranks, prefill_s=data.draw(seconds), queue_s=data.draw(seconds))
        for _ in range(requests)
    ]
    together = assign(batch)
    assert together is not None
    assert sorted(together.order) == list(range(requests))
    greedy_s, behind_s = 0.0, np.zeros(ranks)
    for c in batch:
        rank = int((c.ttft_s + behind_s).argmin())
        greedy_s += c.ttft_s[rank] + behind_s[rank]
        behind_s[rank] += c.prefill_s[rank]
    assert together.cost_s <= greedy_s + 1e-9
    best_s = min(
        _sum_s(batch, combination) for combination in itertools.product(range(ranks), repeat=requests)
    )
    assert together.cost_s >= best_s - 1e-9


def _sum_s(batch: list, ranks: tuple[int, ...]) -> float:
    total_s, behind_s = 0.0, [0.0] * len(batch[0].ranks)
    for b in sorted(range(len(batch)), key=lambda b: batch[b].prefill_s[ranks[b]]):
        total_s += batch[b].ttft_s[ranks[b]] + behind_s[ranks[b]]
        behind_s[ranks[b]] += batch[b].prefill_s[ranks[b]]
    return total_s


def test_the_scheduler_places_all_and_keeps_their_order() -> None:
    scheduler = make_scheduler("ppd")
    asked = [request(1024, seed=i, request_id=f"r{i}") for i in range(6)]
    placements = scheduler.place_together(asked, 0.0)
    assert [p.request_id for p in placements if isinstance(p, Placement)] == [f"r{i}" for i in range(6)]
    assert {p.prefill.instance_id for p in placements if isinstance(p, Placement)} == {"p0", "p1"}
    scheduler.check_invariants()


def _by_hashes(prompt: PlacementRequest, block_size: int) -> PlacementRequest:
    hashes = sequence_hashes(prompt.tokens, block_size)
    return replace(prompt, tokens=prompt.tokens[:0], hashes=hashes, hashes_block_size=block_size)


@pytest.mark.parametrize("by_hashes", [False, True])
def test_those_who_begin_alike_land_together(by_hashes: bool) -> None:
    scheduler = make_scheduler("mmmm")
    prompt = _by_hashes(request(16_384), BLOCK) if by_hashes else request(16_384)
    placements = scheduler.place_together([replace(prompt) for _ in range(4)], 0.0)
    assert len({p.prefill.instance_id for p in placements if isinstance(p, Placement)}) <= 2, (
        "what the first computes, the others find"
    )


def test_prompts_known_by_hashes_begin_alike_when_their_first_blocks_are_equal() -> None:
    for block_size in (16, 512, 4096):
        first, second = (_by_hashes(request(8192, seed=seed), block_size) for seed in (1, 2))
        assert first.hashes is not None and second.hashes is not None
        assert first.beginning() != second.beginning()
        leading = max(BEGINNING_TOKENS // block_size, 1)
        hashes = np.concatenate([first.hashes[:leading], second.hashes[leading:]])
        assert replace(second, hashes=hashes).beginning() == first.beginning()


def test_an_unknown_prompt_begins_like_no_other() -> None:
    unknown = replace(request(64), tokens=np.empty(0, np.uint32))
    assert unknown.beginning() is None
    scheduler = make_scheduler("mm")
    placements = scheduler.place_together([unknown, unknown], 0.0)
    assert {p.prefill.instance_id for p in placements if isinstance(p, Placement)} == {"m0", "m1"}


def test_an_unknown_model_does_not_spoil_the_others() -> None:
    scheduler = make_scheduler("m")
    results = scheduler.place_together([request(64, model="nope"), request(64)], 0.0)
    assert isinstance(results[0], UnknownModelError)
    assert isinstance(results[1], Placement)


def test_more_than_fit_into_one_flow_are_placed_too() -> None:
    scheduler = make_scheduler("mm")
    placements = scheduler.place_together([request(64, seed=i) for i in range(MAX_TOGETHER + 3)], 0.0)
    assert all(isinstance(p, Placement) for p in placements)
