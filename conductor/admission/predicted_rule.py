"""The `predicted` rule: serves a request where more meet their objectives with it than without it.

Where Mooncake's rules ask how loaded the pools are, this one asks what would become of this request and of those
who are aboard already: every decode has a length of its own (`OutputLengths`), and bears only so much prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from conductor.admission.forecast import DecodeForecast
from conductor.admission.prospect import (
    Prospect,
    Rejection,
    decode_positions,
    finite,
    refuse_decode,
    refuse_harm,
    refuse_prefill,
)
from conductor.placement import PlacementRequest
from conductor.policies import Candidates, Choice

# Priorities further from 0 than this count as this: clients may name any number.
_MAX_PRIORITY: Final = 8
# A prompt that is late whatever is done may wait and do harm only to this part of what others may.
_LATE_ANYWAY: Final = 0.1


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rejects what would not meet its objectives by a margin, or costs others theirs, where the policy placed it.

    A request is admitted up to a load of ``limit``. That is below 1 because a decode rank at its limit is the
    limit of everybody aboard: were it overdrawn, all of them would be late. Every level of priority above 0
    raises it by ``priority_step`` of itself; below 0 it falls likewise, never under a tenth.

    * Harm is how many of the requests aboard would miss their TBT objective because of this prefill
      (`costs.exposure`). At 1, serving it costs as much as it gains.
    * Prefill load is predicted TTFT over its objective. A prompt too long to meet it on an idle cluster is
      served when it need hardly wait and does hardly any harm: waiting would not make it shorter, others would
      be late as well, and what it leaves in the caches may help many. It counts as a tenth of a request.
    * Decode load is the step of the chosen rank over the objective when this prefill will have ended, or when
      half of this answer should be out, whichever is more.
    * Where KV memory is short, the first token waits for other answers to end, unless it is forecast that they
      will have, or the engine reports that it has the room (answers that share a prefix take less than their
      contexts add up to).

    Only the chosen ranks are judged. Admitting because another rank is forecast to have room would overload the
    chosen one, and the rank that looks best in a forecast is too often the one whose forecast is wrong.
    """

    limit: float = 0.9
    priority_step: float = 0.25
    name = "predicted"

    def __post_init__(self) -> None:
        finite("limit", self.limit, 0.0)
        finite("priority_step", self.priority_step, 0.0, 1.0)

    def limit_of(self, priority: int) -> float:
        """The load up to which a request of this priority is admitted."""
        level = min(max(priority, -_MAX_PRIORITY), _MAX_PRIORITY)
        return self.limit * max(1.0 + self.priority_step * level, 0.1)

    def judge(
        self,
        request: PlacementRequest,
        candidates: Candidates,
        choice: Choice,
        prospect: Prospect,
        forecast: DecodeForecast,
    ) -> Rejection | None:
        limit, objective_s = self.limit_of(request.priority), prospect.ttft_objective_s
        c, now_s, rows = candidates, prospect.now_s, prospect.table_rows
        ttft_s, queue_s = prospect.ttft_s, float(c.queue_s[choice.prefill])
        harm = float(c.harm[choice.prefill])
        worth = _LATE_ANYWAY if ttft_s - queue_s > limit * objective_s else 1.0
        if harm > limit * worth:
            answer_s = c.output_tokens * prospect.tbt_s
            return refuse_harm(request, prospect, harm=harm, load=harm / worth, answer_s=answer_s)
        # All that is placed already counts in these, so a forecast would hardly find more.
        if max(prospect.ttft_load, prospect.tbt_load) <= limit:
            return None
        place = int(decode_positions(c).searchsorted(choice.decode))
        context_tokens = c.prompt_tokens + 0.5 * c.output_tokens
        half_answer_s = 0.5 * c.output_tokens * prospect.tbt_objective_s

        memory_s = _memory_wait_s(c, choice)
        if memory_s > 0.0:
            soon = forecast.at(prospect.prefill_end_s, now_s, rows=rows)
            if _is_full(c, choice, float(soon.context_tokens[prospect.decode_rows[place]])):
                queue_s += memory_s
            else:
                ttft_s -= memory_s
        late_anyway = ttft_s - queue_s > limit * objective_s
        ttft_load = (queue_s / _LATE_ANYWAY if late_anyway else ttft_s) / objective_s

        def tbt_load_in(wait_s: float) -> float:
            begins_s = prospect.prefill_end_s + wait_s
            return max(
                float(prospect.tbt_loads(forecast.at(t_s, now_s, rows=rows), 1.0, context_tokens)[place])
                for t_s in (begins_s, begins_s + half_answer_s)
            )

        tbt_load = tbt_load_in(0.0)
        if max(ttft_load, tbt_load) <= limit:
            return None
        if ttft_load >= tbt_load:
            return refuse_prefill(
                request, prospect, ttft_s=ttft_s, queue_s=queue_s, load=ttft_load, limit=limit
            )
        return refuse_decode(request, prospect, load=tbt_load, limit=limit, load_in=tbt_load_in)

    def judge_decode(
        self, request: PlacementRequest, prospect: Prospect, forecast: DecodeForecast
    ) -> Rejection | None:
        """Nothing is thrown away that has been computed."""
        return None


def _memory_wait_s(c: Candidates, choice: Choice) -> float:
    """How much longer than its hand-off, if any, the request would wait for KV memory, were nothing to end."""
    wait_s = float(c.wait_s[choice.decode])
    if choice.prefill != choice.decode:
        wait_s -= float(c.hand_off_s[choice.decode])
    return max(wait_s, 0.0)


def _is_full(c: Candidates, choice: Choice, context_tokens: float) -> bool:
    """Whether prompt and answer find no room, by the contexts forecast and by what the engine reports."""
    need = c.prompt_tokens + c.output_tokens
    capacity = float(c.kv_capacity_tokens[choice.decode])
    used = float(c.kv_usage[choice.decode]) * capacity
    return context_tokens + need > capacity and used + need > capacity
