"""A tier planner at work in virtual time: its actions are copies, drops and pins of the simulated stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cache_index import Holder, Tier
from conductor.action_ledger import ActionLedger, LedgerLimits
from conductor.actions import ActionKind, Place, TierAction
from conductor.costs import POOL_TIERS
from conductor.explanation import PlacementRecord
from conductor.link_budgets import LinkBudget, LinkBudgets
from conductor.scheduler import Scheduler
from conductor.tier_planner import Site, TierPlanner
from conductor.tier_planner_config import TierPlannerConfig
from simulator.cluster.engines import Engines, Load
from simulator.cluster.results import ActionsDone
from simulator.cluster.specification import INSTANCE_TIERS, ClusterSpec
from simulator.cluster.workload import Request

_COPIES = frozenset(
    {ActionKind.REPLICATE, ActionKind.PROMOTE, ActionKind.PREFETCH, ActionKind.DEMOTE, ActionKind.MOVE}
)
_STILL = frozenset({ActionKind.EVICT, ActionKind.PIN, ActionKind.UNPIN})
LIMITS = LedgerLimits(max_running=1024)


def sites_of(cluster: ClusterSpec) -> list[Site]:
    """The slower tiers and the pools of a simulated cluster."""
    sites = [
        Site(
            *(Place(Holder(spec.name, 0), tier), tokens, frozenset({spec.name})),
            write_back=frozenset({spec.name}) if tier in spec.write_back else frozenset(),
        )
        for spec in cluster.instances
        for tier, tokens in sorted(spec.tier_tokens.items())
    ]
    for pool in cluster.pools:
        members = [spec for spec in cluster.instances if pool.serves(spec.name)]
        codec = None if not members else members[0].instance_class.tiers.get(pool.tier, pool.speed).codec
        sites.append(
            Site(
                Place(Holder(pool.name, 0), pool.tier),
                pool.capacity_tokens,
                pool.members,
                replace(pool.speed, codec=codec),
                write_back=frozenset(spec.name for spec in members if pool.tier in spec.write_back),
            )
        )
    return sites


def can_do(kind: ActionKind, source: Place | None, target: Place) -> bool:
    """What simulated stores can: no copies into a device or from pool to pool, and nothing is compressed."""
    slower = target.tier in INSTANCE_TIERS or target.tier in POOL_TIERS
    if kind in _STILL:
        return slower
    pool_to_pool = source is not None and source.tier in POOL_TIERS and target.tier in POOL_TIERS
    return kind in _COPIES and slower and source is not None and not pool_to_pool


class TierActions:
    """Lets a planner plan when it is due, and engines carry out what its ledger lets start."""

    def __init__(
        self,
        config: TierPlannerConfig,
        budget: LinkBudget,
        cluster: ClusterSpec,
        scheduler: Scheduler,
        engines: Engines,
        holders: Iterable[tuple[Holder, Tier]],
        workload: Iterable[Request],
        first_hash: Mapping[int, int],
    ) -> None:
        self._planner = TierPlanner(
            scheduler.cluster, scheduler.index, sites_of(cluster), can_do, config.settings()
        )
        self._ledger = ActionLedger(LinkBudgets(budget), LIMITS, self._planner.free_bytes)
        self._engines = engines
        self._store_of = {Place(*holder): store for store, holder in enumerate(holders)}
        # The last hash of a prompt names all of it.
        self._chains = {
            request.hashes.item(-1): Load(0, 0, 0, first_hash[request.number], len(request.hashes))
            for request in workload
            if len(request.hashes)
        }
        self._copies: dict[int, TierAction] = {}  # by the number that its end is told by
        self._number = 0
        self.next_s = 0.0

    def placed(self, record: PlacementRecord, now_s: float) -> None:
        self._planner.placed(record, now_s)

    def plan(self, now_s: float) -> None:
        """To be called at ``next_s`` or later, the index up to date."""
        if now_s < self.next_s:
            return
        while self.next_s <= now_s:
            self.next_s += self._planner.settings.every_s
        actions = self._planner.plan(now_s)
        for action in actions:
            self._ledger.submit(action, now_s)
        self._planner.ordered(actions, now_s)
        self._advance(now_s)

    def copied(self, number: int, blocks: int, now_s: float) -> None:
        """A copy has ended; one that was given up meanwhile has no effect on the books."""
        action = self._copies.pop(number)
        self._end(action, blocks, now_s)
        self._advance(now_s)

    def died(self, instance: str, now_s: float) -> None:
        """The engines have given up its copies already."""
        self._ledger.holder_left(instance, now_s)
        self._copies = {
            number: action for number, action in self._copies.items() if not _concerns(action, instance)
        }

    def done(self) -> dict[str, dict[str, ActionsDone]]:
        """By kind and outcome."""
        done: dict[str, dict[str, ActionsDone]] = {}
        for key, tally in self._ledger.tallies.items():
            done.setdefault(key.kind.value, {})[key.outcome.value] = ActionsDone(
                tally.actions, tally.blocks, tally.moved_bytes
            )
        return done

    def _advance(self, now_s: float) -> None:
        while True:
            orders = self._ledger.advance(now_s)
            if not orders.start:
                return
            for action in orders.start:
                self._begin(action, now_s)

    def _begin(self, action: TierAction, now_s: float) -> None:
        assert action.prefix is not None
        target = self._store_of[action.target]
        chain = self._chains[action.prefix.hashes.item(-1)]
        part = (chain, action.start, action.stop)
        if action.kind is ActionKind.EVICT:
            self._end(action, self._engines.discard(target, *part), now_s)
        elif action.kind is ActionKind.PIN:
            self._end(action, self._engines.pin(target, *part), now_s)
        elif action.kind is ActionKind.UNPIN:
            self._end(action, self._engines.unpin(target, *part), now_s)
        else:
            assert action.source is not None
            self._number += 1
            source = self._store_of[action.source]
            if self._engines.copy(self._number, source, target, *part, now_s) < 0:
                self._end(action, 0, now_s)
            else:
                self._copies[self._number] = action

    def _end(self, action: TierAction, blocks: int, now_s: float) -> None:
        self._ledger.completed(action.action_id, blocks, now_s)
        record = self._ledger.find(action.action_id)
        if record is not None:
            self._planner.ended(record)


def _concerns(action: TierAction, instance: str) -> bool:
    ends = (action.source, action.target)
    return any(end is not None and end.holder.instance_id == instance for end in ends)
