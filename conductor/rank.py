"""One data-parallel rank: what was placed on it and has not ended, and what its engine reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

import msgspec

from cache_index import Holder
from conductor.costs import Exposure
from conductor.costs import tables as t
from conductor.placement import Target

NO_ROW = -1

# Writes a rank's books into its row of the load table, in a quarter of an assignment's time.
_pack_books: Final[Callable[..., None]] = Struct(f"{t.HARM}d").pack_into
_ROW_BYTES: Final = 8 * t.LOAD_COLUMNS


class ReportedLoad(msgspec.Struct, frozen=True, gc=False):
    """Gauges of one rank, as its engine reported them at ``at_s``."""

    running: int
    waiting: int
    kv_usage: float
    at_s: float
    preemptions: int | None = None  # since the engine started


class PlacedElsewhere(msgspec.Struct, frozen=True, gc=False):
    """What other conductors have placed on one rank and has not ended, summed, as they told at ``at_s``."""

    at_s: float
    queue_s: float  # prefill time that is left, as predicted
    prefills: int
    prefill_tokens: int
    decodes: int
    context_tokens: int
    transfers_in: int = 0
    transfers_out: int = 0


class PendingPrefill(msgspec.Struct, frozen=True, gc=False):
    """A prefill placed on a rank; ``observed`` when its end will be seen (it streams, or it hands off)."""

    predicted_s: float
    tokens: int  # that it computes
    observed: bool


@dataclass(slots=True)
class RankState:
    """One data-parallel rank: what was placed on it and has not ended, and what its engine reports.

    Prefills run first come, first served; ``head_since_s`` is when the first of them began.
    """

    holder: Holder
    target: Target
    row: int = 0  # in the cluster's tables, given by the cluster
    prefills: dict[str, PendingPrefill] = field(default_factory=dict)  # by placement, in order
    pending_s: float = 0.0  # predicted, of all prefills
    pending_tokens: int = 0
    head_since_s: float = 0.0
    decodes: dict[str, int] = field(default_factory=dict)  # placement -> context tokens
    context_tokens: int = 0
    transfers_in: int = 0
    transfers_out: int = 0
    placements: int = 0
    reported: ReportedLoad | None = None
    elsewhere: PlacedElsewhere | None = None
    exposure: Exposure = field(default_factory=Exposure)

    def queue_s(self, now_s: float) -> float:
        """Seconds until a prefill placed now would begin, by what was placed here; `costs.kernels` reads the same,
        and what was placed elsewhere, from the load table.

        One whose end will be observed is still running when its predicted end has passed; another is taken to
        have ended as predicted, and those behind it to have gone on.
        """
        if not self.prefills:
            return 0.0
        head = next(iter(self.prefills.values()))
        rest_s = self.pending_s - head.predicted_s
        head_s = self.head_since_s + head.predicted_s - now_s
        if head_s < 0.0:
            if not head.observed:
                return max(rest_s + head_s, 0.0)
            head_s = 0.0
        return head_s + (0.0 if rest_s < 0.0 else rest_s)  # sums of floats may miss zero by a hair

    def _forget_ended(self, now_s: float) -> None:
        """Drop leading prefills that nobody will see the end of and that ended by prediction."""
        prefills = self.prefills
        while prefills:
            placement_id, head = next(iter(prefills.items()))
            if head.observed or self.head_since_s + head.predicted_s > now_s:
                return
            self.head_since_s += head.predicted_s
            self._drop(placement_id)

    def _drop(self, placement_id: str) -> None:
        dropped = self.prefills.pop(placement_id)
        # Sums of floats drift: an empty queue is the moment to be exact again.
        self.pending_s = self.pending_s - dropped.predicted_s if self.prefills else 0.0
        self.pending_tokens -= dropped.tokens

    def add_prefill(self, placement_id: str, pending: PendingPrefill, now_s: float) -> None:
        if self.prefills:
            self._forget_ended(now_s)
        if not self.prefills:
            self.head_since_s = now_s
        self.prefills[placement_id] = pending
        self.pending_s += pending.predicted_s
        self.pending_tokens += pending.tokens

    def end_prefill(self, placement_id: str, now_s: float) -> float | None:
        """Take a prefill off the queue; returns its service time in seconds where that is known.

        It is known for the head of the queue: since the one before it ended.
        """
        self._forget_ended(now_s)
        prefills = self.prefills
        if placement_id not in prefills:
            return None
        was_head = next(iter(prefills)) == placement_id
        self._drop(placement_id)
        if not was_head:
            return None
        service_s, self.head_since_s = now_s - self.head_since_s, now_s
        return service_s

    def add_decode(self, placement_id: str, context_tokens: int) -> None:
        self.decodes[placement_id] = context_tokens
        self.context_tokens += context_tokens

    def end_decode(self, placement_id: str) -> None:
        self.context_tokens -= self.decodes.pop(placement_id, 0)

    def write(self, loads: memoryview[float]) -> None:
        """Write the books into this rank's row of the load table (`ClusterTables.load_words`)."""
        head_s = rest_s = 0.0
        observed = False
        if self.prefills:
            head = next(iter(self.prefills.values()))
            head_s, observed = head.predicted_s, head.observed
            rest_s = self.pending_s - head_s
        if self.elsewhere is not None:
            self._write_all(loads, self.elsewhere, head_s, observed, rest_s)
            return
        _pack_books(
            loads,
            self.row * _ROW_BYTES,
            self.head_since_s,
            head_s,
            observed,
            rest_s,
            len(self.prefills),
            self.pending_tokens,
            len(self.decodes),
            self.context_tokens,
            self.transfers_in,
            self.transfers_out,
            self.placements,
        )

    def _write_all(
        self, loads: memoryview[float], others: PlacedElsewhere, head_s: float, observed: bool, rest_s: float
    ) -> None:
        """As `write`, with what others placed: behind the first prefill of ours, or running down by itself."""
        since_s = self.head_since_s
        if self.prefills:
            rest_s += others.queue_s
        else:
            since_s, head_s, observed = others.at_s, others.queue_s, False
        _pack_books(
            loads,
            self.row * _ROW_BYTES,
            since_s,
            head_s,
            observed,
            rest_s,
            len(self.prefills) + others.prefills,
            self.pending_tokens + others.prefill_tokens,
            len(self.decodes) + others.decodes,
            self.context_tokens + others.context_tokens,
            self.transfers_in + others.transfers_in,
            self.transfers_out + others.transfers_out,
            self.placements,
        )
