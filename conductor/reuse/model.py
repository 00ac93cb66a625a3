"""When cached blocks are used again, learned online from the requests that came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from conductor.reuse import kernels
from conductor.reuse.kernels.layout import (
    AGE_BINS,
    AGE_EDGES_S,
    C_BLOCKS,
    C_NEXT_ACCESS,
    C_NEXT_RECORD,
    C_OLDEST_ACCESS,
    C_OLDEST_RECORD,
    CELLS,
    LEVELS,
    R_COLUMNS,
    Floats,
    Ints,
    Words,
    empty_history,
    empty_learned,
)

HORIZON_S: Final = float(AGE_EDGES_S[-1])  # what was not used for so long is taken to be never used again

LAYOUT: Final = [AGE_BINS, CELLS, LEVELS, R_COLUMNS]  # of what is exported
_RECORDS: Final = ("records", "record_s")
_ACCESSES: Final = ("access_hash", "access_record", "access_uses")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Visit:
    """What a request was when it came.

    ``turn`` counts from 1, ``known_blocks`` is the length of the prefix that some request had before, wherever
    it is cached, and ``gap_s`` the time since the end of that prefix was used last, inf where nothing was known.
    """

    turn: int
    known_blocks: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class ReturnForecast:
    """When the next turn of a conversation comes: its chance within the horizon, and quantiles, given that it does.

    ``quantiles_s`` are seconds from now, in the order in which they were asked for.
    """

    probability: float
    quantiles_s: tuple[float, ...]


class ReuseModel:
    """Ages at which blocks are used again, by what their last use was like; see `docs/tiers.md`.

    Blocks of ``block_tokens`` are named by their sequence hashes, which must differ between namespaces.
    ``accesses`` is how many uses of blocks are remembered, whether the blocks are cached or not, rounded up to a
    power of two; each takes about 65 bytes. After ``window`` blocks, half of what a cell of statistics has
    learned is forgotten. Nothing is random: the same calls give the same answers.
    """

    __slots__ = ("_block_tokens", "_history", "_latest_s", "_learned", "_refresh_s", "_window")

    def __init__(
        self, block_tokens: int, *, accesses: int = 1 << 20, window: int = 20_000, refresh_s: float = 5.0
    ) -> None:
        """``refresh_s`` is how old values may be; raises ValueError for numbers that are not positive."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        if accesses < 128:
            raise ValueError(f"accesses must be at least 128, not {accesses}")
        if window < 2:
            raise ValueError(f"window must be at least 2 blocks, not {window}")
        if not refresh_s >= 0.0:
            raise ValueError(f"refresh_s must not be negative, not {refresh_s}")
        self._block_tokens = block_tokens
        self._window = float(window)
        self._refresh_s = refresh_s
        self._latest_s = -inf
        self._history = empty_history(accesses)
        self._learned = empty_learned()

    @property
    def known_blocks(self) -> int:
        """Blocks whose last use is remembered."""
        return int(self._history.counters[C_BLOCKS])

    def exported(self) -> tuple[dict[str, Any], Arrays]:
        """What `restored` makes an equal model of, as it is now: facts for JSON, and copies of arrays."""
        history, learned = self._history, self._learned
        counters = history.counters
        records = np.arange(counters[C_OLDEST_RECORD], counters[C_NEXT_RECORD])
        accesses = np.arange(counters[C_OLDEST_ACCESS], counters[C_NEXT_ACCESS])
        (cells,) = np.nonzero(learned.chances.any(axis=1))
        facts = {
            "layout": LAYOUT,
            "block_tokens": self._block_tokens,
            "accesses": len(history.access_hash),
            "window": int(self._window),
            "latest_s": self._latest_s if isfinite(self._latest_s) else None,
        }
        return facts, {
            "counters": counters.copy(),
            "passed": history.passed.copy(),
            **{name: _in_ring(getattr(history, name), records) for name in _RECORDS},
            **{name: _in_ring(getattr(history, name), accesses) for name in _ACCESSES},
            "cells": cells,
            "reuses": learned.reuses[cells],
            "chances": learned.chances[cells],
        }

    @classmethod
    def restored(cls, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], later_s: float) -> Self:
        """A model as it was exported, all times ``later_s`` later.

        Raises ValueError, LookupError or TypeError for what is no such export.
        """
        if facts["layout"] != LAYOUT:
            raise ValueError(f"arrays are laid out as {facts['layout']}, not as {LAYOUT}")
        model = cls(facts["block_tokens"], accesses=facts["accesses"], window=facts["window"])
        if facts["latest_s"] is not None:
            model._latest_s = facts["latest_s"] + later_s
        history, learned = model._history, model._learned
        history.counters[:], history.passed[:] = arrays["counters"], arrays["passed"]
        counters = history.counters
        records = np.arange(counters[C_OLDEST_RECORD], counters[C_NEXT_RECORD])
        accesses = np.arange(counters[C_OLDEST_ACCESS], counters[C_NEXT_ACCESS])
        for names, numbers in ((_RECORDS, records), (_ACCESSES, accesses)):
            for name in names:
                ring = getattr(history, name)
                if len(numbers) > len(ring):
                    raise ValueError(f"{len(numbers)} {name} for a ring of {len(ring)}")
                ring[numbers & (len(ring) - 1)] = arrays[name]
        history.record_s[records & (len(history.record_s) - 1)] += later_s
        cells = arrays["cells"]
        learned.reuses[cells], learned.chances[cells] = arrays["reuses"], arrays["chances"]
        blocks = kernels.enter_all(history)
        if blocks != model.known_blocks:
            raise ValueError(f"{blocks} blocks instead of {model.known_blocks}")
        return model

    def observe(self, hashes: Words, now_s: float, kind: int = 0) -> Visit:
        """A request whose prompt consists of these blocks has come.

        A time before the latest one counts as that. ``kind`` is a number from 0 to 2^31 - 1 for requests that are
        alike beyond what their prompts say: of a route, say, or of a tenant.
        """
        if not 0 <= kind < 1 << 31:
            raise ValueError(f"kind must be from 0 to 2^31 - 1, not {kind}")
        if not isfinite(now_s):
            raise ValueError(f"now_s must be finite, not {now_s}")
        self._latest_s = max(self._latest_s, now_s)
        turn, known, gap_s = kernels.observe(
            self._history, self._learned, hashes, self._block_tokens, kind, self._latest_s, self._window
        )
        return Visit(turn, known, gap_s)

    def observe_all(self, hashes: Words, stops: Ints, times_s: Floats, kinds: Ints) -> None:
        """Several requests have come, in this order: as `observe` of each, but by far less work.

        ``hashes`` are those of all prompts, one behind the other; ``stops`` are where each ends.
        """
        if not len(stops):
            return
        if kinds.min() < 0 or kinds.max() >= 1 << 31:
            raise ValueError(f"kinds must be from 0 to 2^31 - 1, not {kinds.min()} to {kinds.max()}")
        if not np.isfinite(times_s).all():
            raise ValueError("times must be finite")
        times_s = np.maximum.accumulate(np.maximum(times_s, self._latest_s))
        self._latest_s = float(times_s[-1])
        kernels.observe_all(
            *(self._history, self._learned, hashes, stops, self._block_tokens, kinds, times_s, self._window)
        )

    def reuse_probabilities(self, hashes: Words, before_s: float, now_s: float) -> Floats:
        """The chance of each block to be used between ``now_s`` and ``before_s``, 0 for unknown blocks."""
        probabilities = np.empty(len(hashes))
        kernels.reuse_probabilities(self._history, self._learned, hashes, now_s, before_s, probabilities)
        return probabilities

    def retention_values(self, hashes: Words, now_s: float) -> Floats:
        """Hits per second that each block is kept, when it is kept as long as is best; 0 for unknown blocks.

        What ranks lowest goes first, in any tier. Times the seconds that a hit in a tier saves it is what a
        block's room there is worth.
        """
        values = np.empty(len(hashes))
        kernels.retention_values(self._history, self._learned, hashes, now_s, self._refresh_s, values)
        return values

    def expected_return(
        self, prompt: Words, now_s: float, quantiles: Sequence[float] = (0.1, 0.5, 0.9)
    ) -> ReturnForecast | None:
        """When a conversation goes on whose last prompt so far consists of these blocks.

        None where that prompt is not remembered whole, or went on already.
        """
        for quantile in quantiles:
            if not 0.0 < quantile < 1.0:
                raise ValueError(f"a quantile must be between 0 and 1, not {quantile}")
        within = np.empty(len(AGE_EDGES_S))
        used_s = kernels.return_probabilities(
            self._history, self._learned, prompt, now_s, AGE_EDGES_S, within
        )
        if isnan(used_s):
            return None
        total = float(within[-1])
        wanted = total * np.array(quantiles, np.float64)
        return ReturnForecast(total, tuple(np.interp(wanted, within, AGE_EDGES_S).tolist()))


def _in_ring(ring: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
    """A copy of what has these numbers."""
    found: NDArray[Any] = ring[numbers & (len(ring) - 1)]
    return found
