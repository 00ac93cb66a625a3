"""One request against a roster: every candidate's costs, computed in one pass over the cluster's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numba import types

from cache_index.kernel_set import compiled
from conductor.costs import ClusterTables, Floats, Ints
from conductor.costs import kernels as k
from conductor.costs import tables as t
from conductor.costs.held import WRITE_HELD, write_held
from conductor.placement import PlacementRequest
from conductor.policies.candidates import Candidates, Flags, Tokens
from conductor.policies.slo_search import NO_LEVELS, Found, Grounds, block_words, search_kernel, views_of
from conductor.prefix_lookup import PrefixLookup
from conductor.rank import RankState
from conductor.roster import Roster


@dataclass(slots=True)  # never changed; a frozen one takes four times as long to make
class Estimates(Candidates):
    """`Candidates` over a roster. What is seldom asked for is made when it is asked for, views of ``block`` too.

    Fields that replace properties of the protocol say ``field()``, or dataclass would take those for defaults.
    """

    request: PlacementRequest = field()
    roster: Roster
    block: Floats
    now_s: float = field()
    output_tokens: int = field()
    ttft_objective_s: float = field()
    tbt_objective_s: float = field()
    roles: Ints = field()
    _views: tuple[Floats, Ints, Tokens] | None = None

    def with_roles(self, roles: Ints) -> Estimates:
        return replace(self, roles=roles)

    # ---- the request ----

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    # ---- the roster ----

    @property
    def tables(self) -> ClusterTables:
        return self.roster.tables

    @property
    def links(self) -> Floats:
        return self.roster.tables.links

    @property
    def ranks(self) -> Sequence[RankState]:
        return self.roster.ranks

    @property
    def rows(self) -> Ints:
        return self.roster.rows

    @property
    def block_size(self) -> int:
        return self.roster.block_size

    @property
    def excluded(self) -> dict[str, str]:
        return self.roster.excluded

    @property
    def protocol(self) -> Ints:
        return self.roster.protocol

    @property
    def joint_protocols(self) -> int:
        return self.roster.joint_protocols

    @property
    def fits(self) -> Flags:
        flags: Flags = self.roster.limit_tokens > self.prompt_tokens
        return flags

    @property
    def limit_tokens(self) -> Ints:
        return self.roster.limit_tokens

    @property
    def can_fetch(self) -> Flags:
        return self.roster.can_fetch

    @property
    def prefill_terms(self) -> Floats:
        return self.roster.prefill_terms

    @property
    def link_latency_s(self) -> Floats:
        return self.roster.link_latency_s

    @property
    def kv_bytes_per_token(self) -> Floats:
        return self.roster.kv_bytes_per_token

    @property
    def locations(self) -> Ints:
        return self.roster.locations

    @property
    def kv_capacity_tokens(self) -> Ints:
        return self.roster.kv_capacity_tokens

    # ---- the estimates ----

    @property
    def views(self) -> tuple[Floats, Ints, Tokens]:
        """Seconds, plans and held tokens."""
        views = self._views
        if views is None:
            views = self._views = views_of(self.block, len(self.roster.ranks))
        return views

    @property
    def seconds(self) -> Floats:
        return self.views[0]

    @property
    def plans(self) -> Ints:
        return self.views[1]

    @property
    def held(self) -> Tokens:
        """[rank, tier]"""
        return self.views[2]

    @property
    def local_tokens(self) -> Tokens:
        return self.held.T

    @property
    def plan_tokens(self) -> Ints:
        row: Ints = self.plans[k.PLAN_TOKENS]
        return row

    @property
    def plan_local(self) -> Ints:
        row: Ints = self.plans[k.PLAN_LOCAL]
        return row

    @property
    def plan_peer(self) -> Ints:
        row: Ints = self.plans[k.PLAN_PEER]
        return row

    @property
    def plan_fetch_s(self) -> Floats:
        row: Floats = self.seconds[k.FETCH_S]
        return row

    @property
    def queue_s(self) -> Floats:
        row: Floats = self.seconds[k.QUEUE_S]
        return row

    @property
    def prefill_s(self) -> Floats:
        row: Floats = self.seconds[k.PREFILL_S]
        return row

    @property
    def tbt_s(self) -> Floats:
        row: Floats = self.seconds[k.TBT_S]
        return row

    @property
    def wait_s(self) -> Floats:
        row: Floats = self.seconds[k.WAIT_S]
        return row

    @property
    def inflicted_s(self) -> Floats:
        row: Floats = self.seconds[k.INFLICTED_S]
        return row

    @property
    def eviction_s(self) -> Floats:
        row: Floats = self.seconds[k.EVICTION_S]
        return row

    @property
    def harm(self) -> Floats:
        row: Floats = self.seconds[k.HARM]
        return row

    @property
    def prefill_scale(self) -> Floats:
        factors: Floats = self.tables.classes[self.roster.class_ids, t.PREFILL_SCALE]
        return factors

    @property
    def kv_s_per_token(self) -> Floats:
        row: Floats = self.seconds[k.KV_S_PER_TOKEN]
        return row

    @property
    def hand_off_s(self) -> Floats:
        lacking = self.prompt_tokens - self.held[:, 0]
        seconds = self.roster.link_latency_s + self.links[0, 1] + lacking * self.kv_s_per_token
        return np.where(lacking > 0, seconds, 0.0)

    # ---- the load ----

    def _loads(self, column: int) -> Floats:
        loads: Floats = self.tables.loads[self.roster.rows, column]
        return loads

    @property
    def pending_prefills(self) -> Ints:
        return self._loads(t.PENDING_PREFILLS).astype(np.int64)

    @property
    def pending_tokens(self) -> Ints:
        return self._loads(t.PENDING_TOKENS).astype(np.int64)

    @property
    def active_decodes(self) -> Ints:
        return self._loads(t.ACTIVE_DECODES).astype(np.int64)

    @property
    def context_tokens(self) -> Ints:
        return self._loads(t.CONTEXT_TOKENS).astype(np.int64)

    @property
    def running(self) -> Ints:
        reported = self._loads(t.REPORTED_RUNNING).astype(np.int64)
        return np.where(reported >= 0, reported, self.active_decodes)

    @property
    def waiting(self) -> Ints:
        reported = self._loads(t.REPORTED_WAITING).astype(np.int64)
        return np.where(reported >= 0, reported, self.pending_prefills)

    @property
    def kv_usage(self) -> Floats:
        reported = self._loads(t.REPORTED_USAGE)
        reserved = self._loads(t.CONTEXT_TOKENS) / np.maximum(self.roster.kv_capacity_tokens, 1)
        return np.where(reported >= 0.0, reported, np.minimum(reserved, 1.0))

    @property
    def placements(self) -> Ints:
        row: Ints = self.plans[k.PLACED]
        return row


_TABLE, _ROWS = types.float64[:, ::1], types.int64[:, ::1]
_SIGNATURE: Final = (
    *(types.int64[::1], _TABLE, _ROWS, _TABLE, _TABLE, _TABLE, types.int32[:, ::1]),
    *(types.float64, types.int64, types.int64, types.float64, types.boolean),
    *(_TABLE, _ROWS),
)


_MOST_GROUNDS: Final = 64
_SMALL_WORDS: Final = 512


def roles_for(request: PlacementRequest, roster: Roster) -> Ints:
    """Of the ranks, without those that may not prefill where the request says which rank is to."""
    if request.prefill_on is None:
        return roster.roles
    others = np.array([rank.holder != request.prefill_on for rank in roster.ranks], np.bool_)
    return np.where(others & (roster.roles != t.DECODE), 0, roster.roles)


class Estimator:
    """Makes estimates. Their blocks come from a pool: see `recycle`."""

    def __init__(self) -> None:
        self._pool: list[Floats] = []
        self._pool_size = self._words = 0  # ranks, and what their estimates take
        self._kernel = compiled(k.estimate, *_SIGNATURE)
        self._write_held = compiled(write_held, *WRITE_HELD)
        self._search = search_kernel()
        self._grounds: dict[int, Grounds] = {}  # by the identity of rosters, which they keep
        self._latest: Grounds | None = None

    def estimate(
        self,
        request: PlacementRequest,
        roster: Roster,
        lookup: PrefixLookup,
        now_s: float,
        output_tokens: int,
        ttft_objective_s: float,
        tbt_objective_s: float,
    ) -> Estimates:
        """What placing ``request`` now would cost on every rank of ``roster``."""
        n = request.prompt_tokens
        tables = roster.tables
        estimates = Estimates(
            request,
            roster,
            self._block(len(roster.ranks)),
            now_s,
            output_tokens,
            ttft_objective_s,
            tbt_objective_s,
            roles_for(request, roster),
        )
        seconds, plans, held = estimates.views
        held.fill(0)
        for group in roster.cache_groups:
            levels = lookup.levels(request, group)
            if levels is not None:
                # A fully cached prompt still recomputes its last block.
                block_size = group.namespace.block_size
                usable = (n - 1) // block_size * block_size
                self._write_held(levels, group.holder_ids, group.members, block_size, usable, held)
        self._kernel(
            roster.rows,
            tables.loads,
            tables.ranks,
            tables.classes,
            tables.links,
            tables.pools,
            held,
            now_s,
            n,
            output_tokens,
            tbt_objective_s,
            roster.any_fetches,
            seconds,
            plans,
        )
        return estimates

    def search(
        self,
        request: PlacementRequest,
        roster: Roster,
        lookup: PrefixLookup,
        now_s: float,
        output_tokens: int,
        ttft_objective_s: float,
        tbt_objective_s: float,
        decode_prefill_tokens: int,
    ) -> tuple[Floats, Found]:
        """The block of `estimate` for a roster of at most one cache group, and what `slo` chooses."""
        tables = roster.tables
        grounds = self._latest
        if (
            grounds is None
            or grounds.roster is not roster
            or grounds.loads is not tables.loads
            or grounds.classes is not tables.classes
        ):
            grounds = self._latest = self._grounds_of(roster)
        groups = roster.cache_groups
        levels = lookup.levels(request, groups[0]) if groups else None
        block = self._block(len(roster.ranks))
        found = self._search(
            grounds.address,
            NO_LEVELS if levels is None else levels,
            now_s,
            request.prompt_tokens,
            output_tokens,
            ttft_objective_s,
            tbt_objective_s,
            decode_prefill_tokens,
            block,
        )
        return block, found

    def recycle(self, blocks: Sequence[Floats]) -> None:
        """Nobody reads these estimates any more: their memory may be written again.

        Fresh pages cost more than the estimates they are for; but of a few ranks there are less than pages.
        """
        if self._words > _SMALL_WORDS:
            self._pool += [block for block in blocks if len(block) == self._words]

    def _block(self, size: int) -> Floats:
        if size != self._pool_size:  # rosters of other sizes are history; their arrays need not be kept
            self._pool, self._pool_size, self._words = [], size, block_words(size)
        return self._pool.pop() if self._pool else np.empty(self._words)

    def _grounds_of(self, roster: Roster) -> Grounds:
        tables = roster.tables
        grounds = self._grounds.get(id(roster))
        if grounds is None or grounds.loads is not tables.loads or grounds.classes is not tables.classes:
            if len(self._grounds) >= _MOST_GROUNDS:  # of rosters that are history
                self._grounds.clear()
            grounds = self._grounds[id(roster)] = Grounds(roster)
        return grounds
