"""Orders of operators and gateways over the whole cluster's cache, made into tier actions.

An order names an instance; where that is an engine, what its LMCache servers hold is meant as well: the first
place for which an executor is found is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cache_index import CacheIndex, Holder, PromptMatcher, Tier, sequence_hashes
from cache_index.hashing import Tokens
from cache_index.lmcache_directory import is_lmcache, server_holder
from conductor.action_ledger import ActionRecord
from conductor.action_runner import ActionRunner
from conductor.actions import ActionKind, Place, Prefix, TierAction
from conductor.cluster import DEFAULT_BLOCK_SIZE, Cluster, InstanceState
from conductor.roster import cache_namespace

_READING = (ActionKind.MOVE, ActionKind.REPLICATE, ActionKind.PREFETCH)


class OrderError(Exception):
    """An order that cannot be taken; ``field`` is what to change: ``prompt`` is whatever it was given as."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


class NotLeadingError(Exception):
    """Another conductor takes orders; the message says which."""


class UnservedModelError(Exception):
    """No instance serves the model."""


@dataclass(frozen=True, slots=True)
class CacheOrder:
    """What to do with a prompt's cache. Without ``tokens`` (None) everything at the target is meant.

    Blocks are ``start`` to ``stop`` (None: the prompt's last whole block).
    """

    kind: ActionKind
    model: str
    target: Place
    source: Place | None = None
    tokens: Tokens | None = None
    cache_salt: str | None = None
    tenant: str = "default"
    start: int = 0
    stop: int | None = None
    deadline_s: float = 60.0  # from now
    reason: str = "ordered"


class CacheOrders:
    """Takes orders: finds out who can carry them out, and puts them in the ledger before all planned actions.

    ``refusal`` says why orders cannot be taken here, None where they can.
    """

    def __init__(
        self,
        runner: ActionRunner,
        cluster: Cluster,
        index: CacheIndex,
        prompts: PromptMatcher,
        clock: Callable[[], float],
        *,
        aliases: dict[str, str] | None = None,
        id_prefix: str = "",
    ) -> None:
        self.runner = runner
        self.refusal: Callable[[], str | None] = lambda: None
        self._cluster = cluster
        self._index = index
        self._prompts = prompts
        self._clock = clock
        self._aliases = aliases or {}
        self._ids = (f"{id_prefix}order-{number}" for number in itertools.count(1))

    def submit(self, order: CacheOrder) -> ActionRecord:
        """Raises OrderError when nobody can carry it out, UnservedModelError when nobody serves the model,
        NotLeadingError where another conductor is to be asked."""
        refusal = self.refusal()
        if refusal is not None:
            raise NotLeadingError(refusal)
        owner = self._owner(order)
        prefix = self._prefix(order, owner)
        start, stop = self._range(order, prefix)
        kind, source, target, held = self._places(order, prefix)
        if held is not None and order.stop is None:
            stop = max(min(stop, held), start)
        size = 0 if prefix is None else prefix.namespace.block_size
        now_s = self._clock()
        action = TierAction(
            action_id=next(self._ids),
            kind=kind,
            prefix=prefix,
            start=start,
            stop=stop,
            source=source,
            target=target,
            kv_bytes=round((stop - start) * size * owner.instance_class.kv_bytes_per_token),
            benefit_s=0.0,
            cost_s=0.0,
            deadline_s=now_s + order.deadline_s,
            reason=order.reason,
        )
        return self.runner.ledger.submit(action, now_s, ordered=True)

    def _owner(self, order: CacheOrder) -> InstanceState:
        """An instance that serves the model: the target or the source if they do."""
        named = [place.holder.instance_id for place in (order.target, order.source) if place is not None]
        serving = self.check_served(order.model)
        return next((each for name in named for each in serving if each.instance_id == name), serving[0])

    def check_served(self, model: str) -> list[InstanceState]:
        """Those that serve it; ``model`` may be an alias. Raises UnservedModelError when nobody does."""
        name = self._aliases.get(model, model)
        serving = [each for each in self._cluster if each.serves(name)]
        if not serving:
            raise UnservedModelError(f"no instance serves {model!r}; GET /v1/models lists the models")
        return serving

    def _prefix(self, order: CacheOrder, owner: InstanceState) -> Prefix | None:
        if order.tokens is None:
            return None
        model = self._aliases.get(order.model, order.model)
        size = owner.block_size or DEFAULT_BLOCK_SIZE
        namespace = cache_namespace(owner, model, size, order.tenant)
        hashes = sequence_hashes(order.tokens, size, cache_salt=order.cache_salt)
        return Prefix(namespace, hashes, np.ascontiguousarray(order.tokens, np.uint32), order.cache_salt)

    @staticmethod
    def _range(order: CacheOrder, prefix: Prefix | None) -> tuple[int, int]:
        if prefix is None:
            return 0, 0
        blocks = len(prefix.hashes)
        stop = blocks if order.stop is None else order.stop
        if stop > blocks:
            raise OrderError("stop_block", f"the prompt has {blocks} whole blocks; {stop} is beyond them")
        if blocks == 0:
            size = prefix.namespace.block_size
            assert order.tokens is not None
            raise OrderError(
                "prompt", f"the prompt has {len(order.tokens)} tokens, which is less than one block of {size}"
            )
        if order.start >= stop:
            raise OrderError("start_block", f"blocks {order.start} to {stop} of the prompt are none")
        return order.start, stop

    def _places(
        self, order: CacheOrder, prefix: Prefix | None
    ) -> tuple[ActionKind, Place | None, Place, int | None]:
        """Kind, source and target for which there is an executor; how many blocks the source is known to hold.

        A prefetch from another instance is a replication. Raises OrderError saying why there is none.
        """
        targets = list(self._meant(order.target))
        for target in targets:
            for source, held in self._sources(order, prefix, target):
                kind = order.kind
                if kind is ActionKind.PREFETCH and source is not None and not _near(source, target):
                    kind = ActionKind.REPLICATE
                if self.runner.executor_for(kind, source, target) is not None:
                    return kind, source, target, held
        raise OrderError("target", self.runner.why_none(order.kind, order.source, order.target))

    def _sources(
        self, order: CacheOrder, prefix: Prefix | None, target: Place
    ) -> Iterator[tuple[Place | None, int | None]]:
        """Where to read it from, most blocks first; None for what the target reaches by itself."""
        if order.kind not in _READING:
            yield None, None
        elif order.source is not None:
            for source in self._meant(order.source):
                yield source, None
        else:
            if prefix is not None:
                yield from self._holders_of(prefix, target, order.start)
            yield None, None

    def _holders_of(self, prefix: Prefix, target: Place, start: int) -> Iterator[tuple[Place, int]]:
        """Other places with a part of the prefix beyond ``start``: most blocks first, then the target's own."""
        assert prefix.token_ids is not None
        levels = self._prompts.match(
            prefix.namespace, prefix.token_ids, cache_salt=prefix.cache_salt, hashes=prefix.hashes
        )
        found: list[tuple[int, bool, Tier, Place]] = []
        for row, blocks in enumerate(levels.tolist()):
            holder = self._index.holder(row)
            if holder is None:
                continue
            for tier in Tier:
                more = blocks[tier] - (blocks[tier - 1] if tier else 0)
                if more > 0 and blocks[tier] > start and Place(holder, tier) != target:
                    found.append((-blocks[tier], holder != target.holder, tier, Place(holder, tier)))
        for blocks, _, _, place in sorted(found, key=lambda each: each[:3]):
            yield place, -blocks

    def _meant(self, place: Place) -> Iterator[Place]:
        """The place itself, and those of LMCache that an engine has there."""
        yield place
        if not is_lmcache(place.holder):
            for server in self._prompts.servers_of(place.holder):
                yield Place(server_holder(server), place.tier)


def _near(source: Place, target: Place) -> bool:
    """Whether the target reaches it by itself: another tier of its own, or a store that it shares."""
    return source.holder.instance_id == target.holder.instance_id or source.tier in (Tier.POD, Tier.REMOTE)


def parse_place(instance: str, tier: Tier, rank: int, cluster: Cluster) -> Place:
    """Raises OrderError for a rank that an engine does not have."""
    known = cluster.get(instance)
    if known is not None and rank >= len(known.ranks):
        raise OrderError("rank", f"{instance} has ranks 0 to {len(known.ranks) - 1}, and no {rank}")
    return Place(Holder(instance, rank), tier)
