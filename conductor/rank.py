"""One data-parallel rank: what was placed on it and has not ended, and what its engine reports."""

from __future__ import annotations

from typing import Final, cast

import msgspec

from cache_index import Holder
from conductor.costs import ClusterTables, Floats
from conductor.costs import rank_block as b
from conductor.costs import tables as t
from conductor.costs.rank_books import rank_kernels
from conductor.placement import Target

NO_ROW: Final = b.NO_ROW


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


class RankState:
    """One data-parallel rank: what was placed on it and has not ended, and what its engine reports.

    The former is a block of memory (`costs.rank_block`) that kernels keep (`costs.rank_books`); here it is read.
    """

    __slots__ = (
        "_block",
        "_kernels",
        "address",
        "elsewhere",
        "head",
        "holder",
        "reported",
        "row",
        "target",
    )

    def __init__(self, holder: Holder, target: Target) -> None:
        self.holder = holder
        self.target = target
        self.row = NO_ROW  # in the cluster's tables
        self.reported: ReportedLoad | None = None
        self.elsewhere: PlacedElsewhere | None = None
        self._kernels = rank_kernels()
        self._set_block(b.new_block())

    def _set_block(self, block: Floats) -> None:
        self._block = block
        # With which a block begins; from a memoryview single numbers are read fast.
        self.head = cast("memoryview[float]", block.data)
        self.address = int(block.ctypes.data)

    def grow(self) -> None:
        """To be called when a placement has used up the room."""
        self._set_block(b.grown(self._block))

    def take_row(self, tables: ClusterTables, row: int) -> None:
        """From now on the books are written into this row of the load table as well; NO_ROW: into none."""
        self.row = row
        words = self._block.view("int64")
        words[b.ROW], words[b.TABLES] = row, tables.address
        self._write()

    def place_elsewhere(self, others: PlacedElsewhere | None) -> None:
        """What others have placed, in place of what they told before."""
        self.elsewhere = others
        self.head[b.OTHERS_KNOWN] = others is not None
        if others is not None:
            for column, value in (
                (t.HEAD_SINCE_S, others.at_s),
                (t.HEAD_PREDICTED_S, others.queue_s),
                (t.PENDING_PREFILLS, others.prefills),
                (t.PENDING_TOKENS, others.prefill_tokens),
                (t.ACTIVE_DECODES, others.decodes),
                (t.CONTEXT_TOKENS, others.context_tokens),
                (t.TRANSFERS_IN, others.transfers_in),
                (t.TRANSFERS_OUT, others.transfers_out),
            ):
                self.head[b.OTHERS + column] = value
        self._write()

    def _write(self) -> None:
        self._kernels.move(self.address, 0, 0)

    # ---- what was placed here ----

    def queue_s(self, now_s: float) -> float:
        """Seconds until a prefill placed now would begin; what was placed elsewhere is left out.

        One whose end will be observed is still running when its predicted end has passed; another is taken to
        have ended as predicted, and those behind it to have gone on.
        """
        return self._kernels.queue_s(self.address, now_s)

    @property
    def pending_prefills(self) -> int:
        return int(self.head[t.PENDING_PREFILLS])

    @property
    def pending_tokens(self) -> int:
        """That they compute."""
        return int(self.head[t.PENDING_TOKENS])

    @property
    def active_decodes(self) -> int:
        """Those that wait for their prefill included."""
        return int(self.head[t.ACTIVE_DECODES])

    @property
    def context_tokens(self) -> int:
        """Prompts and answers as predicted, of the active decodes."""
        return int(self.head[t.CONTEXT_TOKENS])

    @property
    def transfers_in(self) -> int:
        return int(self.head[t.TRANSFERS_IN])

    @property
    def transfers_out(self) -> int:
        return int(self.head[t.TRANSFERS_OUT])

    @property
    def placements(self) -> int:
        """Ever made here."""
        return int(self.head[t.PLACEMENTS])

    def under_way(self) -> set[int]:
        """The tickets of all that has not ended here."""
        decodes, prefills = self._rows()
        return {int(each) for each in (*decodes[:, b.DECODE_TICKET], *prefills[:, b.PREFILL_TICKET])}

    def _rows(self) -> tuple[Floats, Floats]:
        """Decodes and prefills, the latter in order, by the columns of `rank_block`."""
        decodes, prefills = b.rows_of(self._block)
        return decodes[: self.active_decodes], prefills[: self.pending_prefills]

    def check(self, tables: ClusterTables) -> None:
        """Assert that sums and the row of the load table are those of what is placed here; for tests."""
        head, (decodes, prefills) = self.head, self._rows()
        assert len(set(decodes[:, b.DECODE_TICKET])) == len(decodes), "a decode is there twice"
        assert len(set(prefills[:, b.PREFILL_TICKET])) == len(prefills), "a prefill is there twice"
        assert self.context_tokens == decodes[:, b.DECODE_CONTEXT_TOKENS].sum(), "context tokens drifted"
        assert self.pending_tokens == prefills[:, b.PREFILL_TOKENS].sum(), "pending tokens drifted"
        pending_s = prefills[:, b.PREFILL_PREDICTED_S].sum()
        assert abs(head[b.PENDING_S] - pending_s) <= 1e-9 * (1.0 + pending_s), "pending seconds drifted"
        front = prefills[0] if len(prefills) else [0.0] * b.PREFILL_COLUMNS
        assert head[t.HEAD_PREDICTED_S] == front[b.PREFILL_PREDICTED_S], "the front of the queue is another"
        assert head[t.HEAD_OBSERVED] == front[b.PREFILL_OBSERVED], "the front of the queue is another"
        if self.row != NO_ROW:
            written = tables.loads[self.row].copy()
            self._write()
            assert (tables.loads[self.row] == written).all(), f"the row of {self.holder} is stale"
