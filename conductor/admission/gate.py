"""What a scheduler asks of admission: how long an answer will be, and whether to serve a request at all."""

from __future__ import annotations

import numpy as np

from conductor.admission.forecast import DecodeForecast
from conductor.admission.mooncake_rules import AcceptAll
from conductor.admission.output_length import Kind, OutputLengths
from conductor.admission.prospect import (
    AdmissionRule,
    DecodeSpeeds,
    Prospect,
    Rejection,
    Rows,
    decode_positions,
)
from conductor.costs import ClusterTables
from conductor.costs import tables as t
from conductor.placement import PlacementRequest
from conductor.policies.candidates import Candidates, Choice

# Predictions move slowly, and are made for every request: one holds for this share of the answers seen so far,
# at most for so many.
_HOLDS_SHARE = 1 / 8
_HOLDS_AT_MOST_ANSWERS = 32
_MOST_REMEMBERED = 4_096


class Gate:
    """A rule with the knowledge it judges by, kept up to date by the scheduler's events."""

    def __init__(self, rule: AdmissionRule | None = None, lengths: OutputLengths | None = None) -> None:
        self.rule = rule or AcceptAll()
        self.lengths = OutputLengths() if lengths is None else lengths
        self.rejections: dict[str, int] = {}  # by stage
        self._forecast = DecodeForecast()
        self.judges = not isinstance(self.rule, AcceptAll)  # else nothing is forecast for it
        self._observed = 0
        # By kind and limit, tokens and until which observation they hold.
        self._remembered: dict[tuple[Kind, int | None], tuple[int, int]] = {}

    def output_tokens(self, request: PlacementRequest, beginning: int | None) -> int:
        """The predicted length of the answer, at least 1 and at most what the request allows.

        ``beginning`` is the request's own, which takes a while to compute.
        """
        key = (self.lengths.kind(request, beginning), request.max_output_tokens)
        tokens, until = self._remembered.get(key, (0, -1))
        if until < self._observed:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            tokens = round(self.lengths.predict(request, beginning).mean_tokens) or 1
            self._remembered[key] = (
                tokens,
                self._observed + min(int(self._observed * _HOLDS_SHARE), _HOLDS_AT_MOST_ANSWERS),
            )
        return tokens

    def observe(self, request: PlacementRequest, beginning: int | None, output_tokens: int) -> None:
        """A finished answer had this length."""
        self._observed += 1
        self.lengths.observe(request, beginning, output_tokens)

    def judge(
        self, candidates: Candidates, choice: Choice, ttft_s: float, tables: ClusterTables
    ) -> Rejection | None:
        """Before anything is reserved: None to serve it where the policy chose."""
        if not self.judges:
            return None
        c = candidates
        positions = decode_positions(c)
        prospect = Prospect(
            now_s=c.now_s,
            ttft_s=ttft_s,
            tbt_s=float(c.tbt_s[choice.decode]),
            ttft_objective_s=c.ttft_objective_s,
            tbt_objective_s=c.tbt_objective_s,
            prefill_end_s=c.now_s + ttft_s,
            decode_rows=c.rows[positions],
            decode_speeds=_speeds(tables, c.rows[positions]),
        )
        return self.count(self.rule.judge(c.request, c, choice, prospect, self._forecast))

    def judge_decode(
        self,
        request: PlacementRequest,
        row: int,
        tbt_s: float,
        tbt_objective_s: float,
        now_s: float,
        tables: ClusterTables,
    ) -> Rejection | None:
        """When the prefill of a pair has ended, before it hands off to the rank of that row."""
        if not self.judges:
            return None
        rows: Rows = np.array([row], np.intp)
        prospect = Prospect(
            now_s=now_s,
            ttft_s=0.0,
            tbt_s=tbt_s,
            ttft_objective_s=np.inf,
            tbt_objective_s=tbt_objective_s,
            prefill_end_s=now_s,
            decode_rows=rows,
            decode_speeds=_speeds(tables, rows),
        )
        return self.count(self.rule.judge_decode(request, prospect, self._forecast))

    def placed(
        self,
        placement_id: str,
        row: int,
        request: PlacementRequest,
        ttft_s: float,
        tbt_s: float,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """A decode is on its way to the rank of that row."""
        if self.judges:
            start_s = now_s + ttft_s
            self._forecast.placed(
                placement_id,
                row,
                start_s=start_s,
                end_s=start_s + output_tokens * tbt_s,
                context_tokens=request.prompt_tokens,
                output_tokens=output_tokens,
            )

    def started(self, placement_id: str, now_s: float) -> None:
        """Its first token is out."""
        if self.judges:
            self._forecast.started(placement_id, now_s)

    def ended(self, placement_id: str) -> None:
        """It is over, one way or the other."""
        if self.judges:
            self._forecast.ended(placement_id)

    def count(self, rejection: Rejection | None) -> Rejection | None:
        """Remember that somebody was turned away; returns what it was given."""
        if rejection is not None:
            self.rejections[rejection.stage] = self.rejections.get(rejection.stage, 0) + 1
        return rejection


def _speeds(tables: ClusterTables, rows: Rows) -> DecodeSpeeds:
    classes = tables.classes[tables.ranks[rows, t.CLASS]]
    scale = classes[:, t.DECODE_SCALE]
    return DecodeSpeeds(
        base_s=scale * classes[:, t.DECODE_BASE_S],
        s_per_sequence=scale * classes[:, t.DECODE_S_PER_SEQUENCE],
        s_per_context_token=scale * classes[:, t.DECODE_S_PER_CONTEXT],
    )
