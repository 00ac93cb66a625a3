"""The `llm_d` policy: a weighted sum of scorers."""

from __future__ import annotations

import numpy as np

from cache_index import Tier
from conductor.costs import Floats, Ints
from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import Pick, least_of, partners, pools_of
from conductor.policies.parameters import flag, number, whole_number


class LlmD:
    """The highest weighted sum of scores between 0 and 1; decode first, and prefill elsewhere only if it is long.

    Source: llm-d router (`pkg/epp/framework/plugins/scheduling`), the weights of its precise-prefix-cache guide:

    - prefix (``prefix_weight`` 3): consecutive cached blocks, each weighted by its tier (``gpu_weight`` 1,
      ``cpu_weight`` 0.8, ``shared_storage_weight`` 0.4 for disk and pod, ``object_store_weight`` 0.2), scaled
      min to max over the candidates, all of them 1 where they are equal (`preciseprefixcache`);
    - queue (``queue_weight`` 2): requests waiting in the engine, scaled the same way, fewer better (`queuedepth`);
    - KV (``kv_utilization_weight`` 2): 1 - KV usage (`kvcacheutilization`);
    - running (``running_weight`` 0): requests in the engine's batch, as the queue (`runningrequests`).

    The decode rank is chosen first. When it has cached all but fewer than ``non_cached_tokens`` (16, the value
    of the disaggregation guide) of the prompt, it prefills itself; else the prefill rank is chosen by the same
    scores among its pool (`prefix_based_pd_decider`). 0 never prefills elsewhere.

    A rank of role decode takes no prefill by default; ``decode_prefills`` lets it, as llm-d does. Ties go to
    the rank placed on least, where llm-d draws lots.
    """

    name = "llm_d"

    def __init__(
        self,
        *,
        prefix_weight: float = 3.0,
        queue_weight: float = 2.0,
        kv_utilization_weight: float = 2.0,
        running_weight: float = 0.0,
        gpu_weight: float = 1.0,
        cpu_weight: float = 0.8,
        shared_storage_weight: float = 0.4,
        object_store_weight: float = 0.2,
        non_cached_tokens: int = 16,
        decode_prefills: bool = False,
    ) -> None:
        self._prefix_weight = number("prefix_weight", prefix_weight, least=0.0)
        self._queue_weight = number("queue_weight", queue_weight, least=0.0)
        self._kv_weight = number("kv_utilization_weight", kv_utilization_weight, least=0.0)
        self._running_weight = number("running_weight", running_weight, least=0.0)
        shared = number("shared_storage_weight", shared_storage_weight, least=0.0)
        self._tier_weights = np.zeros(len(Tier))
        self._tier_weights[Tier.DEVICE] = number("gpu_weight", gpu_weight, least=0.0)
        self._tier_weights[Tier.HOST] = number("cpu_weight", cpu_weight, least=0.0)
        self._tier_weights[[Tier.DISK, Tier.POD]] = shared
        self._tier_weights[Tier.REMOTE] = number("object_store_weight", object_store_weight, least=0.0)
        self._non_cached_tokens = whole_number("non_cached_tokens", non_cached_tokens)
        self._decode_prefills = flag("decode_prefills", decode_prefills)

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        pools = pools_of(c)
        whole = pools.whole
        if self._decode_prefills:
            whole = whole | (c.can_decode & c.fits & (c.joint_protocols >> c.protocol & 1 == 0))
        first = pools.decode | whole
        if not first.any():
            return None
        pick = self._pick(c)
        decode = pick(first)
        uncached = c.prompt_tokens - int(c.overlap_tokens[decode])
        if whole[decode] and (self._non_cached_tokens == 0 or uncached < self._non_cached_tokens):
            return Choice(decode, decode)
        paired = bool(pools.decode[decode])
        prefills = (partners(c, pools.prefill, decode) if paired else pools.prefill) | pools.whole
        if not prefills.any():
            return Choice(decode, decode)
        prefill = pick(prefills)
        if pools.whole[prefill]:
            return Choice(prefill, prefill)
        return Choice(prefill, decode if paired else pick(partners(c, pools.decode, prefill)))

    def _pick(self, c: Candidates) -> Pick:
        """By the highest sum of scores, which are relative to the ranks compared."""
        beyond_faster = np.diff(c.local_tokens, axis=0, prepend=0)
        cached = self._tier_weights @ beyond_faster

        def pick(allowed: Flags) -> int:
            score = (
                self._prefix_weight * _scaled(cached, allowed)
                + self._queue_weight * _scaled(-c.waiting, allowed)
                + self._kv_weight * (1.0 - c.kv_usage)
                + self._running_weight * _scaled(-c.running, allowed)
            )
            return least_of(c, -score)(allowed)

        return pick


def _scaled(values: Floats | Ints, allowed: Flags) -> Floats:
    """0 for the lowest of the allowed, 1 for the highest; 1 when they are all equal."""
    lowest, highest = values[allowed].min(), values[allowed].max()
    if highest <= lowest:
        return np.ones(len(values))
    scaled: Floats = (values - lowest) / (highest - lowest)
    return scaled
