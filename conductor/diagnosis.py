"""What limits a cluster now: compute, memory capacity, bandwidth, network or scheduling, asked in this order.

The order, and the signs of each limit, are those of the survey "500GB vs 80GB" (June 2026). Engines do not tell
how busy their GPUs are, so that is inferred from predicted work, as every finding says of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BUSY: Final = 0.95  # share of the time with prefill work
ROSE: Final = 1.10  # concurrency by more than this factor between the halves of the window
FLAT: Final = 1.05  # throughput by no more than this factor meanwhile
QUEUED: Final = 0.5  # of the TTFT objective, waiting in the prefill queues: work waits wherever it is sent
USAGE_LIMIT: Final = 0.95  # of the KV memory
PREEMPTED: Final = 0.01  # preemptions a finished request
IDLE_COMPUTE: Final = 0.30  # share of a decode step that is compute
DISPATCH: Final = 0.10  # of the TTFT objective, from arrival to dispatch
ENOUGH: Final = 20  # observations that a mean must rest on


class Cause(StrEnum):
    """What can limit a cluster, in the order in which it is looked for."""

    COMPUTE = "compute"
    MEMORY = "memory capacity"
    BANDWIDTH = "bandwidth"
    NETWORK = "network"
    SCHEDULING = "scheduling"


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests under way on average, and prompt and output tokens a second, in one half of the window."""

    concurrency: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster as the rules see it. Means are over the window, except where ``now`` is said; None: unknown."""

    window_s: float
    ttft_objective_s: float
    tbt_objective_s: float
    finished: int
    ttft_s: float | None  # observed mean
    tbt_s: float | None
    ttft_attainment: float | None
    tbt_attainment: float | None
    prefill_load: float | None  # predicted prefill seconds placed, a second and rank; above 1 queues grow
    queue_s: float  # now, mean over the prefill ranks
    earlier: Pace
    later: Pace
    preemptions: int | None
    kv_usage: float | None  # now, of the fullest rank
    kv_usage_mean: float | None
    engine_waiting: int  # now, requests in the engines' own queues
    decode_batch: float | None  # now, mean over the ranks that decode
    decode_step_s: float | None  # predicted for that
    decode_compute_share: float | None  # of that step: what grows with the batch, not with bytes read
    hand_offs: int
    hand_off_s: float | None
    hand_off_predicted_s: float | None
    handed_prefill_s: float | None
    ttft_apart_s: float | None  # of disaggregated requests, where enough of both kinds were seen
    ttft_whole_s: float | None
    dispatch_s: float | None  # arrival to placement


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that a rule looked at; ``limit`` is what it was compared with."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule's answer; ``limits`` None: it cannot be told. ``basis`` says how the numbers are known."""

    cause: Cause
    limits: bool | None
    says: str
    basis: str
    evidence: tuple[Evidence, ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings in their order; ``limit`` is the first that holds, None when none does."""

    limit: Cause | None
    summary: str
    findings: tuple[Finding, ...]


def diagnose(s: Snapshot) -> Diagnosis:
    """Which limit holds now. Pure: the same snapshot gives the same answer."""
    findings = tuple(rule(s) for rule in _RULES)
    first = next((finding for finding in findings if finding.limits), None)
    if first is not None:
        return Diagnosis(first.cause, f"{first.cause} limits the cluster: {first.says}", findings)
    return Diagnosis(None, _no_limit(s, findings), findings)


def _no_limit(s: Snapshot, findings: tuple[Finding, ...]) -> str:
    if s.finished < ENOUGH:
        return (
            f"too little was seen to judge: {s.finished} requests finished in the last {s.window_s:.0f} s, "
            f"at least {ENOUGH} are needed"
        )
    unknown = [str(finding.cause) for finding in findings if finding.limits is None]
    missed = [
        f"{name} is met by {share:.0%} of the requests only"
        for name, share in (("TTFT", s.ttft_attainment), ("TBT", s.tbt_attainment))
        if share is not None and share < 0.9
    ]
    text = f"no limit was found, although {' and '.join(missed)}" if missed else "nothing is wrong"
    return f"{text}; not known: {', '.join(unknown)}" if unknown else text


def _compute(s: Snapshot) -> Finding:
    rose = s.later.concurrency > ROSE * s.earlier.concurrency
    flat = s.later.tokens_per_s <= FLAT * s.earlier.tokens_per_s
    queued = s.queue_s >= QUEUED * s.ttft_objective_s
    limits = None
    says = "no prefill rank is up or nothing was placed"
    if s.prefill_load is not None:
        limits = s.prefill_load > BUSY and ((rose and flat) or queued)
        says = f"prefill ranks are given work for {s.prefill_load:.0%} of the time"
        if limits:
            says += (
                f", and throughput stays at {s.later.tokens_per_s:,.0f} tokens/s while concurrency rose from "
                f"{s.earlier.concurrency:.1f} to {s.later.concurrency:.1f}"
                if rose and flat
                else f", and a prompt waits {s.queue_s:.2f} s in their queues"
            )
    return Finding(
        Cause.COMPUTE,
        limits,
        says,
        "inferred: engines do not report GPU utilisation; predicted prefill time placed, a second and rank, "
        "stands for it",
        (
            Evidence("prefill_load", s.prefill_load, "busy seconds/s", BUSY),
            Evidence("queue", s.queue_s, "s", QUEUED * s.ttft_objective_s),
            Evidence("concurrency_earlier", s.earlier.concurrency, "requests"),
            Evidence("concurrency_later", s.later.concurrency, "requests", ROSE * s.earlier.concurrency),
            Evidence("throughput_earlier", s.earlier.tokens_per_s, "tokens/s"),
            Evidence("throughput_later", s.later.tokens_per_s, "tokens/s", FLAT * s.earlier.tokens_per_s),
        ),
        "add prefill instances or faster GPUs, quantise weights (FP8), raise prefix reuse, or reject earlier",
    )


def _memory(s: Snapshot) -> Finding:
    rate = s.preemptions / max(s.finished, 1) if s.preemptions is not None else None
    preempted = rate is not None and s.preemptions is not None and s.preemptions > 0 and rate > PREEMPTED
    full = s.kv_usage is not None and s.kv_usage >= USAGE_LIMIT and s.engine_waiting > 0
    if preempted:
        says = f"engines preempted {s.preemptions} requests while {s.finished} finished"
    elif full:
        says = f"KV memory is {s.kv_usage:.0%} full and {s.engine_waiting} requests wait inside the engines"
    elif s.kv_usage is None:
        says = "no rank tells its KV usage"
    else:
        says = f"the fullest rank uses {s.kv_usage:.0%} of its KV memory"
    unknown = s.kv_usage is None and rate is None
    return Finding(
        Cause.MEMORY,
        None if unknown else preempted or full,
        says,
        "measured: preemptions and KV usage from the engines' /metrics"
        if s.preemptions is not None
        else "measured where engines report KV usage, else contexts placed over capacity; preemptions are not "
        "reported",
        (
            Evidence("preemptions", s.preemptions, "requests"),
            Evidence("preemptions_per_request", rate, "", PREEMPTED),
            Evidence("kv_usage_max", s.kv_usage, "", USAGE_LIMIT),
            Evidence("kv_usage_mean", s.kv_usage_mean, ""),
            Evidence("engine_waiting", s.engine_waiting, "requests", 0),
        ),
        "FP8 KV cache, offload to host memory, more decode instances, or a lower admission limit",
    )


def _bandwidth(s: Snapshot) -> Finding:
    known = s.tbt_s is not None and s.decode_compute_share is not None
    limits = None
    says = "too few answers were seen, or nothing decodes now"
    if s.tbt_s is not None and s.decode_compute_share is not None:
        limits = s.decode_compute_share < IDLE_COMPUTE and s.tbt_s > s.tbt_objective_s
        says = (
            f"a token takes {s.tbt_s * 1e3:.1f} ms (objective {s.tbt_objective_s * 1e3:.0f} ms), and "
            f"{s.decode_compute_share:.0%} of a decode step is compute"
        )
    return Finding(
        Cause.BANDWIDTH,
        limits if known else None,
        says,
        "TBT is measured (mean gap between tokens); decode utilisation is inferred: the part of the predicted "
        "step that is not the reading of weights and KV",
        (
            Evidence("tbt", s.tbt_s, "s", s.tbt_objective_s),
            Evidence("decode_compute_share", s.decode_compute_share, "", IDLE_COMPUTE),
            Evidence("decode_step_predicted", s.decode_step_s, "s"),
            Evidence("decode_batch", s.decode_batch, "requests"),
        ),
        "FP8 or INT4 KV and weights, a smaller context or batch per decode rank, GPUs with more bandwidth, or "
        "speculative decoding",
    )


def _network(s: Snapshot) -> Finding:
    if s.hand_off_s is None or s.handed_prefill_s is None:
        limits, says = (False, "nothing is handed off") if s.hand_offs == 0 else (None, "too few hand-offs")
    else:
        slower = s.hand_off_s > s.handed_prefill_s
        worse = s.ttft_apart_s is not None and s.ttft_whole_s is not None and s.ttft_apart_s > s.ttft_whole_s
        limits = slower
        says = (
            f"a hand-off takes {s.hand_off_s * 1e3:.0f} ms, the prefill that it saves the decode rank "
            f"{s.handed_prefill_s * 1e3:.0f} ms"
        )
        if worse:
            says += f"; TTFT is {s.ttft_apart_s:.2f} s apart and {s.ttft_whole_s:.2f} s on one instance"
    return Finding(
        Cause.NETWORK,
        limits,
        says,
        "measured: end of the prefill to the first token, less one predicted decode step; the saved prefill is "
        "predicted",
        (
            Evidence("hand_offs", s.hand_offs, "requests"),
            Evidence("hand_off", s.hand_off_s, "s", s.handed_prefill_s),
            Evidence("hand_off_predicted", s.hand_off_predicted_s, "s"),
            Evidence("ttft_disaggregated", s.ttft_apart_s, "s", s.ttft_whole_s),
        ),
        "pair instances of one rack or node (`location`), use RDMA, FP8 KV, layer-wise transfer, or mixed "
        "instances for short prompts",
    )


def _scheduling(s: Snapshot) -> Finding:
    limit_s = DISPATCH * s.ttft_objective_s
    limits = None if s.dispatch_s is None else s.dispatch_s > limit_s
    says = (
        "nothing was placed"
        if s.dispatch_s is None
        else f"requests wait {s.dispatch_s * 1e3:.1f} ms from arrival to dispatch"
    )
    return Finding(
        Cause.SCHEDULING,
        limits,
        says,
        "measured by the conductor",
        (
            Evidence("dispatch", s.dispatch_s, "s", limit_s),
            Evidence("prefill_load", s.prefill_load, "", BUSY),
        ),
        "raise the number of requests that may wait inside an engine, look at priorities and tenant weights, or "
        "at the time a decision takes (conductor_placement_seconds)",
    )


_RULES: Final[tuple[Callable[[Snapshot], Finding], ...]] = (
    _compute,
    _memory,
    _bandwidth,
    _network,
    _scheduling,
)
