"""The `slo` policy: both objectives at once, by estimated TTFT and TBT of the whole placement."""

from __future__ import annotations

from typing import Any

from cache_index.kernel_set import compiled
from conductor.policies.candidates import Candidates, Choice
from conductor.policies.parameters import whole_number
from conductor.policies.slo_kernel import SIGNATURE, choose


class Slo:
    """Minimise the objectives missed, by this request and by those aboard; then TTFT, TBT and what others pay.

    A missed objective, this request's TTFT or another's TBT, counts 1, and what may be missed by its chance. TTFT
    counts as a fraction of its objective, TBT as the square of its, the delay inflicted on others and the cost of
    what is evicted as fractions of the TTFT objective. Prefix plan, queue, interference, hand-off over the link
    between the two ranks and decode step are those of `Candidates`; prefill and decode rank are chosen together.
    A decode rank that would compute at most ``decode_prefill_tokens`` may prefill itself, which saves the hand-off
    (conditional disaggregation); 0 forbids it.
    """

    name = "slo"

    def __init__(self, *, decode_prefill_tokens: int = 512) -> None:
        self.decode_prefill_tokens = whole_number("decode_prefill_tokens", decode_prefill_tokens)
        self._choose = compiled(choose, *SIGNATURE)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slo:
        return self  # it remembers nothing

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        prefill, decode, peer = self._choose(
            c.roles,
            c.protocol,
            c.limit_tokens,
            c.prompt_tokens,
            c.local_tokens,
            c.plans,
            c.seconds,
            c.locations,
            c.link_latency_s,
            c.kv_bytes_per_token,
            c.links,
            c.ttft_objective_s,
            c.tbt_objective_s,
            self.decode_prefill_tokens,
            c.joint_protocols,
        )
        return Choice(prefill, decode, peer) if prefill >= 0 else None
