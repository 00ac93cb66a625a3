"""What a shared pool holds counts for the instances that load from it, and for nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from cluster_factory import BLOCK, facts, make_scheduler, request
from hypothesis import given
from hypothesis import strategies as st

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from conductor.catalogue import LLAMA_8B_H100
from conductor.cluster import make_instance
from conductor.costs import PoolLink, Speed
from conductor.placement import PlanSegment, Role
from conductor.prefix_lookup import IndexLookup
from conductor.scheduler import Scheduler
from conductor.shared_pools import SharedPool, SharedPools

STORE, OTHER = Holder("store"), Holder("other-store")
NAMESPACE = Namespace("llama", BLOCK)
PROMPT = request(4096)
LAST = len(Tier) - 1


def pooled(
    roles: str, *pools: SharedPool, blocks: int = 128, pool_links: Sequence[PoolLink] = ()
) -> Scheduler:
    """Up, and every pool holds the first ``blocks`` blocks of the prompt."""
    index = CacheIndex()
    lookup = IndexLookup(index, pools=pools)
    scheduler = make_scheduler(roles, lookup=lookup, index=index, pool_links=pool_links)
    for pool in pools:
        store(index, pool.holder, pool.tier, blocks)
    return scheduler


def store(index: CacheIndex, holder: Holder, tier: Tier, blocks: int) -> None:
    index.register(holder)
    index.store(holder, tier, NAMESPACE, sequence_hashes(PROMPT.tokens, BLOCK)[:blocks])


def held(scheduler: Scheduler) -> dict[str, list[int]]:
    """Usable tokens of the prompt in the tiers up to each, by instance."""
    candidates = scheduler.consider(PROMPT, 0.0).candidates
    assert candidates is not None
    return {
        rank.holder.instance_id: tokens
        for rank, tokens in zip(candidates.ranks, candidates.local_tokens.T.tolist(), strict=True)
    }


def test_only_members_have_what_a_pool_holds() -> None:
    scheduler = pooled("mmm", SharedPool(STORE, Tier.POD, frozenset({"m0", "m2", "absent"})))
    assert held(scheduler) == {"m0": [0, 0, 0, 2048, 2048], "m1": [0] * 5, "m2": [0, 0, 0, 2048, 2048]}


def test_without_members_a_pool_is_everybodys() -> None:
    scheduler = pooled("pd", SharedPool(STORE, Tier.REMOTE))
    assert held(scheduler) == {"p0": [0, 0, 0, 0, 2048], "d1": [0, 0, 0, 0, 2048]}


def test_the_pools_tier_is_where_its_blocks_are_whatever_it_says_itself() -> None:
    scheduler = pooled("m", SharedPool(STORE, Tier.POD), blocks=0)
    store(scheduler.index, STORE, Tier.REMOTE, 16)
    assert held(scheduler)["m0"] == [0, 0, 0, 256, 256]


def test_the_longer_prefix_counts() -> None:
    scheduler = pooled("mm", SharedPool(STORE, Tier.REMOTE))
    store(scheduler.index, Holder("m0"), Tier.DEVICE, 200)
    store(scheduler.index, Holder("m1"), Tier.HOST, 10)
    assert held(scheduler) == {"m0": [3200] * 5, "m1": [0, 160, 160, 160, 2048]}


def test_one_pool_does_not_load_from_another() -> None:
    index = CacheIndex()
    pools = SharedPools(
        index, [SharedPool(STORE, Tier.REMOTE), SharedPool(OTHER, Tier.POD, frozenset({"a"}))]
    )
    rows = {holder: index.register(holder) for holder in (STORE, OTHER, Holder("a"), Holder("b"))}
    store(index, STORE, Tier.REMOTE, 8)
    levels = index.match(NAMESPACE, sequence_hashes(PROMPT.tokens, BLOCK))
    pools.raise_levels(levels)
    assert levels[rows[OTHER], LAST] == 0
    assert levels[rows[Holder("a")]].tolist() == levels[rows[Holder("b")]].tolist() == [0, 0, 0, 0, 8]


def test_a_departed_member_leaves_its_row_without_the_pool() -> None:
    scheduler = pooled("mm", SharedPool(STORE, Tier.REMOTE, frozenset({"m0", "late"})))
    assert held(scheduler)["m0"][LAST] == 2048
    row = scheduler.index.holder_id(Holder("m0"))
    scheduler.remove_instance("m0")
    for name in ("stranger", "late"):
        scheduler.add_instance(
            make_instance(
                instance_id=name,
                url="http://10.0.0.9:8000",
                role=Role.MIXED,
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
            )
        )
        scheduler.instance_up(name, facts())
    assert scheduler.index.holder_id(Holder("stranger")) == row, "the row must have been given away"
    found = held(scheduler)
    assert (found["stranger"][LAST], found["late"][LAST], found["m1"][LAST]) == (0, 2048, 0)


def test_a_pool_that_is_not_there_yet_or_no_more_counts_for_nobody() -> None:
    index = CacheIndex()
    pools = [SharedPool(STORE, Tier.REMOTE)]
    scheduler = make_scheduler("m", lookup=IndexLookup(index, pools=pools), index=index)
    assert held(scheduler)["m0"] == [0] * 5
    store(index, STORE, Tier.REMOTE, 128)
    assert held(scheduler)["m0"][LAST] == 2048
    index.unregister(STORE)
    assert held(scheduler)["m0"] == [0] * 5


def test_a_plan_loads_from_the_pool_where_that_is_cheaper_than_computing() -> None:
    scheduler = pooled("m", SharedPool(STORE, Tier.REMOTE))
    store(scheduler.index, Holder("m0"), Tier.DEVICE, 32)
    alone = make_scheduler("m").place(PROMPT, 0.0)
    plan = scheduler.place(PROMPT, 0.0).plan
    assert plan.segments == (
        PlanSegment(0, 512, Holder("m0"), Tier.DEVICE),
        PlanSegment(512, 2048, Holder("m0"), Tier.REMOTE),
    )
    remote = LLAMA_8B_H100.tiers[Tier.REMOTE]
    load_s = remote.latency_s + 1536 * LLAMA_8B_H100.kv_bytes_per_token / remote.bytes_per_s
    assert plan.fetch_s == load_s
    assert plan.prefill_s < alone.plan.prefill_s


def test_instances_that_load_together_share_what_the_pool_can_give() -> None:
    """Each would load if it were alone; a few of them do, and the rest compute."""
    store_of_all = SharedPool(STORE, Tier.REMOTE)

    def loaded(pool_links: Sequence[PoolLink]) -> list[float]:
        scheduler = pooled("m" * 8, store_of_all, pool_links=pool_links)
        return [scheduler.place(PROMPT, 0.0).plan.fetch_s for _ in range(8)]

    assert len(set(loaded([]))) == 1
    rate = LLAMA_8B_H100.tiers[Tier.REMOTE].bytes_per_s
    found = loaded([PoolLink(Tier.REMOTE, rate)])
    loads = [seconds for seconds in found if seconds > 0.0]
    assert loads == sorted(loads) and 1 < len(loads) == len(set(loads))
    scheduler = pooled("mmm", store_of_all, pool_links=[PoolLink(Tier.REMOTE, rate)])
    alone = [
        scheduler.place(request(4096, excluded=frozenset(others)), now_s).plan.fetch_s
        for others, now_s in ((("m1", "m2"), 0.0), (("m0", "m2"), 0.0), (("m0", "m1"), 60.0))
    ]
    assert alone[0] == alone[2] < alone[1]


def test_a_plan_leaves_a_pool_alone_that_is_slow_or_out_of_reach() -> None:
    slow = {Tier.REMOTE: Speed(bytes_per_s=1e9, latency_s=1e-3)}
    for tiers in (slow, {}):
        scheduler = pooled("", SharedPool(STORE, Tier.REMOTE))
        scheduler.add_instance(
            make_instance(
                instance_id="m",
                url="http://10.0.0.9:8000",
                role=Role.MIXED,
                instance_class=replace(LLAMA_8B_H100, tiers=tiers),
                protocol="vllm-nixl",
            )
        )
        scheduler.instance_up("m", facts())
        assert held(scheduler)["m"][LAST] == 2048
        assert scheduler.place(PROMPT, 0.0).plan.segments == ()


@given(
    levels=st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=5), min_size=1, max_size=6),
    pool=st.integers(0, 5),
    tier=st.sampled_from(list(Tier)[1:]),
    members=st.none() | st.frozensets(st.sampled_from([f"i{n}" for n in range(6)])),
)
def test_any_levels_are_raised_as_said(
    levels: list[list[int]], pool: int, tier: Tier, members: frozenset[str] | None
) -> None:
    index = CacheIndex()
    holders = [Holder(f"i{n}") for n in range(6)]
    for holder in holders:
        index.register(holder)
    matched = np.maximum.accumulate(np.array(levels, np.int32), axis=1)
    expected = matched.copy()
    for n in range(len(expected)):
        if n != pool and pool < len(expected) and (members is None or f"i{n}" in members):
            expected[n, tier:] = np.maximum(expected[n, tier:], expected[pool, LAST])
    SharedPools(index, [SharedPool(holders[pool], tier, members)]).raise_levels(matched)
    assert matched.tolist() == expected.tolist()
