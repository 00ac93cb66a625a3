"""What became of the requests of a simulation, and what the engines did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray


class Outcome(StrEnum):
    FINISHED = "finished"
    REJECTED = "rejected"  # by admission
    REFUSED = "refused"  # no instance can take it: it is too long for all of them
    FAILED = "failed"  # instances died under it as often as it was tried


class RequestResult(msgspec.Struct, frozen=True, gc=False):
    """What became of one request; times after ``arrival_s`` are from there on, and infinite if not finished.

    ``queue_s`` is when its prefill began (loads from slower tiers included), ``prefilled_s`` when that ended,
    ``received_s`` when its KV cache was where it decodes. ``tbt_s`` is the mean of its longest tenth of token
    gaps, ``itl_s`` of all; 0 for answers of one token. ``cached_tokens`` were reused at prefill; those of them
    that were not on the instance's device are counted by where they came from.
    """

    number: int
    outcome: Outcome
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    queue_s: float = inf
    ttft_s: float = inf
    tbt_s: float = inf
    itl_s: float = inf
    e2e_s: float = inf
    prefill_instance: str = ""
    decode_instance: str = ""
    predicted_ttft_s: float = inf
    prefilled_s: float = inf
    received_s: float = inf
    host_tokens: int = 0
    disk_tokens: int = 0
    pod_tokens: int = 0
    remote_tokens: int = 0
    peer_tokens: int = 0
    preemptions: int = 0
    retries: int = 0  # after instances died


@dataclass(frozen=True, slots=True)
class Timeline:
    """Gauges of every instance, once a second: arrays of [look, instance]."""

    at_s: NDArray[np.float64]  # [look]
    instances: tuple[str, ...]
    running: NDArray[np.int32]
    waiting: NDArray[np.int32]
    kv_usage: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ActionsDone:
    """Tier actions of one kind that ended alike."""

    actions: int
    blocks: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Of all stores of a slower tier, in bytes as they lie there: encoded where the store encodes.

    ``carried_bytes`` went over their links, as loads and copies. ``written_bytes`` became new to a store, written
    through (which takes no link time in a simulation) or copied there.
    """

    carried_bytes: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """All requests in the order of their end, and what the engines did."""

    results: list[RequestResult]
    end_s: float
    busy_s: dict[str, float]  # of every instance
    load_variation: float  # of requests per instance: standard deviation by mean, mean of all polls
    engine_runs: int  # steps, where several that grew evenly count as one
    computed_tokens: int  # of prompts
    timeline: Timeline
    tier_actions: dict[str, dict[str, ActionsDone]] = field(default_factory=dict)  # by kind and end
    tier_traffic: dict[str, TierTraffic] = field(default_factory=dict)  # by tier
