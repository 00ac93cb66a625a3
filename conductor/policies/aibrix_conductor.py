"""The `aibrix_conductor` policy."""

from __future__ import annotations

import numpy as np

from conductor.costs import Floats
from conductor.policies.candidates import Candidates, Choice
from conductor.policies.pairing import choose_apart, least_of, requests_of
from conductor.policies.parameters import number


class AibrixConductor:
    """Least estimated TTFT for the prefill rank, least estimated TBT for the decode rank, by fixed formulas.

    Source: AIBrix, routing algorithm `pd` with score policy "conductor" (`pkg/plugins/gateway/algorithms/pd/`,
    `prefill_scorer.go` and `decode_scorer.go`); milliseconds and tokens::

        TTFT = requests * mean prefill time
               + (prefix_time_a * matched + prefix_time_b      if matched > 0)
               + (prefill_time_a * unmatched ** prefill_time_b + prefill_time_c      if unmatched > 0)
        TBT  = 1000 / throughput * (1 + 1 / max(requests, 1)), times pressure_penalty above pressure_threshold

    Defaults: 0.005, 1; 0.001, 1.5, 5; penalty 1.5 above a KV usage of 0.9; ``fallback_tbt_ms`` 20 stands for
    1000 / throughput while nothing is decoded. Since throughput is a rank's tokens a second over all requests,
    a busy decode rank looks faster than an idle one: that is the published formula.

    Approximated: AIBrix reads the mean prefill time and the throughput from the engine. Here the former is the
    mean over the prefills that this policy placed on the rank, as the cost model predicts them (as in AIBrix,
    a prefill of 512 tokens by the formula before there is any), and the latter the requests decoded a step
    over the predicted step time. All ranks are one role set.
    """

    name = "aibrix_conductor"

    def __init__(
        self,
        *,
        prefix_time_a: float = 0.005,
        prefix_time_b: float = 1.0,
        prefill_time_a: float = 0.001,
        prefill_time_b: float = 1.5,
        prefill_time_c: float = 5.0,
        fallback_tbt_ms: float = 20.0,
        pressure_threshold: float = 0.9,
        pressure_penalty: float = 1.5,
    ) -> None:
        self._prefix_a = number("prefix_time_a", prefix_time_a, least=0.0)
        self._prefix_b = number("prefix_time_b", prefix_time_b, least=0.0)
        self._prefill_a = number("prefill_time_a", prefill_time_a, least=0.0)
        self._prefill_b = number("prefill_time_b", prefill_time_b, least=0.0)
        self._prefill_c = number("prefill_time_c", prefill_time_c, least=0.0)
        self._fallback_tbt_ms = number("fallback_tbt_ms", fallback_tbt_ms, least=0.0)
        self._pressure_threshold = number("pressure_threshold", pressure_threshold, least=0.0, most=1.0)
        self._pressure_penalty = number("pressure_penalty", pressure_penalty, least=1.0)
        self._prefills = np.zeros(0)  # placed so far, by row
        self._prefills_ms = np.zeros(0)

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        choice = choose_apart(c, least_of(c, self._ttft_ms(c)), least_of(c, self._tbt_ms(c)))
        if choice is not None:
            row = c.rows[choice.prefill]
            self._prefills[row] += 1
            self._prefills_ms[row] += 1e3 * c.compute_s(c.overlap_tokens)[choice.prefill]
        return choice

    def _ttft_ms(self, c: Candidates) -> Floats:
        rows = c.rows
        missing = int(rows.max(initial=-1)) + 1 - len(self._prefills)
        if missing > 0:
            self._prefills = np.pad(self._prefills, (0, missing))
            self._prefills_ms = np.pad(self._prefills_ms, (0, missing))
        placed = self._prefills[rows]
        fallback_ms = self._prefill_ms(np.array([512.0]))[0]
        mean_ms = np.where(placed > 0, self._prefills_ms[rows] / np.maximum(placed, 1), fallback_ms)
        matched = c.overlap_tokens.astype(np.float64)
        prefix_ms = np.where(matched > 0, self._prefix_a * matched + self._prefix_b, 0.0)
        ttft_ms: Floats = requests_of(c) * mean_ms + prefix_ms + self._prefill_ms(c.prompt_tokens - matched)
        return ttft_ms

    def _prefill_ms(self, unmatched: Floats) -> Floats:
        took_ms = self._prefill_a * np.maximum(unmatched, 0.0) ** self._prefill_b + self._prefill_c
        return np.where(unmatched > 0, took_ms, 0.0)

    def _tbt_ms(self, c: Candidates) -> Floats:
        requests = np.maximum(requests_of(c), 1)
        token_ms = np.where(c.active_decodes > 0, 1e3 * c.tbt_s / requests, self._fallback_tbt_ms)
        penalty = np.where(c.kv_usage > self._pressure_threshold, self._pressure_penalty, 1.0)
        tbt_ms: Floats = token_ms * (1.0 + 1.0 / requests) * penalty
        return tbt_ms
