"""The cluster as a whole: its ranks now, what it did in the last minutes, and both as the diagnosis wants them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from conductor.cluster import Health, InstanceState
from conductor.diagnosis import ENOUGH, Pace, Snapshot
from conductor.outcomes import Outcomes, Tally
from conductor.placement import Role
from conductor.rank import RankState
from conductor.scheduler import Scheduler
from conductor.time_spread import percentile

# A rank's gauges older than this say nothing about now.
_FRESH_S: Final = 30.0
_STEPS: Final = ((5.0, Outcomes.WINDOW_S), (60.0, 3600.0), (300.0, Outcomes.HISTORY_S))  # and how far they go


def overview(scheduler: Scheduler, now_s: float, window_s: float) -> dict[str, Any]:
    """The answer of `GET /v1/cluster`. The window is cut to what is kept."""
    window_s = min(window_s, Outcomes.WINDOW_S)
    tally = scheduler.outcomes.between(now_s - window_s, now_s + 1.0)
    instances = list(scheduler.cluster)
    candidates = list(_candidates(scheduler))
    ranks = [rank for _, rank in candidates]
    usages = [u for each in candidates if (u := kv_usage(*each)) is not None]
    queues = [rank.queue_s(now_s) for instance, rank in candidates if instance.role is not Role.DECODE]
    return {
        "instances": {
            "total": len(instances),
            "by_health": dict(Counter(i.health.value for i in instances)),
            "by_role": dict(Counter(i.role.value for i in instances)),
            "ranks": sum(len(i.ranks) for i in instances),
        },
        "models": [
            {"model": card.model, "instances": card.instances, "parent": card.parent}
            for card in scheduler.models()
        ],
        "policy": scheduler.policy.name,
        "objectives": _objectives(scheduler),
        "now": {
            "active_placements": scheduler.active_placements,
            "pending_prefills": sum(rank.pending_prefills for rank in ranks),
            "active_decodes": sum(rank.active_decodes for rank in ranks),
            "context_tokens": sum(rank.context_tokens for rank in ranks),
            "queue_mean_ms": _ms(_mean(sum(queues), len(queues))),
            "queue_max_ms": _ms(max(queues, default=None)),
            "kv_usage_mean": _rounded(_mean(sum(usages), len(usages))),
            "kv_usage_max": _rounded(max(usages, default=None)),
        },
        "window": {"seconds": window_s, **figures(tally, window_s)},
    }


def figures(tally: Tally, window_s: float) -> dict[str, Any]:
    """What a tally of so many seconds says; None where nothing was seen to tell it by."""
    ended = sum(tally.ended.values())
    return {
        "placed": tally.placed,
        "refused": tally.refused,
        "ended": dict(tally.ended),
        "requests_per_s": _rounded(ended / window_s),
        "output_tokens_per_s": _rounded(tally.output_tokens / window_s) if tally.output_tokens else None,
        "goodput_per_s": _rounded(tally.good / window_s),
        "goodput_share": _share(tally.good, tally.judged),
        "ttft_attainment": _share(tally.ttft_met, tally.ttft_seen),
        "ttft_mean_ms": _ms(_mean(tally.ttft_s, tally.ttft_seen)),
        **_percentiles("ttft", tally.ttft_spread),
        "tbt_attainment": _share(tally.tbt_met, tally.tbt_seen),
        "tbt_mean_ms": _ms(_mean(tally.tbt_s, tally.tbt_seen)),
        **_percentiles("tbt", tally.tbt_spread),
        "token_reuse_planned": _share(tally.reused_tokens, tally.prompt_tokens),
        "token_reuse_reported": _share(tally.cached_tokens, tally.reported_prompt_tokens),
        # Streams tell it only when asked to (`include_usage`): what is told may be of the prefill legs alone.
        "token_reuse_reported_of": _share(tally.reported_prompt_tokens, tally.finished_prompt_tokens),
        "request_reuse": _share(tally.reusing, tally.placed),
        "disaggregated_share": _share(tally.disaggregated, tally.placed),
        "held_mean_ms": _ms(_mean(tally.held_s, tally.placed)),
        "preemptions": tally.preemptions,
    }


def history(scheduler: Scheduler, now_s: float, span_s: float) -> dict[str, Any]:
    """The answer of `GET /v1/cluster/history`: the figures of each step, oldest first, at most 72 steps."""
    step_s = next(step for step, most_s in _STEPS if span_s <= most_s)
    count = math.ceil(span_s / step_s)
    return {
        "step_s": step_s,
        "objectives": _objectives(scheduler),
        "points": [
            {
                "age_s": round(now_s - start_s, 3),
                **figures(tally, min(step_s, max(now_s - start_s, 1.0))),
            }
            for start_s, tally in scheduler.outcomes.steps(now_s, step_s, count)
        ],
    }


def snapshot(scheduler: Scheduler, now_s: float, window_s: float) -> Snapshot:
    """What `diagnosis.diagnose` judges, over the last ``window_s`` seconds, at most what is kept."""
    window_s = min(window_s, Outcomes.WINDOW_S)
    start_s, middle_s = now_s - window_s, now_s - 0.5 * window_s
    earlier = scheduler.outcomes.between(start_s, middle_s)
    later = scheduler.outcomes.between(middle_s, now_s + 1.0)
    both = Tally()
    both.add(earlier)
    both.add(later)
    candidates = list(_candidates(scheduler))
    prefilling = [rank for instance, rank in candidates if instance.role is not Role.DECODE]
    usages = [usage for each in candidates if (usage := kv_usage(*each)) is not None]
    reported = [rank.reported for _, rank in candidates if _fresh(rank, now_s)]
    batch, step_s, compute_share = _decode(scheduler, candidates)
    apart, whole = both.ttft_apart_seen, both.ttft_seen - both.ttft_apart_seen
    comparable = apart >= ENOUGH and whole >= ENOUGH
    handed = both.hand_offs >= ENOUGH
    return Snapshot(
        window_s=window_s,
        ttft_objective_s=scheduler.objectives.ttft_s,
        tbt_objective_s=scheduler.objectives.tbt_s,
        finished=both.ended["finished"],
        ttft_s=_enough(both.ttft_s, both.ttft_seen),
        tbt_s=_enough(both.tbt_s, both.tbt_seen),
        ttft_attainment=_enough(both.ttft_met, both.ttft_seen),
        tbt_attainment=_enough(both.tbt_met, both.tbt_seen),
        prefill_load=both.prefill_s / (len(prefilling) * window_s) if prefilling and both.placed else None,
        queue_s=_mean(sum(rank.queue_s(now_s) for rank in prefilling), len(prefilling)) or 0.0,
        earlier=_pace(earlier, 0.5 * window_s),
        later=_pace(later, 0.5 * window_s),
        preemptions=both.preemptions
        if any(load is not None and load.preemptions is not None for load in reported)
        else None,
        kv_usage=max(usages, default=None),
        kv_usage_mean=_mean(sum(usages), len(usages)),
        engine_waiting=sum(load.waiting for load in reported if load is not None),
        decode_batch=batch,
        decode_step_s=step_s,
        decode_compute_share=compute_share,
        hand_offs=both.hand_offs,
        hand_off_s=both.hand_off_s / both.hand_offs if handed else None,
        hand_off_predicted_s=both.hand_off_predicted_s / both.hand_offs if handed else None,
        handed_prefill_s=both.handed_prefill_s / both.hand_offs if handed else None,
        ttft_apart_s=both.ttft_apart_s / apart if comparable else None,
        ttft_whole_s=(both.ttft_s - both.ttft_apart_s) / whole if comparable else None,
        dispatch_s=_mean(both.held_s, both.placed),
    )


def _objectives(scheduler: Scheduler) -> dict[str, float]:
    return {"ttft_ms": scheduler.objectives.ttft_s * 1e3, "tbt_ms": scheduler.objectives.tbt_s * 1e3}


def _percentiles(of: str, spread: Mapping[int, int]) -> dict[str, float | None]:
    return {f"{of}_p{share * 100:.0f}_ms": _ms(percentile(spread, share)) for share in (0.5, 0.9, 0.99)}


def _candidates(scheduler: Scheduler) -> Iterator[tuple[InstanceState, RankState]]:
    """Ranks that take requests, or finish some."""
    for instance in scheduler.cluster:
        if instance.health in (Health.UP, Health.SUSPENDED, Health.PROBING, Health.WITHHELD, Health.DRAINING):
            for rank in instance.ranks:
                yield instance, rank


def _fresh(rank: RankState, now_s: float) -> bool:
    return rank.reported is not None and now_s - rank.reported.at_s <= _FRESH_S


def kv_usage(instance: InstanceState, rank: RankState) -> float | None:
    """Of the KV memory: as reported, else the contexts placed over the capacity."""
    if rank.reported is not None:
        return rank.reported.kv_usage
    capacity = instance.instance_class.kv_capacity_tokens
    if instance.facts is not None and instance.facts.kv_capacity_blocks and instance.block_size:
        capacity = instance.facts.kv_capacity_blocks * instance.block_size
    return min(rank.context_tokens / capacity, 1.0) if capacity > 0 else None


def _decode(
    scheduler: Scheduler, candidates: list[tuple[InstanceState, RankState]]
) -> tuple[float | None, float | None, float | None]:
    """Of the ranks that decode now: mean batch, mean predicted step, and the share of it that is compute.

    Reading weights and KV takes the base and the context terms of a step; its sequence term is compute.
    """
    batch = step_s = compute_s = 0.0
    busy = 0
    for instance, rank in candidates:
        if rank.active_decodes:
            c = instance.instance_class
            scale = scheduler.calibration(c).decode.factor
            own_s = scale * c.decode_s_per_sequence * rank.active_decodes
            busy += 1
            batch += rank.active_decodes
            compute_s += own_s
            step_s += own_s + scale * (c.decode_base_s + c.decode_s_per_context_token * rank.context_tokens)
    if not busy:
        return None, None, None
    return batch / busy, step_s / busy, compute_s / step_s if step_s > 0 else None


def _pace(tally: Tally, seconds: float) -> Pace:
    tokens = tally.prompt_tokens - tally.reused_tokens + tally.output_tokens
    return Pace(tally.under_way / tally.placed if tally.placed else 0.0, tokens / seconds)


def _enough(total: float, count: int) -> float | None:
    return total / count if count >= ENOUGH else None


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
