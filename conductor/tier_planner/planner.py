"""The tier planner: told what is placed, it says from time to time what to move, keep and drop.

It decides nothing about requests, and no request waits for it: `placed` takes a note, `plan` does the work. Time is
an argument, and the same notes give the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import count, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np

from cache_index import CacheIndex, Tier
from conductor.action_ledger import ActionRecord, ActionState
from conductor.actions import ActionKind, Place, Prefix, TierAction
from conductor.cluster import Cluster, Health, InstanceState
from conductor.costs import POOL_TIERS
from conductor.explanation import PlacementRecord
from conductor.placement import PlacementRequest
from conductor.prefix_lookup import hashes_of, namespace_of
from conductor.roster import CacheGroup
from conductor.tier_planner.contents import Contents
from conductor.tier_planner.draining import drain
from conductor.tier_planner.hot_prefixes import HotPrefixes
from conductor.tier_planner.link_demand import LinkDemand
from conductor.tier_planner.outlook import Match, Outlook, Proposal
from conductor.tier_planner.pinning import LEAST_RATE as PINNED_RATE
from conductor.tier_planner.pinning import Pins
from conductor.tier_planner.prefetching import EXPECTED_WITHIN_S, prefetch
from conductor.tier_planner.prefix_tree import PrefixTree, Segment
from conductor.tier_planner.promotion import promote
from conductor.tier_planner.replication import replicate
from conductor.tier_planner.rests import Rests
from conductor.tier_planner.retention import FullSite, make_room
from conductor.tier_planner.returns import Returns, Visit
from conductor.tier_planner.selection import select
from conductor.tier_planner.sites import Site, Sites
from conductor.tier_planner.track_record import TrackRecord

YIELDS: Final = 0.02  # of a full site
WORTH_ROOM: Final = 2.0  # times as much as what was dropped last, at least, is what is brought in its place
LEAST_CHANCE: Final = 0.05  # of a next turn soon, for a prefetch to be thought of
LOOK_AGAIN_S: Final = 10.0  # at a conversation that was not worth a prefetch
ALL_KINDS: Final = frozenset(ActionKind)
FILLS: Final = frozenset({ActionKind.REPLICATE, ActionKind.PROMOTE, ActionKind.PREFETCH, ActionKind.DEMOTE})


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """``kinds`` are the actions that may be ordered. ``hold_s`` is how long what was moved stays where it is, and
    what was dropped stays away: nothing goes to and fro within that time.
    """

    kinds: frozenset[ActionKind] = ALL_KINDS
    every_s: float = 1.0
    learns_from: int = 1_000  # requests, before what is dropped and prefetched rests on what was learned
    hold_s: float = 60.0
    looks: int = 50  # conversations looked at in a round for a prefetch
    checks: int = 32  # sites of which some segments are looked up in a round
    segments: int = 100_000  # that are remembered


@dataclass(slots=True)
class _Waiting:
    record: PlacementRecord
    segment: Segment


class TierPlanner:
    """Plans for the sites of one cluster. ``can`` tells which actions somebody carries out between which places.

    ``match`` looks prefixes up, None: in ``index`` alone, by the hashes of engines' blocks. ``returns`` is what
    was learned before, by this planner's own to learn on.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: CacheIndex,
        sites: Iterable[Site],
        can: Callable[[ActionKind, Place | None, Place], bool],
        settings: PlannerSettings = PlannerSettings(),
        *,
        match: Match | None = None,
        returns: Returns | None = None,
        id_prefix: str = "t",
    ) -> None:
        self.settings = settings
        self._can_do = can
        self._returns = Returns() if returns is None else returns
        tree = PrefixTree(settings.segments)
        self._demand, self._track = LinkDemand(), TrackRecord()
        match = match or (lambda prefix, stop: index.match(prefix.namespace, prefix.hashes[:stop]))
        self._outlook = Outlook(
            *(cluster, index, match, Sites(cluster, sites), tree, self._returns),
            *(self._demand, self._track, self._can),
        )
        self._notes: deque[tuple[PlacementRecord, PlacementRequest, float]] = deque()
        self._contents = Contents(self._outlook)
        self._rests = Rests(settings.hold_s)  # of what was moved or dropped
        self._ends: dict[Segment, str] = {}  # of conversations, with the instance that served them last
        self._marginal: dict[Place, float] = {}  # uses a second of what a site dropped last
        self._looked: dict[Segment, float] = {}  # for a prefetch: when to look again
        self._waiting: dict[str, _Waiting] = {}
        self._hot = HotPrefixes()
        self._pins = Pins()
        self._numbers = count(1)
        self._id_prefix = id_prefix
        self._block_tokens = 0
        self._models: dict[str, None] = {}

    def use_sites(self, sites: Iterable[Site]) -> None:
        """These are the sites from now on. Not while `plan` runs."""
        self._outlook.sites = Sites(self._outlook.cluster, sites)
        self._contents.follow_sites()

    def placed(self, record: PlacementRecord, now_s: float) -> None:
        """A request was placed; takes a note of it."""
        self._notes.append((record, record.request, now_s))  # whose tokens the record forgets when it ends

    def ended(self, record: ActionRecord) -> None:
        """An action has ended: what was not done may be planned again at once."""
        action = record.action
        if action.prefix is None or record.state is ActionState.DONE:
            return
        key = (action.prefix.hashes.item(action.stop - 1), action.target)
        self._rests.end(*key)
        if action.kind is ActionKind.PIN:
            self._pins.forget(*key)
        if action.kind is ActionKind.EVICT:
            for segment in self._outlook.tree.find(action.prefix, action.stop):
                if segment.start >= action.start:
                    self._rests.end(segment.key, action.target)

    def plan(self, now_s: float) -> list[TierAction]:
        """What to order now."""
        self.learn(now_s)
        self._track.expire(now_s)
        self._contents.notice_lost(self.settings.checks, now_s)
        proposals = [each for each in self._proposals(now_s) if each.kind in self.settings.kinds]
        chosen = select(proposals, self.free_bytes)
        return [self._order(each, now_s) for each in chosen]

    def learn(self, now_s: float) -> None:
        """Read the notes, as every plan does first."""
        self._read_notes(now_s)

    @property
    def requests_seen(self) -> int:
        """From which was learned, by planners before this one too."""
        return self._returns.seen

    def save_returns(self, path: Path, now_s: float, wall_s: float) -> int:
        """See `Returns.save`. Not while `plan` or `learn` runs."""
        return self._returns.save(path, now_s, wall_s)

    def _can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        return kind in self.settings.kinds and self._can_do(kind, source, target)

    # ---- what is known ----

    def _read_notes(self, now_s: float) -> None:
        visits: list[Visit] = []
        while self._notes:
            record, request, placed_s = self._notes.popleft()
            prefix = _prefix_of(request, record.cache_group)
            if prefix is None or not len(prefix.hashes):
                continue
            self._block_tokens = prefix.namespace.block_size
            self._models[record.placement.model] = None
            path = self._outlook.tree.use(prefix, placed_s)
            for segment in self._outlook.tree.parted():
                self._contents.parted(segment)
            visits.append(Visit(prefix, placed_s, record.request.route))
            self._take_links(record, placed_s)
            self._keep(path, record)
            self._hot.used(path, record.placement.overlap_tokens // self._block_tokens, placed_s)
            if record.queue_s > 0.0:
                self._waiting[record.placement.placement_id] = _Waiting(record, path[-1])
        self._returns.observe(visits)
        if self._block_tokens:
            self._contents.meet_sites(self._block_tokens)
        for forgotten in self._outlook.tree.shrink():
            self._ends.pop(forgotten, None)
            self._looked.pop(forgotten, None)
            self._contents.forget(forgotten)
        started = [i for i, w in self._waiting.items() if w.record.placed_s + w.record.queue_s <= now_s]
        for placement_id in started:
            del self._waiting[placement_id]
        self._rests.expire(now_s)

    def _keep(self, path: list[Segment], record: PlacementRecord) -> None:
        """The prompt is stored where it is computed, and written through to what its instance loads from."""
        instance_id = record.placement.prefill.instance_id
        # What the request will load must be there when its turn comes.
        needed_until_s = record.placed_s + 2.0 * record.placement.predicted_ttft_s
        for site in self._outlook.sites.of(instance_id):
            contents, stored = self._contents[site.place], path
            if instance_id in site.write_back:
                stored = [segment for segment in path if segment in contents.stays]
            self._track.used(stored, site.place)
            contents.put(stored, needed_until_s)
        for segment in path[:-1]:
            self._ends.pop(segment, None)
            self._looked.pop(segment, None)
        if not path[-1].children:
            self._ends.pop(path[-1], None)
            self._ends[path[-1]] = instance_id

    def _take_links(self, record: PlacementRecord, placed_s: float) -> None:
        """The parts of a request's plan take the links of who has them."""
        instance_id, own = record.placement.prefill.instance_id, record.prefill.holder
        if self._outlook.cluster.get(instance_id) is None:
            return
        sites, target = self._outlook.sites, Place(own, Tier.DEVICE)
        for part in record.placement.plan.segments:
            if part.holder != own or part.tier is not Tier.DEVICE:
                pool = sites.pool(instance_id, part.tier) if part.holder == own else None
                source = Place(part.holder, part.tier) if pool is None else pool.place
                seconds = sites.transfer_s(source, target, part.stop - part.start)
                if seconds < float("inf"):
                    self._demand.load(source.holder, seconds, placed_s)

    def ordered(self, actions: Iterable[TierAction], now_s: float) -> None:
        """Actions of a plan are on their way, over the links of pools too: placements see that from now on.

        Not while `plan` runs, and not from its thread.
        """
        cluster, sites = self._outlook.cluster, self._outlook.sites
        for action in actions:
            source, target = action.source, action.target
            if source is None or not action.kv_bytes:
                continue
            tokens = (action.stop - action.start) * self._block_tokens
            for end, other in ((source, target), (target, source)):
                if end.tier in POOL_TIERS:
                    self._demand.copy(end.holder, sites.transfer_s(source, target, tokens), now_s)
                    instance = cluster.get(other.holder.instance_id)
                    if instance is not None:
                        cluster.tables.take_pool_links(instance.ranks[0].row, [(end.tier, tokens)], now_s)

    # ---- rules ----

    def _proposals(self, now_s: float) -> Iterator[Proposal]:
        kinds, outlook = self.settings.kinds, self._outlook
        hot = list(self._hot.now(now_s, PINNED_RATE))  # copies are for what is hotter still
        if ActionKind.PROMOTE in kinds:
            waiting = ((w.record, w.segment) for w in self._waiting.values())
            yield from self._settled(promote(outlook, waiting, now_s), now_s)
        knows = self._returns.seen >= self.settings.learns_from
        if ActionKind.PREFETCH in kinds and knows:
            yield from self._settled(self._prefetches(now_s), now_s)
        if ActionKind.REPLICATE in kinds:
            hottest = nlargest(self.settings.looks, hot, key=itemgetter(1))
            for model in self._models:
                yield from self._settled(replicate(outlook, hottest, model, now_s), now_s)
                for leaving in [i for i in outlook.cluster if i.health is Health.DRAINING]:
                    ends = [s for s, last in self._ends.items() if last == leaving.instance_id]
                    some = islice(reversed(ends), self.settings.looks)
                    yield from self._settled(drain(outlook, leaving, some, model, now_s), now_s)
        if ActionKind.PIN in kinds:
            yield from self._pins.pin(outlook, hot, now_s)
            yield from self._pins.unpin(outlook, now_s)
        if ActionKind.EVICT in kinds and knows:
            yield from self._evictions(now_s)

    def _prefetches(self, now_s: float) -> Iterator[Proposal]:
        """For the conversations that are likeliest to go on soon and that their instance has not at hand."""
        outlook, looks = self._outlook, self.settings.looks
        wanted: list[tuple[Segment, InstanceState, float]] = []
        for segment, instance_id in islice(reversed(self._ends.items()), 20 * looks):
            if self._looked.get(segment, now_s) > now_s:
                continue
            site = outlook.sites.own(instance_id)
            if site is None or segment in self._contents[site.place].stays:
                continue
            instance = outlook.cluster.get(instance_id)
            if instance is not None and instance.is_candidate(now_s):
                wanted.append((segment, instance, self._marginal.get(site.place, 0.0)))
        if not wanted:
            return
        segments = [segment for segment, _, _ in wanted]
        chances = outlook.returns.probabilities(segments, EXPECTED_WITHIN_S, now_s)
        rates = outlook.returns.rates(segments, now_s)
        for number in np.argsort(-chances, kind="stable")[:looks].tolist():
            if chances[number] < LEAST_CHANCE:
                return
            segment, instance, dropped_rate = wanted[number]
            if rates[number] <= WORTH_ROOM * dropped_rate:
                continue  # it would be the next to go
            self._looked[segment] = now_s + LOOK_AGAIN_S
            proposal = prefetch(outlook, segment, instance, float(chances[number]), now_s)
            if proposal is not None:
                yield proposal

    def _evictions(self, now_s: float) -> Iterator[Proposal]:
        if not self._block_tokens:
            return
        full = [
            FullSite(site, self._contents[site.place], blocks)
            for site, blocks in self._outlook.sites.full(self._outlook.index, self._block_tokens)
            if self._can(ActionKind.EVICT, None, site.place)
        ]
        for order in make_room(self._outlook, full, self._block_tokens, now_s):
            if order.kind is ActionKind.DEMOTE:
                yield from self._settled([order], now_s)
                continue
            self._marginal[order.target] = order.rate
            yield order

    def _settled(self, proposals: Iterable[Proposal], now_s: float) -> Iterator[Proposal]:
        """Without those that would bring back what was dropped, or bring what is being brought."""
        for each in proposals:
            key = (each.prefix.hashes.item(each.stop - 1), each.target)
            if not self._rests.resting(*key):
                self._rests.begin(*key, now_s)
                yield each

    # ---- orders ----

    def _order(self, proposal: Proposal, now_s: float) -> TierAction:
        prefix, target = proposal.prefix, proposal.target
        if proposal.kind is ActionKind.EVICT:
            assert proposal.segment is not None
            for segment in takewhile(lambda each: each.start >= proposal.start, proposal.segment.path()):
                self._contents[target].drop(segment)
                stop = min(segment.stop, proposal.stop)
                self._rests.begin(prefix.hashes.item(stop - 1), target, now_s)
        elif proposal.kind in FILLS and target in self._contents:
            path = self._outlook.tree.find(prefix, proposal.stop)
            if path and proposal.chance is not None:
                until_s = now_s + self.settings.hold_s
                self._track.brought(proposal.kind, path[-1], target, proposal.chance, until_s)
            self._contents[target].put(path, now_s + self.settings.hold_s)
        return TierAction(
            f"{self._id_prefix}{next(self._numbers)}",
            proposal.kind,
            prefix,
            proposal.start,
            proposal.stop,
            proposal.source,
            target,
            proposal.kv_bytes,
            proposal.benefit_s,
            proposal.cost_s,
            proposal.deadline_s,
            proposal.reason,
        )

    def free_bytes(self, place: Place) -> float | None:
        """Bytes that a site can take before it is full."""
        site = self._outlook.sites.get(place)
        if site is None or not self._block_tokens:
            return None
        free_tokens: float = site.capacity_tokens - self._outlook.held_tokens(site, self._block_tokens)
        member = next((i for i in self._outlook.cluster if site.serves(i.instance_id)), None)
        if member is None:
            return None
        # What is full drops what was used longest ago for what comes; a little of it, then.
        free_tokens = max(free_tokens, YIELDS * site.capacity_tokens)
        return free_tokens * member.instance_class.kv_bytes_per_token


def _prefix_of(request: PlacementRequest, group: CacheGroup | None) -> Prefix | None:
    """A prompt as the index names it; None where its tokens are not known."""
    if group is None:
        return None
    namespace = namespace_of(request, group)
    hashes = hashes_of(request, namespace.block_size)
    if hashes is None:
        return None
    tokens = request.tokens if len(request.tokens) else None
    return Prefix(namespace, hashes, tokens, request.cache_salt)
