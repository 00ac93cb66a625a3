"""The compiled search for the best whole placement or pair under both objectives (`Slo`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numba import types

from cache_index.kernel_cache import cache_directory, cached_njit
from cache_index.kernel_set import inlined
from conductor.costs import kernels as k
from conductor.costs import tables, topology
from conductor.costs.instance_class import Floats, Ints
from conductor.costs.tables import DECODE, MIXED, PREFILL
from conductor.policies.candidates import Tokens

_DIRECTORY = cache_directory(*map(Path, (__file__, k.__file__, topology.__file__, tables.__file__)))

# A predicted TTFT of 0.8 of its objective is taken to meet it, one of 1.2 to miss it, and between them the chance
# rises evenly.
_SURE: Final = 0.8
_UNSURE: Final = 0.4
_SAME: Final = 1e-12  # scores closer than this are equal, and go to the rank placed on least
_FEW: Final = 4  # prefill ranks that are paired with every decode rank, where links differ


def _score(
    ttft_s: float,
    tbt_s: float,
    others_s: float,
    harm: float,
    ttft_objective_s: float,
    tbt_objective_s: float,
) -> float:
    ttft, tbt = ttft_s / ttft_objective_s, tbt_s / tbt_objective_s
    missed = min(max((ttft - _SURE) / _UNSURE, 0.0), 1.0) + harm  # objectives, this request's and others'
    # Every second of TTFT is felt; of TBT, what is far below the objective hardly is.
    return float(missed + ttft + tbt * tbt + others_s / ttft_objective_s)


_score = cached_njit(_score, _DIRECTORY)


def hand_off_s(
    prompt_tokens: int,
    local_tokens: Tokens,
    kv_s_per_token: Floats,
    locations: Ints,
    link_latency_s: Floats,
    kv_bytes_per_token: Floats,
    links: Floats,
    prefill: int,
    decode: int,
) -> float:
    """`prefix_plan.hand_off_s` of a pair."""
    lacking = prompt_tokens - local_tokens[0, decode]
    if lacking <= 0:
        return 0.0
    distance = 0
    while distance < topology.LOCATION_LEVELS and locations[distance, prefill] != locations[distance, decode]:
        distance += 1
    s_per_token = max(
        kv_s_per_token[decode], kv_s_per_token[prefill], kv_bytes_per_token[decode] * links[distance, 0]
    )
    return float(link_latency_s[decode] + links[distance, 1] + lacking * s_per_token)


hand_off_s = inlined(hand_off_s)


def choose(
    roles: Ints,
    protocol: Ints,
    limit_tokens: Ints,
    prompt_tokens: int,
    local_tokens: Tokens,
    plans: Ints,
    seconds: Floats,
    locations: Ints,
    link_latency_s: Floats,
    kv_bytes_per_token: Floats,
    links: Floats,
    ttft_objective_s: float,
    tbt_objective_s: float,
    decode_prefill_tokens: int,
    joint_protocols: int,
) -> tuple[int, int, int]:
    """The positions of prefill rank, decode rank and the peer of the plan; -1 where there is none.

    ``roles`` are bits, 0 for ranks that are no candidates. Whole placements are tried on every mixed rank, and on
    decode ranks that would compute at most ``decode_prefill_tokens``, unless theirs is one of the
    ``joint_protocols`` (bits). Of pairs, the best ``_FEW`` prefill ranks
    are tried with every decode rank.
    """
    size = roles.shape[0]
    queue_s, prefill_s, tbt_s, wait_s = (
        seconds[k.QUEUE_S],
        seconds[k.PREFILL_S],
        seconds[k.TBT_S],
        seconds[k.WAIT_S],
    )
    inflicted_s, eviction_s = seconds[k.INFLICTED_S], seconds[k.EVICTION_S]
    harm, kv_s_per_token = seconds[k.HARM], seconds[k.KV_S_PER_TOKEN]
    plan_tokens, placements = plans[k.PLAN_TOKENS], plans[k.PLACED]
    best, best_prefill, best_decode = np.inf, -1, -1
    decodes = 0  # bits of the protocols that have a decode rank
    for i in range(size):
        if roles[i] == DECODE and prompt_tokens < limit_tokens[i]:
            decodes |= 1 << protocol[i]
    few = np.full(_FEW, -1, np.int64)
    few_key = np.full(_FEW, np.inf)
    for i in range(size):
        role = roles[i]
        if role == 0 or prompt_tokens >= limit_tokens[i]:
            continue
        start_s = queue_s[i] + prefill_s[i]
        if role == MIXED or (
            role == DECODE
            and prompt_tokens - plan_tokens[i] <= decode_prefill_tokens
            and not joint_protocols >> protocol[i] & 1
        ):
            others_s = inflicted_s[i] + eviction_s[i]
            score = _score(
                start_s + wait_s[i], tbt_s[i], others_s, harm[i], ttft_objective_s, tbt_objective_s
            )
            if score < best - _SAME or (score <= best + _SAME and placements[i] < placements[best_prefill]):
                best, best_prefill, best_decode = score, i, i
        if role == PREFILL and decodes >> protocol[i] & 1:
            others_s = inflicted_s[i] + eviction_s[i]
            key = _score(start_s, 0.0, others_s, harm[i], ttft_objective_s, tbt_objective_s)
            at = _FEW
            while at > 0 and (
                key < few_key[at - 1] - _SAME
                or (key <= few_key[at - 1] + _SAME and placements[i] < placements[few[at - 1]])
            ):
                at -= 1
            if at < _FEW:
                for behind in range(_FEW - 1, at, -1):
                    few[behind], few_key[behind] = few[behind - 1], few_key[behind - 1]
                few[at], few_key[at] = i, key
    least = 0.0  # that any decode rank adds to a pair, found with the first prefill rank
    for number in range(_FEW):
        i = few[number]
        if i < 0:
            break
        start_s = queue_s[i] + prefill_s[i]
        then = least if protocol[i] == protocol[few[0]] else 0.0
        if few_key[number] + then > best:
            continue
        first, least_here = number == 0, np.inf
        for j in range(size):
            if roles[j] != DECODE or prompt_tokens >= limit_tokens[j] or protocol[j] != protocol[i]:
                continue
            lacking = prompt_tokens - local_tokens[0, j]
            moving_s = hand_off_s(
                prompt_tokens,
                local_tokens,
                kv_s_per_token,
                locations,
                link_latency_s,
                kv_bytes_per_token,
                links,
                i,
                j,
            )
            if first:
                near_s = 0.0
                if lacking > 0:
                    near_s = link_latency_s[j] + lacking * max(
                        kv_s_per_token[j], kv_bytes_per_token[j] * links[0, 0]
                    )
                tbt = tbt_s[j] / tbt_objective_s
                least_here = min(least_here, max(near_s, wait_s[j]) / ttft_objective_s + tbt * tbt)
            score = _score(
                start_s + max(moving_s, wait_s[j]),
                tbt_s[j],
                inflicted_s[i] + eviction_s[i],
                harm[i],
                ttft_objective_s,
                tbt_objective_s,
            )
            if score < best - _SAME or (
                score <= best + _SAME and best_decode >= 0 and placements[j] < placements[best_decode]
            ):
                best, best_prefill, best_decode = score, i, j
        if first:
            least = least_here
    return best_prefill, best_decode, plans[k.PLAN_PEER, best_prefill] if best_prefill >= 0 else -1


choose = cached_njit(choose, _DIRECTORY, nogil=False)
_INTS, _FLOATS = types.int64[::1], types.float64[::1]
_INT, _S = types.int64, types.float64
SIGNATURE: Final = (
    *(_INTS, _INTS, _INTS, _INT, types.int32[::1, :], types.int64[:, ::1], types.float64[:, ::1]),
    *(types.int64[:, ::1], _FLOATS, _FLOATS, types.float64[:, ::1], _S, _S, _INT, _INT),
)
