"""What a policy chooses from: estimates for one request over the ranks that serve its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from conductor.costs import Floats, Ints
from conductor.costs.tables import DECODE, MIXED, PREFILL
from conductor.placement import PlacementRequest
from conductor.rank import RankState

Flags = NDArray[np.bool_]
Tokens = NDArray[np.int32]

NO_PEER: Final = -1


class Candidates(Protocol):
    """Estimates for one request over the ranks that serve its model; every array has one entry a rank.

    A *whole* placement prefills and decodes on one rank. A *pair* prefills on one rank and decodes on another;
    any prefill rank may be paired with any decode rank of the same hand-off protocol.

    The *plan* of a rank is the cheapest way to come by the prompt's KV there: reuse what its device holds, load
    more from its other tiers, fetch more from the peer ``plan_peer``, and compute the rest.

    Arrays are for reading while the decision is made: those of load and speed follow the cluster afterwards.
    """

    @property
    def request(self) -> PlacementRequest:
        """What is to be placed."""
        ...

    @property
    def ranks(self) -> Sequence[RankState]:
        """Whom the positions in all arrays stand for."""
        ...

    @property
    def rows(self) -> Ints:
        """Of the ranks in the cluster's tables: who they are, whatever the order."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Of the request."""
        ...

    @property
    def output_tokens(self) -> int:
        """Predicted length of the answer."""
        ...

    @property
    def block_size(self) -> int:
        """Of most ranks, for policies that count in blocks."""
        ...

    @property
    def now_s(self) -> float:
        """The scheduler's clock."""
        ...

    @property
    def ttft_objective_s(self) -> float:
        """Of this request."""
        ...

    @property
    def tbt_objective_s(self) -> float:
        """Of this request."""
        ...

    @property
    def excluded(self) -> dict[str, str]:
        """Instances that are no candidates, and why."""
        ...

    @property
    def roles(self) -> Ints:
        """PREFILL, DECODE or MIXED; 0 for a rank that must not be chosen."""
        ...

    @property
    def protocol(self) -> Ints:
        """Of hand-offs; only ranks of one protocol pair."""
        ...

    @property
    def joint_protocols(self) -> int:
        """Bits of the protocols in which a decode rank computes no prompt, not even a short one."""
        return 0

    @property
    def fits(self) -> Flags:
        """The prompt fits into the rank's KV capacity when it is empty."""
        ...

    @property
    def limit_tokens(self) -> Ints:
        """What ``fits`` says by: prompts must be shorter."""
        ...

    @property
    def can_fetch(self) -> Flags:
        """Its connector can pull a prefix from a peer."""
        ...

    @property
    def local_tokens(self) -> Tokens:
        """[tier, rank]: usable cached prefix in the tiers up to ``tier``."""
        ...

    @property
    def seconds(self) -> Floats:
        """[term, rank]: the estimates as one array, for what is compiled (`costs.kernels`: QUEUE_S and so on)."""
        ...

    @property
    def plans(self) -> Ints:
        """[row, rank]: plans and ``placements`` likewise (`costs.kernels`: PLAN_TOKENS and so on)."""
        ...

    @property
    def plan_tokens(self) -> Ints:
        """Of the prompt, not computed: reused, loaded or fetched."""
        ...

    @property
    def plan_local(self) -> Ints:
        """Of these, from the rank's own tiers."""
        ...

    @property
    def plan_peer(self) -> Ints:
        """Position of the rank that the plan fetches from, NO_PEER for none."""
        ...

    @property
    def plan_fetch_s(self) -> Floats:
        """The plan's loads and fetches, were nothing computed meanwhile."""
        ...

    @property
    def prefill_terms(self) -> Floats:
        """[4, rank]: a, b, c, d of the prefill time (`InstanceClass`)."""
        ...

    @property
    def prefill_scale(self) -> Floats:
        """The learned factor of that time."""
        ...

    @property
    def kv_s_per_token(self) -> Floats:
        """Receiving one token's KV over this rank's link, as loaded now."""
        ...

    @property
    def link_latency_s(self) -> Floats:
        """Of a transfer to this rank."""
        ...

    @property
    def kv_bytes_per_token(self) -> Floats:
        """Size of one token's KV."""
        ...

    @property
    def locations(self) -> Ints:
        """[level, rank]: ids of node, rack, zone and site."""
        ...

    @property
    def links(self) -> Floats:
        """[distance, 2]: seconds a byte and latency between ranks that far apart (`Distance`)."""
        ...

    @property
    def queue_s(self) -> Floats:
        """Until a prefill placed now would start."""
        ...

    @property
    def prefill_s(self) -> Floats:
        """Carrying out the plan: loads, fetches and compute, other work of its steps included."""
        ...

    @property
    def hand_off_s(self) -> Floats:
        """Moving what this rank lacks from a neighbour, were it the decode rank of a pair."""
        ...

    @property
    def tbt_s(self) -> Floats:
        """Decode step with this request aboard."""
        ...

    @property
    def wait_s(self) -> Floats:
        """Until the KV of prompt and answer fits beside the decodes aboard."""
        ...

    @property
    def inflicted_s(self) -> Floats:
        """Delay that a prefill here would add to others' work, summed and discounted."""
        ...

    @property
    def eviction_s(self) -> Floats:
        """What others will compute again, or wait for, because a prefill here takes room in the cache."""
        ...

    @property
    def harm(self) -> Floats:
        """Requests aboard that a prefill here would make miss their TBT objective, as expected."""
        ...

    @property
    def pending_prefills(self) -> Ints:
        """Placed and not ended."""
        ...

    @property
    def pending_tokens(self) -> Ints:
        """Prompt tokens that pending prefills still have to compute."""
        ...

    @property
    def active_decodes(self) -> Ints:
        """Requests placed to decode here that have not ended."""
        ...

    @property
    def context_tokens(self) -> Ints:
        """Of active decodes, their answers as predicted."""
        ...

    @property
    def kv_capacity_tokens(self) -> Ints:
        """Of the device tier."""
        ...

    @property
    def running(self) -> Ints:
        """Requests in the engine's batch as it reported them, else ``active_decodes``."""
        ...

    @property
    def waiting(self) -> Ints:
        """Requests in the engine's own queue as it reported them, else ``pending_prefills``."""
        ...

    @property
    def kv_usage(self) -> Floats:
        """0..1 as the engine reported it, else reserved / capacity."""
        ...

    @property
    def placements(self) -> Ints:
        """Ever placed, to spread ties."""
        ...

    def with_roles(self, roles: Ints) -> Candidates:
        """The same estimates with other ranks to choose from."""
        ...

    @property
    def can_prefill(self) -> Flags:
        """Ranks of the role prefill."""
        flags: Flags = self.roles == PREFILL
        return flags

    @property
    def can_decode(self) -> Flags:
        """Ranks of the role decode."""
        flags: Flags = self.roles == DECODE
        return flags

    @property
    def is_mixed(self) -> Flags:
        """Ranks of the role mixed."""
        flags: Flags = self.roles == MIXED
        return flags

    @property
    def overlap_tokens(self) -> Tokens:
        """Usable cached prefix on each rank's device."""
        device: Tokens = self.local_tokens[0]
        return device

    @property
    def ttft_s(self) -> Floats:
        """Queue and prefill on each rank, before any hand-off."""
        ttft: Floats = self.queue_s + self.prefill_s
        return ttft

    def compute_s(self, cached_tokens: Ints | Tokens) -> Floats:
        """Seconds that each rank, idle, would compute on the prompt behind ``cached_tokens`` of it."""
        a, b, c, d = self.prefill_terms
        n, p = float(self.prompt_tokens), cached_tokens.astype(np.float64)
        seconds: Floats = self.prefill_scale * (a * (n - p) + b * (n * n - p * p) + c + d * p)
        return seconds


class Choice(msgspec.Struct, frozen=True, gc=False):
    """Indices into `Candidates.ranks`; equal for a whole placement.

    ``peer`` is the rank to fetch the prefix from, by the plan of the prefill rank unless the policy says
    another; NO_PEER means that the prefill rank uses what it holds itself.
    """

    prefill: int
    decode: int
    peer: int = NO_PEER


class Policy(Protocol):
    """Chooses a pair, or one rank for both, for one request."""

    @property
    def name(self) -> str: ...

    def choose(self, candidates: Candidates) -> Choice | None:
        """The choice, or None when no placement is possible."""
        ...


def least(key: Floats, allowed: Flags, placements: Ints) -> int | None:
    """Index of the smallest key among the allowed, ties to the rank placed on least; None if none allowed."""
    indices = np.flatnonzero(allowed)
    if not len(indices):
        return None
    keys = key[indices]
    ties = indices[keys <= keys.min() + 1e-12]
    return int(ties[np.argmin(placements[ties])])
