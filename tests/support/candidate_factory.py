"""Candidates made by hand, for tests of policies and admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.cluster import make_instance
from conductor.costs import Floats, Ints
from conductor.costs import kernels as k
from conductor.costs.tables import DECODE, MIXED, PREFILL
from conductor.costs.topology import LOCATION_LEVELS, Topology
from conductor.placement import PlacementRequest, Role
from conductor.policies import Candidates
from conductor.policies.candidates import NO_PEER, Flags
from conductor.rank import RankState

_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
_INTS = (
    "protocol",
    "pending_prefills",
    "pending_tokens",
    "active_decodes",
    "context_tokens",
    "running",
    "waiting",
    "placements",
)
_FLOATS = (
    "plan_fetch_s",
    "queue_s",
    "prefill_s",
    "hand_off_s",
    "inflicted_s",
    "eviction_s",
    "harm",
    "step_s",
    "kv_usage",
    "wait_s",
)


@dataclass(frozen=True, slots=True)
class HandMade(Candidates):
    """Candidates with every array given."""

    request: PlacementRequest = field()
    ranks: Sequence[RankState] = field()
    prompt_tokens: int = field()
    output_tokens: int = field()
    block_size: int = field()
    now_s: float = field()
    ttft_objective_s: float = field()
    tbt_objective_s: float = field()
    excluded: dict[str, str] = field()
    rows: Ints = field()
    roles: Ints = field()
    protocol: Ints = field()
    fits: Flags = field()
    can_fetch: Flags = field()
    local_tokens: Any = field()
    plan_tokens: Ints = field()
    plan_local: Ints = field()
    plan_peer: Ints = field()
    plan_fetch_s: Floats = field()
    prefill_terms: Floats = field()
    prefill_scale: Floats = field()
    kv_s_per_token: Floats = field()
    link_latency_s: Floats = field()
    kv_bytes_per_token: Floats = field()
    locations: Ints = field()
    links: Floats = field()
    queue_s: Floats = field()
    prefill_s: Floats = field()
    hand_off_s: Floats = field()
    tbt_s: Floats = field()
    wait_s: Floats = field()
    inflicted_s: Floats = field()
    eviction_s: Floats = field()
    step_s: Floats = field()
    harm: Floats = field()
    pending_prefills: Ints = field()
    pending_tokens: Ints = field()
    active_decodes: Ints = field()
    context_tokens: Ints = field()
    kv_capacity_tokens: Ints = field()
    running: Ints = field()
    waiting: Ints = field()
    kv_usage: Floats = field()
    placements: Ints = field()
    joint_protocols: int = field()

    @property
    def limit_tokens(self) -> Ints:
        return np.where(self.fits, 10**9, 0)

    @property
    def seconds(self) -> Floats:
        rows = {
            k.QUEUE_S: self.queue_s,
            k.PREFILL_S: self.prefill_s,
            k.FETCH_S: self.plan_fetch_s,
            k.TBT_S: self.tbt_s,
            k.WAIT_S: self.wait_s,
            k.INFLICTED_S: self.inflicted_s,
            k.KV_S_PER_TOKEN: self.kv_s_per_token,
            k.HARM: self.harm,
            k.STEP_S: self.step_s,
            k.EVICTION_S: self.eviction_s,
        }
        return np.array([rows[row] for row in range(k.SECONDS_ROWS)])

    @property
    def plans(self) -> Ints:
        rows = {
            k.PLAN_TOKENS: self.plan_tokens,
            k.PLAN_LOCAL: self.plan_local,
            k.PLAN_PEER: self.plan_peer,
            k.PLACED: self.placements,
        }
        return np.array([rows[row] for row in range(k.PLAN_ROWS)], np.int64)

    def with_roles(self, roles: Ints) -> HandMade:
        return replace(self, roles=roles)


def make_candidates(
    roles: str,
    *,
    prompt_tokens: int = 1000,
    output_tokens: int = 100,
    block_size: int = 16,
    now_s: float = 0.0,
    request: PlacementRequest | None = None,
    overlap_tokens: list[int] | None = None,
    local_tokens: list[list[int]] | None = None,
    joint_protocols: int = 0,
    **arrays: Any,
) -> HandMade:
    """``roles`` has a letter a rank: p, d or m. Arrays that are not given are zero, an idle empty cluster.

    ``overlap_tokens`` is held on the device; ``local_tokens`` gives every tier instead.
    """
    n = len(roles)
    ranks = []
    for row, role in enumerate(roles):
        rank = make_instance(
            instance_id=f"{role}{row}",
            url="http://x:1",
            role=_ROLES[role],
            instance_class=LLAMA_8B_H100,
            protocol="vllm-nixl",
        ).ranks[0]
        rank.row = row
        ranks.append(rank)
    device = np.zeros(n, np.int64) if overlap_tokens is None else np.array(overlap_tokens, np.int64)
    local = np.array(local_tokens) if local_tokens is not None else np.tile(device, (len(Tier), 1))
    c = LLAMA_8B_H100
    terms = (
        c.prefill_s_per_token,
        c.prefill_s_per_token_squared,
        c.prefill_base_s,
        c.prefill_s_per_cached_token,
    )
    columns: dict[str, Any] = {name: np.zeros(n, np.int64) for name in _INTS}
    columns |= {name: np.zeros(n) for name in _FLOATS}
    columns |= {
        "plan_tokens": local[-1].astype(np.int64),
        "plan_local": local[-1].astype(np.int64),
        "rows": np.arange(n),
        "can_fetch": np.ones(n, np.bool_),
        "plan_peer": np.full(n, NO_PEER, np.int64),
        "tbt_s": np.full(n, 0.01),
        "kv_capacity_tokens": np.full(n, 400_000, np.int64),
        "fits": np.ones(n, np.bool_),
        "prefill_scale": np.ones(n),
        "prefill_terms": np.tile(np.array(terms)[:, None], (1, n)),
        "kv_s_per_token": np.full(n, c.kv_bytes_per_token / c.nic.bytes_per_s),
        "link_latency_s": np.full(n, c.nic.latency_s),
        "kv_bytes_per_token": np.full(n, float(c.kv_bytes_per_token)),
        "locations": np.zeros((LOCATION_LEVELS, n), np.int64),
        "links": Topology().link_table(),
    }
    for name, values in arrays.items():
        columns[name] = np.array(values, dtype=columns[name].dtype)
    return HandMade(
        request=request or PlacementRequest("r", "m", np.empty(0, np.uint32), prompt_tokens),
        ranks=ranks,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_size=block_size,
        now_s=now_s,
        ttft_objective_s=1.0,
        tbt_objective_s=0.05,
        excluded={},
        joint_protocols=joint_protocols,
        roles=np.array([{"p": PREFILL, "d": DECODE, "m": MIXED}[role] for role in roles], np.int64),
        # As the estimator lays them out: by rank.
        local_tokens=np.ascontiguousarray(local.T, np.int32).T,
        **columns,
    )
