"""The prefix plan of a choice, spelled out: which tokens come from which tier of whom."""

from __future__ import annotations

from cache_index import Tier
from conductor.costs import kernels as k
from conductor.placement import PlanSegment, PrefixPlan
from conductor.policies.candidates import NO_PEER, Candidates, Choice


def plan_of(c: Candidates, choice: Choice) -> PrefixPlan:
    """The plan of the prefill rank, or what the choice makes of it when it names another peer or none."""
    i = choice.prefill
    plans, seconds = c.plans, c.seconds
    if choice.peer == plans.item(k.PLAN_PEER, i):
        local, tokens = plans.item(k.PLAN_LOCAL, i), plans.item(k.PLAN_TOKENS, i)
        fetch_s, prefill_s = seconds.item(k.FETCH_S, i), seconds.item(k.PREFILL_S, i)
    else:
        local = int(c.overlap_tokens[i])
        tokens = local if choice.peer == NO_PEER else max(local, int(c.local_tokens[Tier.HOST, choice.peer]))
        fetch_s = 0.0
        if tokens > local:
            fetch_s = float(c.link_latency_s[i]) + (tokens - local) * float(c.kv_s_per_token[i])
        prefill_s = fetch_s + compute_s(c, i, tokens)
    if tokens == local == c.local_tokens.item(0, i):  # nothing to load or to fetch
        on_device = (PlanSegment(0, local, c.ranks[i].holder, Tier.DEVICE),) if local else ()
        return PrefixPlan(tokens, on_device, fetch_s, prefill_s)
    segments = []
    start = 0
    for tier, held in zip(Tier, c.local_tokens[:, i].tolist(), strict=True):
        stop = min(held, local)
        if stop > start:
            segments.append(PlanSegment(start, stop, c.ranks[i].holder, tier))
            start = stop
    if tokens > start and choice.peer != NO_PEER:
        peer_tokens = int(c.local_tokens[Tier.DEVICE, choice.peer])
        peer = c.ranks[choice.peer].holder
        for tier, offered in ((Tier.DEVICE, peer_tokens), (Tier.HOST, tokens)):
            stop = min(offered, tokens)
            if stop > start:
                segments.append(PlanSegment(start, stop, peer, tier))
                start = stop
    return PrefixPlan(tokens, tuple(segments), fetch_s, prefill_s)


def compute_s(c: Candidates, rank: int, cached_tokens: int) -> float:
    """`Candidates.compute_s` for one rank."""
    terms: list[float] = c.prefill_terms[:, rank].tolist()
    a, b, base, d = terms
    n, p = float(c.prompt_tokens), float(cached_tokens)
    alone_s = a * (n - p) + b * (n * n - p * p) + base + d * p
    return alone_s * float(c.prefill_scale[rank])


def hand_off_s(c: Candidates, prefill: int, decode: int) -> float:
    """Seconds to move what the decode rank lacks of the prompt from the prefill rank; 0 for a whole placement."""
    if prefill == decode:
        return 0.0
    lacking = c.prompt_tokens - int(c.overlap_tokens[decode])
    if lacking <= 0:
        return 0.0
    here, there = c.locations[:, prefill].tolist(), c.locations[:, decode].tolist()
    distance = 0
    while distance < len(here) and here[distance] != there[distance]:
        distance += 1
    link: list[float] = c.links[distance].tolist()
    s_per_byte, latency_s = link
    kv_s_per_token = c.kv_s_per_token
    s_per_token = max(
        float(kv_s_per_token[decode]),
        float(kv_s_per_token[prefill]),
        float(c.kv_bytes_per_token[decode]) * s_per_byte,
    )
    return float(c.link_latency_s[decode]) + latency_s + lacking * s_per_token


def predicted_ttft_s(c: Candidates, choice: Choice, plan: PrefixPlan, moving_s: float) -> float:
    """Queue, plan, and then the hand-off or the wait for memory on the decode rank, whichever is longer."""
    seconds = c.seconds
    waiting_s = seconds.item(k.WAIT_S, choice.decode)
    longer_s = waiting_s if waiting_s > moving_s else moving_s
    return seconds.item(k.QUEUE_S, choice.prefill) + plan.prefill_s + longer_s
