"""Mooncake's Conductor: the `mooncake` and `mooncake_local` policies."""

from __future__ import annotations

import numpy as np

from cache_index import Tier
from conductor.policies.candidates import Candidates, Choice
from conductor.policies.pairing import choose_apart, least_of
from conductor.policies.parameters import number


class Mooncake:
    """Least estimated TTFT, counting the fetch of a longer prefix from the instance that holds the longest.

    Source: Mooncake, FAST'25, Algorithm 1 (the same as section 6 of arXiv 2407.00079 v3). On every prefill rank
    TTFT = transfer + queue + prefill. Where best / own prefix exceeds ``kvcache_balancing_threshold``, the rank
    fetches what it lacks of the best prefix before it computes the rest; else it computes behind its own. An
    own prefix of 0, which the paper leaves open, counts as exceeded. A rank whose connector cannot fetch from a
    peer computes behind its own, whatever the ratio. The decode rank is the least loaded one,
    load being its predicted TBT (v3, section 7).

    The paper tunes the threshold by hand and gives no value; 2 is ours. A prefix counts where it lies in device
    or host memory, as in the paper, whose layer-wise loading makes both equal. The transfer is timed over the
    receiver's link alone. Rejection for a missed objective, the algorithm's last lines, is admission's business.
    """

    name = "mooncake"

    def __init__(self, *, kvcache_balancing_threshold: float = 2.0) -> None:
        self._threshold = number("kvcache_balancing_threshold", kvcache_balancing_threshold, least=1.0)

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        own = c.local_tokens[Tier.HOST]
        held = np.where(c.can_prefill | c.is_mixed, own, 0)
        best = held.max(initial=0)
        fetches = c.can_fetch & (best > own) & (best > self._threshold * own)
        prefix = np.where(fetches, best, own)
        transfer_s = np.where(fetches, c.link_latency_s + (best - own) * c.kv_s_per_token, 0.0)
        ttft_s = transfer_s + c.queue_s + c.compute_s(prefix)
        choice = choose_apart(c, least_of(c, ttft_s), least_of(c, c.tbt_s))
        if choice is None or not fetches[choice.prefill]:
            return choice
        # Any of the best holders will do; the one that sends least often is the one placed on least.
        peer = least_of(c)(held == best)
        return Choice(choice.prefill, choice.decode, peer)


class MooncakeLocal:
    """Least estimated TTFT, every prefill rank computing behind its own prefix: `Mooncake` without transfers.

    Source: the "local cache aware" baseline of Mooncake, FAST'25, Figure 5. No parameters.
    """

    name = "mooncake_local"

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        ttft_s = c.queue_s + c.compute_s(c.local_tokens[Tier.HOST])
        return choose_apart(c, least_of(c, ttft_s), least_of(c, c.tbt_s))
