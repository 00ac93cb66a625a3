"""What the planner orders, over a real index: which copies, what is dropped, and what it leaves alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import pytest
from cluster_factory import BLOCK, make_scheduler, request
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from conductor.action_ledger import ActionLedger, ActionState
from conductor.actions import ActionKind, Place, TierAction
from conductor.costs import PoolLink, Speed
from conductor.costs.tables import POOL_BUSY_UNTIL_S
from conductor.placement import PlacementRequest, Usage
from conductor.prefix_lookup import IndexLookup
from conductor.scheduler import Scheduler
from conductor.shared_pools import SharedPool
from conductor.tier_planner import PlannerSettings, Site, TierPlanner

NAMESPACE = Namespace("llama", BLOCK)
POOL = Holder("pool")
HOST_BLOCKS = 100


class Planned:
    """Two mixed instances with a host tier each and a slow pool; the test plays the engines and their events."""

    def __init__(
        self,
        *kinds: ActionKind,
        host_blocks: int = HOST_BLOCKS,
        pool: bool = True,
        pool_links: Sequence[PoolLink] = (),
    ) -> None:
        index = CacheIndex()
        pools = [SharedPool(POOL, Tier.REMOTE)] if pool else []
        self.scheduler: Scheduler = make_scheduler(
            "mm",
            lookup=IndexLookup(index, pools=pools),
            index=index,
            pool_links=pool_links,
        )
        self.index = index
        sites = [
            Site(Place(Holder(name), Tier.HOST), host_blocks * BLOCK, frozenset({name}))
            for name in ("m0", "m1")
        ]
        if pool:
            index.register(POOL)
            sites.append(Site(Place(POOL, Tier.REMOTE), 100_000 * BLOCK, None, Speed(2e9, 1e-2)))
        chosen = frozenset(kinds) if kinds else frozenset(ActionKind)
        self.planner = TierPlanner(
            self.scheduler.cluster,
            index,
            sites,
            lambda kind, source, target: target.tier is not Tier.DEVICE,
            PlannerSettings(kinds=chosen, learns_from=0),
        )
        self.scheduler.on_placed = self.planner.placed
        self.served: dict[str, str] = {}

    def serve(self, asked: PlacementRequest, now_s: float) -> str:
        """Placed, computed at once and written through to host and pool; the instance."""
        placement = self.scheduler.place(asked, now_s)
        name = placement.prefill.instance_id
        hashes = sequence_hashes(asked.tokens, BLOCK)
        for holder, tier in ((Holder(name), Tier.DEVICE), (Holder(name), Tier.HOST), (POOL, Tier.REMOTE)):
            if self.index.holder_id(holder) is not None:
                self.lose(holder, tier, hashes)
                self.index.store(holder, tier, NAMESPACE, hashes)
        self.scheduler.first_token(placement.placement_id, now_s + 0.1)
        self.scheduler.finished(placement.placement_id, now_s + 0.2, Usage(asked.prompt_tokens, 9, 0))
        return name

    def lose(self, holder: Holder, tier: Tier, hashes: np.ndarray) -> None:
        self.index.remove(holder, tier, NAMESPACE, hashes)

    def drop(self, asked: PlacementRequest, name: str) -> None:
        """The engine's own memory has the prompt no more."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self.lose(Holder(name), tier, sequence_hashes(asked.tokens, BLOCK))


def turn(tokens: int, seed: int = 0) -> PlacementRequest:
    """Prompts of one seed continue each other."""
    whole = request(100_000, seed=seed)
    return request(tokens, seed=seed, **{}) if tokens == 100_000 else _cut(whole, tokens)


def _cut(whole: PlacementRequest, tokens: int) -> PlacementRequest:
    return PlacementRequest(whole.request_id, whole.model, whole.tokens[:tokens], tokens)


def learned_returns(planned: Planned, turns: int = 30) -> float:
    """Conversations come back every ten seconds, so that another one is expected to; the time then."""
    now_s = 0.0
    for number in range(1, turns):
        for seed in range(100, 104):
            planned.serve(turn(320 * number, seed), now_s)
            planned.planner.plan(now_s)
            now_s += 2.5
    return now_s


def dropped_conversation(planned: Planned) -> tuple[PlacementRequest, str, float]:
    """One that is expected to go on, that only the pool has; with who served it, and the time then."""
    now_s = learned_returns(planned)
    asked = turn(320 * 29, 100)
    name = planned.serve(asked, now_s)
    planned.planner.plan(now_s)
    planned.drop(asked, name)
    return asked, name, now_s


def test_a_conversation_that_comes_back_is_brought_from_the_pool_before_it_does() -> None:
    planned = Planned(ActionKind.PREFETCH, host_blocks=100_000)
    asked, name, now_s = dropped_conversation(planned)
    actions = [a for step in range(1, 40) for a in planned.planner.plan(now_s + step)]
    mine = [a for a in actions if a.prefix is not None and len(a.prefix.hashes) == len(asked.tokens) // BLOCK]
    assert mine, "its next turn is due"
    (action,) = mine
    assert action.kind is ActionKind.PREFETCH
    assert (action.source, action.target) == (Place(POOL, Tier.REMOTE), Place(Holder(name), Tier.HOST))
    assert (action.start, action.stop) == (0, 580)
    assert action.benefit_s > action.cost_s > 0.0
    assert "next turn" in action.reason


def test_what_is_on_its_way_from_a_pool_holds_loads_up() -> None:
    link = PoolLink(Tier.REMOTE, 2e9)
    planned = Planned(ActionKind.PREFETCH, host_blocks=100_000, pool_links=[link])
    _, _, now_s = dropped_conversation(planned)
    while not (actions := planned.planner.plan(now_s)):
        now_s += 1.0
    pools = planned.scheduler.cluster.tables.pools
    assert pools[0, POOL_BUSY_UNTIL_S] <= now_s
    planned.planner.ordered(actions, now_s)
    carried_bytes = sum(each.kv_bytes for each in actions)
    assert carried_bytes > 1e9
    assert pools[0, POOL_BUSY_UNTIL_S] - now_s == pytest.approx(carried_bytes / 2e9, rel=1e-3)


def test_nothing_is_prefetched_over_the_link_of_a_pool_that_requests_need() -> None:
    planned = Planned(ActionKind.PREFETCH, host_blocks=100_000)
    asked, _, now_s = dropped_conversation(planned)
    others = [turn(16_000, seed) for seed in range(60)]
    for each in others:  # a minute of the link, and more
        planned.index.store(POOL, Tier.REMOTE, NAMESPACE, sequence_hashes(each.tokens, BLOCK))
        plan = planned.scheduler.place(each, now_s).plan
        assert [part.tier for part in plan.segments] == [Tier.REMOTE]
    actions = [a for step in range(1, 10) for a in planned.planner.plan(now_s + step)]
    mine = [a for a in actions if a.prefix is not None and len(a.prefix.hashes) == len(asked.tokens) // BLOCK]
    assert mine == []


def test_what_is_at_hand_or_nowhere_is_not_prefetched() -> None:
    planned = Planned(ActionKind.PREFETCH, host_blocks=100_000, pool=False)
    now_s = learned_returns(planned)
    asked = turn(320 * 29, 100)
    name = planned.serve(asked, now_s)
    assert [a for step in range(40) for a in planned.planner.plan(now_s + step)] == []
    planned.drop(asked, name)
    assert [a for step in range(40) for a in planned.planner.plan(now_s + step)] == []


def test_a_full_tier_drops_what_never_returned_and_not_what_does() -> None:
    planned = Planned(ActionKind.EVICT, host_blocks=2_500)
    now_s = learned_returns(planned)
    planned.planner.plan(now_s)
    dropped: list[TierAction] = []
    for seed in range(200, 230):  # prompts that come once
        planned.serve(turn(1_600, seed), now_s)
        actions = planned.planner.plan(now_s + 0.5)
        now_s += 1.0
        dropped += actions
        for action in actions:
            assert action.kind is ActionKind.EVICT and action.source is None and action.prefix is not None
            holder, tier = action.target
            planned.lose(holder, tier, action.prefix.hashes[action.start : action.stop])
    assert dropped
    once = [a for a in dropped if a.prefix is not None and len(a.prefix.hashes) == 100]
    assert len(once) > len(dropped) / 2
    for name in ("m0", "m1"):
        held = planned.index.stats().residencies_by_holder[Holder(name)].get(Tier.HOST, 0)
        assert held <= 2_500


def test_turns_that_go_together_are_dropped_by_one_order() -> None:
    planned = Planned(ActionKind.EVICT, host_blocks=2_500, pool=False)
    now_s = learned_returns(planned) + 5_000.0  # conversations of turns of 20 blocks, which are over now
    over = {sequence_hashes(turn(320, seed).tokens, BLOCK).item(0) for seed in range(100, 104)}
    orders: list[TierAction] = []
    for seed in range(200, 230):
        planned.serve(turn(1_600, seed), now_s)
        for action in planned.planner.plan(now_s + 0.5):
            assert action.prefix is not None
            gone = action.prefix.hashes[action.start : action.stop]
            assert planned.index.held_run(*action.target, NAMESPACE, gone) == len(gone), "all of it was there"
            planned.lose(*action.target, gone)
            orders.append(action)
        now_s += 1.0
    mine = [a for a in orders if a.prefix is not None and a.prefix.hashes.item(0) in over]
    assert mine and all(action.blocks > 20 for action in mine)
    for name in ("m0", "m1"):
        parts = [(a.start, a.stop) for a in mine if a.target.holder.instance_id == name]
        assert [stop for _, stop in parts] == [580, *(start for start, _ in parts[:-1])], "from the end on"


def test_what_was_there_before_is_left_to_its_engine_to_drop() -> None:
    """A planner that starts over full tiers drops nothing of what it knows while there is older than that."""
    planned = Planned(ActionKind.EVICT, host_blocks=1_000, pool=False)
    older = {}
    for name in ("m0", "m1"):
        older[name] = deque(sequence_hashes(request(16_000, seed=len(name + name)).tokens, BLOCK).tolist())
        planned.index.store(Holder(name), Tier.HOST, NAMESPACE, np.array(older[name], np.uint64))
    came, dropped = dict.fromkeys(older, 0), dict.fromkeys(older, 0)
    for seed in range(60):
        now_s = 10.0 * seed
        name = planned.serve(turn(1_600, 200 + seed), now_s)
        came[name] += 100
        gone = [older[name].popleft() for _ in range(min(100, len(older[name])))]
        planned.lose(Holder(name), Tier.HOST, np.array(gone, np.uint64))
        for action in planned.planner.plan(now_s + 9.0):
            assert action.prefix is not None
            where = action.target.holder.instance_id
            assert came[where] >= 1_000, "there is older"
            dropped[where] += action.blocks
            planned.lose(*action.target, action.prefix.hashes[action.start : action.stop])
    for name, blocks in came.items():
        held = planned.index.held_blocks(Holder(name), Tier.HOST)
        assert held <= 1_000
        assert dropped[name] == blocks - held > 0


def test_what_a_route_tells_of_its_prompts_is_learned() -> None:
    """Conversations of one route go on after half a minute, those of another never do; nothing else differs."""
    planned = Planned(ActionKind.EVICT, host_blocks=600, pool=False)
    begun: dict[int, str] = {}  # routes of prompts that may go on, by their last block
    dropped = Counter[str]()
    last_turns: deque[PlacementRequest] = deque()
    for number in range(240):
        now_s = 2.5 * number
        asked = replace(turn(1_600, 1_000 + number), route=("ends", "goes on")[number % 2])
        begun[sequence_hashes(asked.tokens, BLOCK).item(-1)] = asked.route
        planned.serve(asked, now_s)
        if asked.route == "goes on":
            last_turns.append(replace(turn(2_400, 1_000 + number), route=asked.route))
        if len(last_turns) > 6:
            next_turn = last_turns.popleft()
            begun.pop(sequence_hashes(next_turn.tokens, BLOCK).item(99))
            planned.serve(next_turn, now_s + 0.1)
        for action in planned.planner.plan(now_s + 1.0):
            assert action.prefix is not None
            gone = action.prefix.hashes[action.start : action.stop]
            planned.lose(action.target.holder, Tier.HOST, gone)
            if number >= 120 and gone.item(-1) in begun:
                dropped[begun[gone.item(-1)]] += 1
    assert dropped["ends"] > 50
    assert dropped["goes on"] < dropped["ends"] / 10


def test_a_prompt_that_waits_is_not_dropped_and_is_promoted() -> None:
    planned = Planned(ActionKind.EVICT, ActionKind.PROMOTE, host_blocks=1_000)
    asked = turn(16_000)
    name = planned.serve(asked, 0.0)
    planned.planner.plan(0.5)
    planned.drop(asked, name)
    for seed in range(50, 60):  # both instances have work to do before it
        planned.scheduler.place(turn(30_000, seed), 1.0)
    placement = planned.scheduler.place(asked, 1.0)
    assert placement.predicted_ttft_s > 0.5
    actions = planned.planner.plan(1.1)
    (promoted,) = [a for a in actions if a.kind is ActionKind.PROMOTE]
    assert promoted.target == Place(Holder(placement.prefill.instance_id), Tier.HOST)
    assert promoted.deadline_s == pytest.approx(
        1.0 + placement.predicted_ttft_s, abs=placement.predicted_ttft_s
    )
    assert planned.planner.plan(1.2) == [], "it is under way"


def test_a_hot_beginning_goes_to_whom_load_goes() -> None:
    planned = Planned(ActionKind.REPLICATE, host_blocks=100_000, pool=False)
    shared = turn(8_000).tokens
    now_s = 0.0
    actions: list[TierAction] = []
    for seed in range(40):
        own = request(320, seed=1_000 + seed).tokens
        asked = PlacementRequest("r", "llama", np.concatenate([shared, own]), 8_320)
        name = planned.scheduler.place(asked, now_s).prefill.instance_id  # nobody ends: queues grow
        if seed == 0:
            planned.index.store(Holder(name), Tier.DEVICE, NAMESPACE, sequence_hashes(shared, BLOCK))
            first = name
        now_s += 0.2
        actions += planned.planner.plan(now_s)
    other = "m1" if first == "m0" else "m0"
    assert actions, "half of the load goes where the beginning is not held"
    assert {str(a.target) for a in actions} == {f"{other}/host"}
    assert all(a.stop == 500 and a.source == Place(Holder(first), Tier.DEVICE) for a in actions)


def test_what_only_a_leaving_instance_has_is_copied_to_others() -> None:
    planned = Planned(ActionKind.REPLICATE, host_blocks=100_000, pool=False)
    now_s = learned_returns(planned)
    asked = turn(320 * 29, 100)
    name = planned.serve(asked, now_s)
    assert planned.planner.plan(now_s + 1.0) == []
    planned.scheduler.drain_instance(name)
    other = "m1" if name == "m0" else "m0"
    actions = planned.planner.plan(now_s + 2.0)
    assert actions and {str(a.target) for a in actions} == {f"{other}/host"}
    assert all(f"{name} is leaving" in a.reason for a in actions)


def test_a_shared_beginning_is_pinned_while_it_is_used() -> None:
    planned = Planned(ActionKind.PIN, ActionKind.UNPIN, host_blocks=100_000, pool=False)
    shared = turn(1_600).tokens
    now_s = 0.0
    orders: list[TierAction] = []
    for seed in range(12):
        own = request(320, seed=1_000 + seed).tokens
        planned.serve(PlacementRequest("r", "llama", np.concatenate([shared, own]), 1_920), now_s)
        now_s += 1.0
        orders += planned.planner.plan(now_s)
    pinned = {str(a.target) for a in orders if a.kind is ActionKind.PIN}
    assert pinned and all((a.start, a.stop) == (0, 100) for a in orders)
    later = [a for hours in range(1, 40) for a in planned.planner.plan(now_s + 3600.0 * hours)]
    assert {str(a.target) for a in later if a.kind is ActionKind.UNPIN} == pinned


def test_nothing_is_planned_for_prompts_without_tokens() -> None:
    planned = Planned()
    planned.scheduler.place(PlacementRequest("r", "llama", np.empty(0, np.uint32), 500), 0.0)
    assert planned.planner.plan(1.0) == []


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans(), st.sampled_from([0.5, 5.0, 40.0])),
        max_size=40,
    )
)
def test_orders_fit_and_nothing_goes_to_and_fro(steps: list[tuple[int, int, bool, float]]) -> None:
    """Copies into a site never exceed its free room, and within the hold nothing is dropped that was brought."""
    planned = Planned(host_blocks=60)
    ledger = ActionLedger(free_bytes=planned.planner.free_bytes)
    brought: dict[tuple[int, str], float] = {}
    now_s = 0.0
    for seed, blocks, loses, pause_s in steps:
        asked = turn(64 * blocks, seed)
        name = planned.serve(asked, now_s)
        if loses:
            planned.drop(asked, name)
        now_s += pause_s
        room = {n: planned.planner.free_bytes(Place(Holder(n), Tier.HOST)) for n in ("m0", "m1")}
        actions = planned.planner.plan(now_s)
        coming = dict.fromkeys(room, 0)
        for action in actions:
            assert action.prefix is not None and 0 <= action.start < action.stop <= len(action.prefix.hashes)
            key = (action.prefix.hashes.item(action.stop - 1), str(action.target))
            if action.kind is ActionKind.EVICT:
                assert brought.get(key, -1.0) < now_s, "dropped what was just brought"
                planned.lose(*action.target, action.prefix.hashes[action.start : action.stop])
            elif action.kv_bytes:
                coming[action.target.holder.instance_id] = (
                    coming.get(action.target.holder.instance_id, 0) + action.kv_bytes
                )
                brought[key] = now_s + 60.0
            ledger.submit(action, now_s)
        for each, size in coming.items():
            limit = room.get(each)
            assert limit is None or size <= limit + (1 << 20) * len(actions)
        for started in ledger.advance(now_s).start:
            ledger.completed(started.action_id, started.blocks, now_s)
        for record in ledger.records(ActionState.DONE):
            planned.planner.ended(record)
        ledger.check_invariants()


def test_what_a_slower_tier_lacks_is_handed_down_once_and_dropped_when_it_is_there() -> None:
    planned = Planned(ActionKind.EVICT, ActionKind.DEMOTE, host_blocks=400, pool=False)
    planned.index.register(POOL)  # nothing is written through to it
    store = Place(POOL, Tier.REMOTE)
    hosts = [Place(Holder(name), Tier.HOST) for name in ("m0", "m1")]
    planned.planner.use_sites(
        [Site(host, 400 * BLOCK, frozenset({host.holder.instance_id})) for host in hosts]
        + [Site(store, 100_000 * BLOCK, None)]
    )
    now_s = learned_returns(planned, turns=20)
    demoted: list[TierAction] = []
    for seed in range(200, 216):
        planned.serve(turn(320 * 19, 100 + seed % 4), now_s)
        planned.index.clear(POOL)  # what the test's engines write through by themselves
        now_s += 1.0
        for action in planned.planner.plan(now_s):
            if action.kind is ActionKind.DEMOTE:
                demoted.append(action)
            else:
                assert action.prefix is not None
                planned.lose(*action.target, action.prefix.hashes[action.start : action.stop])
    assert demoted
    keys = [(a.prefix.hashes.item(a.stop - 1), str(a.target)) for a in demoted if a.prefix is not None]
    assert len(set(keys)) == len(keys), "ordered twice"
    first = demoted[0]
    assert first.prefix is not None and first.source is not None
    held = planned.index.match(NAMESPACE, first.prefix.hashes)
    row = planned.index.holder_id(first.source.holder)
    assert held[row, Tier.HOST] >= first.stop, "it stays until it lies below"
    moved = first.prefix.hashes[: first.stop]
    planned.index.store(POOL, Tier.REMOTE, NAMESPACE, moved)
    dropped = [a for step in range(1, 4) for a in planned.planner.plan(now_s + step)]
    assert any(
        a.kind is ActionKind.EVICT and a.prefix is not None and a.prefix.hashes.item(a.stop - 1) == keys[0][0]
        for a in dropped
    )


def filled(slower: Site, host_blocks: int = 400) -> tuple[Planned, float, dict[str, list[TierAction]]]:
    """Full host tiers behind which there is a tier that nothing is written through to: the first round's orders."""
    planned = Planned(ActionKind.EVICT, ActionKind.DEMOTE, host_blocks=host_blocks, pool=False)
    if slower.place.holder == POOL:
        planned.index.register(POOL)
    hosts = [Place(Holder(name), Tier.HOST) for name in ("m0", "m1")]
    sites = [Site(host, host_blocks * BLOCK, frozenset({host.holder.instance_id})) for host in hosts]
    planned.planner.use_sites([*sites, slower])
    now_s = 0.0
    orders: dict[str, list[TierAction]] = {}
    while not orders and now_s < 1_000.0:
        for seed in range(100, 104):
            planned.serve(turn(320 * (1 + int(now_s / 10.0)), seed), now_s)
            planned.index.clear(POOL)  # what the test's engines write through by themselves
            now_s += 2.5
            for action in planned.planner.plan(now_s):
                orders.setdefault(action.target.tier.name, []).append(action)
    return planned, now_s, orders


def test_a_slower_tier_gets_what_its_instances_host_alone_has() -> None:
    """What the host holds is not taken for what the flash behind it holds."""
    flash = Site(Place(Holder("m0"), Tier.POD), 100_000 * BLOCK, frozenset({"m0"}))
    planned, now_s, _ = filled(flash)
    demoted: list[TierAction] = []
    for seed in range(200, 230):
        planned.serve(turn(320 * 12, 100 + seed % 4), now_s)
        now_s += 1.0
        demoted += [a for a in planned.planner.plan(now_s) if a.kind is ActionKind.DEMOTE]
    assert demoted
    assert {(str(a.source), str(a.target)) for a in demoted} == {("m0/host", "m0/pod")}


def test_a_pool_gets_the_beginning_too_and_what_is_handed_down_counts_as_room_made() -> None:
    _, _, orders = filled(Site(Place(POOL, Tier.REMOTE), 100_000 * BLOCK, None, Speed(20e9, 1e-3)))
    demoted = orders["REMOTE"]
    assert all(a.kind is ActionKind.DEMOTE for a in demoted)
    assert all(a.start == 0 for a in demoted), "without the beginning a pool has nothing of a prompt"
    # A twentieth of each host is to go, and one end of a conversation is more than that.
    assert len(demoted) <= 2
