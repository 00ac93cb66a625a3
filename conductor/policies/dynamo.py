"""The `dynamo` policy."""

from __future__ import annotations

import numpy as np

from cache_index import Tier
from conductor.costs import Floats
from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import choose_apart, requests_of, smallest
from conductor.policies.parameters import number, whole_number


class Dynamo:
    """Least cost in KV blocks: prompt left to compute, less credit for what is cached, plus active blocks.

    Source: NVIDIA Dynamo 1.6, default worker scorer (`lib/kv-router/src/scheduling/selector/default.rs`)::

        credit  = overlap_score_credit * decay * device + host_cache_hit_weight * host
                  + disk_cache_hit_weight * disk + shared_cache_multiplier * shared
        decay   = 1 / (1 + overlap_score_credit_decay * excess / request)
        prefill = max(0, active prefill + request - credit)
        cost    = prefill_load_scale * prefill + active KV blocks with this request
                  + decode_active_request_weight * active requests

    ``excess`` is the rank's active prefill above that of the least busy rank. Host, disk and shared blocks are
    those beyond the faster tiers. Ties fall at random. A positive ``router_temperature`` samples instead, by
    softmax over the costs scaled to 0..1. Of a pair, the prefill rank is chosen by this cost, the decode rank
    by active blocks and requests alone: no overlap credit, no prefill.

    Defaults: credit 1, decay 0, host 0.75, disk 0.25, shared 0.5, scale 1, request weight 0, temperature 0.
    Approximated: active prefill is what is still to be computed rather than whole prompts until their first
    token; active blocks count a prefix that requests share as often as they use it, and answers as predicted;
    the shared cache is the pod and remote tiers, beyond the disk's.
    """

    name = "dynamo"

    def __init__(
        self,
        *,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        shared_cache_multiplier: float = 0.5,
        prefill_load_scale: float = 1.0,
        decode_active_request_weight: float = 0.0,
        router_temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._credit = number("overlap_score_credit", overlap_score_credit, least=0.0)
        self._decay = number("overlap_score_credit_decay", overlap_score_credit_decay, least=0.0)
        self._host = number("host_cache_hit_weight", host_cache_hit_weight, least=0.0)
        self._disk = number("disk_cache_hit_weight", disk_cache_hit_weight, least=0.0)
        self._shared = number("shared_cache_multiplier", shared_cache_multiplier, least=0.0)
        self._scale = number("prefill_load_scale", prefill_load_scale, least=0.0)
        self._request_weight = number("decode_active_request_weight", decode_active_request_weight, least=0.0)
        self._temperature = number("router_temperature", router_temperature, least=0.0)
        self._generator = np.random.default_rng(whole_number("seed", seed))

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        load = self._load(c)
        return choose_apart(
            c,
            lambda allowed: self._pick(load + self._prefill_cost(c, allowed), allowed),
            lambda allowed: self._pick(load, allowed),
        )

    def _load(self, c: Candidates) -> Floats:
        """Active KV blocks with this request aboard, and a charge per active request."""
        blocks = (c.context_tokens + c.prompt_tokens) / c.block_size
        load: Floats = blocks + self._request_weight * requests_of(c)
        return load

    def _prefill_cost(self, c: Candidates, allowed: Flags) -> Floats:
        """Prompt blocks to compute less the credit for cached ones; ``allowed`` are the ranks compared."""
        size = float(c.block_size)
        device, host, disk, remote = c.local_tokens[[Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE]] / size
        credit = self._credit * device
        if self._decay > 0.0:
            excess = (c.pending_tokens - c.pending_tokens[allowed].min()) / size
            request = max(-(-c.prompt_tokens // c.block_size), 1)
            credit = credit / (1.0 + self._decay * np.maximum(excess, 0.0) / request)
        credit = credit + self._host * (host - device) + self._disk * (disk - host)
        credit = credit + self._shared * (remote - disk)
        blocks = (c.pending_tokens + c.prompt_tokens) / size
        cost: Floats = self._scale * np.maximum(blocks - credit, 0.0)
        return cost

    def _pick(self, cost: Floats, allowed: Flags) -> int:
        indices = np.flatnonzero(allowed)
        if self._temperature == 0.0:
            indices = smallest(cost, indices)
            return int(indices[self._generator.integers(len(indices)) if len(indices) > 1 else 0])
        costs = cost[indices]
        spread = costs.max() - costs.min()
        scaled = (costs - costs.min()) / spread if spread > 0.0 else np.zeros(len(costs))
        cumulative = np.cumsum(np.exp(-scaled / self._temperature))
        drawn = self._generator.random() * cumulative[-1]
        return int(indices[min(np.searchsorted(cumulative, drawn), len(indices) - 1)])
