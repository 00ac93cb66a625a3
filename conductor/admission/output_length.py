"""How long answers get, learned online: what decode forecasts and KV reservations rest on.

Every kind of request has a histogram of answer lengths, whose older answers fade. Kinds nest: a model, its
routes, the tenants of a route, and the prompts of a tenant that begin alike. A prediction mixes the histograms
from coarse to fine, each as much as it has seen (a Dirichlet prior whose mean is the next coarser prediction),
so a kind that is new is predicted like its parent, and one that is well known by itself. Predicting from the
distribution of past lengths follows Past-Future (arXiv 2507.10150); a distribution, and not only a mean, also
makes ``max_output_tokens`` exact: the mean is that of min(length, limit).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numba import types

from cache_index.kernel_set import compiled
from conductor.admission import length_kernel as k
from conductor.costs import Floats
from conductor.placement import PlacementRequest

# (model,), (model, route), (model, route, tenant) or (model, route, tenant, prefix key)
Kind: TypeAlias = tuple[str | int, ...]

_KINDS_A_PIECE: Final = 64
_TABLES: Final = (types.int64, types.int64)  # their addresses
_PREDICT: Final = (*_TABLES, *(4 * [types.int64]), types.float64)
_OBSERVE: Final = (*_TABLES, *(5 * [types.int64]), types.boolean, types.float64)


class OutputPrediction(msgspec.Struct, frozen=True, gc=False):
    """How long an answer should get, within the request's ``max_output_tokens``.

    ``observations`` counts the answers of the most specific kind that has had any; 0 when nothing is known.
    """

    mean_tokens: float
    p90_tokens: float
    observations: int


class _Latest(msgspec.Struct, frozen=True, gc=False):
    """A tenant of a route of a model, and the rows of the model, the route and the tenant."""

    kind: Kind
    rows: tuple[int, int, int]


class OutputLengths:
    """Answer lengths by model, route, tenant and beginning of the prompt.

    ``window`` is the number of answers after which an older one has faded to 1/e; ``max_keys`` bounds the kinds
    that are remembered, 272 bytes each, the least recently observed forgotten first. Both operations take
    constant time, some microseconds.
    """

    __slots__ = (
        "_counts",
        "_counts_address",
        "_free",
        "_keep",
        "_latest",
        "_observe",
        "_predict",
        "_rows",
        "_totals",
        "_totals_address",
        "max_keys",
        "window",
    )

    def __init__(self, *, window: int = 256, max_keys: int = 65_536) -> None:
        """Raises ValueError when a bound is too small to learn anything."""
        if window < 2:
            raise ValueError(f"window must be at least 2 answers, not {window}")
        if max_keys < 4:
            raise ValueError(f"max_keys must be at least 4, one a level of detail, not {max_keys}")
        self.window = window
        self.max_keys = max_keys
        self._keep = math.exp(-1.0 / window)
        self._rows: OrderedDict[Kind, int] = OrderedDict()  # least recently observed first, after `_settle`
        self._latest: _Latest | None = None  # observed last
        self._free = max_keys  # rows never used yet are below it
        self._counts = np.zeros((max_keys, k.BINS), np.float32)
        self._totals = np.zeros((max_keys, k.TOTAL_COLUMNS))
        self._counts_address = int(self._counts.ctypes.data)
        self._totals_address = int(self._totals.ctypes.data)
        self._predict = compiled(k.predict, *_PREDICT)
        self._observe = compiled(k.observe, *_OBSERVE)

    def __len__(self) -> int:
        """Kinds remembered."""
        return len(self._rows)

    def kind(self, request: PlacementRequest, prefix_key: int | None) -> Kind:
        """The most specific kind of this request that its prediction depends on, beside its limit."""
        model, route, tenant = request.model, request.route, request.tenant
        if prefix_key is not None:
            kind = (model, route, tenant, prefix_key)
            if kind in self._rows:
                return kind
        return (model, route, tenant)

    def predict(self, request: PlacementRequest, prefix_key: int | None = None) -> OutputPrediction:
        """What is to be expected of this request; ``prefix_key`` stands for the first blocks of its prompt."""
        row, limit = self._rows.get, request.max_output_tokens
        model, route, tenant = request.model, request.route, request.tenant
        mean_tokens, p90_tokens, seen = self._predict(
            self._counts_address,
            self._totals_address,
            row((model,), -1),
            row((model, route), -1),
            row((model, route, tenant), -1),
            -1 if prefix_key is None else row((model, route, tenant, prefix_key), -1),
            math.inf if limit is None else float(limit),
        )
        return OutputPrediction(mean_tokens, p90_tokens, int(seen))

    def observe(self, request: PlacementRequest, prefix_key: int | None, output_tokens: int) -> None:
        """Learn from an answer that came to its end; one that was broken off says nothing about its length.

        An answer cut at ``max_output_tokens`` only tells that it would have been at least that long: it is
        counted among the longer ones as those are distributed so far.
        """
        model, route, tenant, latest = request.model, request.route, request.tenant, self._latest
        kind = (model, route, tenant)
        if latest is None or latest.kind != kind:
            self._settle()
            # Not to be forgotten for a finer kind of the same answer.
            for key in ((model,), (model, route), kind):
                if key in self._rows:
                    self._rows.move_to_end(key)
            self._latest = latest = None
        # Finest first: the coarse kinds, which all requests share, end up as the most recent.
        prefix_row = -1 if prefix_key is None else self._row((model, route, tenant, prefix_key))
        if latest is None:
            tenant_row, route_row = self._row(kind), self._row((model, route))
            latest = self._latest = _Latest(kind, (self._row((model,)), route_row, tenant_row))
        limit = request.max_output_tokens
        model_row, route_row, tenant_row = latest.rows
        self._observe(
            self._counts_address,
            self._totals_address,
            model_row,
            route_row,
            tenant_row,
            prefix_row,
            bisect_left(k.LAST_TOKEN, output_tokens),
            limit is not None and output_tokens >= limit,
            self._keep,
        )

    def _settle(self) -> None:
        """Move the coarse kinds observed last behind the prompts observed with them: not done for each of those."""
        latest = self._latest
        if latest is not None:
            for length in (3, 2, 1):
                self._rows.move_to_end(latest.kind[:length])

    def _row(self, key: Kind) -> int:
        """Of a kind that is being observed; empty if it is new."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
            return row
        if self._free:
            self._free -= 1
            row = self._free
        else:
            row = self._forget_oldest()
        self._rows[key] = row
        return row

    def _forget_oldest(self) -> int:
        """The row that is free then, empty; the coarse kinds observed last are younger than where they stand."""
        key, row = self._rows.popitem(last=False)
        while self._latest is not None and key == self._latest.kind[: len(key)]:
            self._rows[key] = row
            key, row = self._rows.popitem(last=False)
        self._counts[row] = 0.0
        self._totals[row] = 0.0
        return row

    def _kinds(self) -> list[Kind]:
        """Oldest first."""
        self._settle()
        return list(self._rows)

    def _saved(self, kinds: list[Kind]) -> list[list[Any]]:
        """[key, answers seen, first filled bin, counts up to the last filled one] of each that is remembered."""
        entries: list[list[Any]] = []
        for key in kinds:
            row = self._rows.get(key)
            if row is None:
                continue
            filled = np.flatnonzero(self._counts[row])
            first, last = int(filled[0]), int(filled[-1])
            counts = [float(f"{count:.4g}") for count in self._counts[row, first : last + 1]]
            entries.append([list(key), int(self._totals[row, k.SEEN]), first, counts])
        return entries

    def _restore(self, key: Kind, seen: int, first: int, counts: Floats) -> None:
        row = self._row(key)
        self._counts[row] = 0.0
        self._counts[row, first : first + len(counts)] = counts
        self._totals[row, k.MASS], self._totals[row, k.SEEN] = counts.sum(), seen


def pieces_of_output_lengths(lengths: OutputLengths) -> Iterator[bytes]:
    """`dump_output_lengths` in pieces, between which answers may be observed: there may be many kinds."""
    yield b'{"bins":%d,"kinds":[' % k.BINS
    kinds, separator = lengths._kinds(), b""
    for first in range(0, len(kinds), _KINDS_A_PIECE):
        entries = lengths._saved(kinds[first : first + _KINDS_A_PIECE])
        if entries:
            yield separator + msgspec.json.encode(entries)[1:-1]
            separator = b","
    yield b"]}"


def dump_output_lengths(lengths: OutputLengths) -> bytes:
    """What was learned, for `load_output_lengths`."""
    return b"".join(pieces_of_output_lengths(lengths))


def load_output_lengths(saved: bytes, *, window: int = 256, max_keys: int = 65_536) -> OutputLengths:
    """Raises ValueError when ``saved`` was not written by `dump_output_lengths`.

    Of more kinds than ``max_keys``, the most recently observed are kept.
    """
    lengths = OutputLengths(window=window, max_keys=max_keys)
    try:
        content = json.loads(saved)
        if content["bins"] != k.BINS:
            raise ValueError(f"histograms of {content['bins']} bins, not {k.BINS}")
        for key, seen, first, counts in content["kinds"]:
            lengths._restore(*_checked(key, seen, first, counts))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not saved output lengths: {error!r}") from None
    return lengths


def _checked(key: Any, seen: Any, first: Any, counts: Any) -> tuple[Kind, int, int, Floats]:
    """One saved kind, if it can have been learned; raises ValueError or TypeError otherwise."""
    *names, last = key
    if not 1 <= len(key) <= 4 or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the kind {key!r} is no model, route, tenant and prefix")
    if not isinstance(last, int if len(key) == 4 else str):
        raise ValueError(f"the kind {key!r} ends in the wrong type")
    histogram = np.array(counts, np.float64)
    if histogram.ndim != 1 or not 0 <= int(first) <= int(first) + len(histogram) <= k.BINS:
        raise ValueError(f"the histogram of {key!r} is out of bounds")
    if not (np.isfinite(histogram).all() and (histogram >= 0).all() and histogram.any()):
        raise ValueError(f"the histogram of {key!r} holds what is no count")
    if int(seen) < 1:
        raise ValueError(f"the kind {key!r} has {seen} answers")
    return tuple(key), int(seen), int(first), histogram
