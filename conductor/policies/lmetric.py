"""LMetric: the `lmetric` and `lmetric_plus_one` policies."""

from __future__ import annotations

from conductor.policies.candidates import Candidates, Choice
from conductor.policies.pairing import choose_apart, least_of, requests_of


class LMetric:
    """Least product of new prefill tokens and batch size.

    Source: LMetric, arXiv 2603.15202. New prefill tokens are those that the rank would have to compute with
    this request aboard: what its pending prefills still lack, and what of this prompt its device has not
    cached. Batch size is its number of requests. No parameters.

    Idle ranks all score 0, cached or not; the paper leaves ties open, here they go to fewer new tokens. The
    paper's instances are mixed; a decode rank is chosen by batch size, its own new tokens being 0 anywhere.
    """

    name = "lmetric"
    _added = 0

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        tokens = c.pending_tokens + c.prompt_tokens - c.overlap_tokens
        batch = requests_of(c) + self._added
        return choose_apart(c, least_of(c, tokens * batch, tokens), least_of(c, batch))


class LMetricPlusOne(LMetric):
    """`LMetric` with this request in the batch: new tokens times (batch size + 1), so that idle ranks differ.

    The form that gateways implement (llm-d router, `scorer/lmetric/lmetric.go`; AIBrix, `l_metric_local.go`).
    """

    name = "lmetric_plus_one"
    _added = 1
