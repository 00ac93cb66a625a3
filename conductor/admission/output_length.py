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
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from conductor.costs import Floats
from conductor.placement import PlacementRequest

# (model), (model, route), (model, route, tenant) or (model, route, tenant, prefix key)
_Key: TypeAlias = tuple[str | int, ...]

# Bins: one for each length up to 8 tokens, then four an octave up to 2^17 tokens.
_BINS_PER_OCTAVE: Final = 4
_LAST_TOKEN: Final[list[int]] = [*range(1, 9)] + [
    round(8 * 2 ** (i / _BINS_PER_OCTAVE)) for i in range(1, 14 * _BINS_PER_OCTAVE + 1)
]
_FIRST_TOKEN: Final[list[int]] = [1] + [last + 1 for last in _LAST_TOKEN[:-1]]
_BINS: Final = len(_LAST_TOKEN)
_MIDDLE: Final[Floats] = (np.array(_FIRST_TOKEN) + np.array(_LAST_TOKEN)) / 2

# What an answer is taken to be when nothing was seen yet: geometric lengths of this mean.
ASSUMED_TOKENS: Final = 256
_ASSUMED: Final[Floats] = np.exp(-(np.array(_FIRST_TOKEN) - 1) / ASSUMED_TOKENS) - np.exp(
    -np.array([*_LAST_TOKEN[:-1], math.inf]) / ASSUMED_TOKENS
)

# Answers of its own after which a kind weighs as much as its parent.
_PRIOR_ANSWERS: Final = 2.0
# An answer counts as at most four times (two octaves) the 99th percentile so far: a runaway generation moves
# the mean by a bounded step, while lengths that do recur are followed within a few answers.
_OUTLIER_BINS: Final = 2 * _BINS_PER_OCTAVE


@dataclass(frozen=True, slots=True)
class OutputPrediction:
    """How long an answer should get, within the request's ``max_output_tokens``.

    ``observations`` counts the answers of the most specific kind that has had any; 0 when nothing is known.
    """

    mean_tokens: float
    p90_tokens: float
    observations: int


class OutputLengths:
    """Answer lengths by model, route, tenant and beginning of the prompt.

    ``window`` is the number of answers after which an older one has faded to 1/e; ``max_keys`` bounds the kinds
    that are remembered, 256 bytes each, the least recently observed forgotten first. Both operations take
    constant time, some microseconds.
    """

    __slots__ = ("_counts", "_free", "_keep", "_mass", "_seen", "_slots", "max_keys", "window")

    def __init__(self, *, window: int = 256, max_keys: int = 65_536) -> None:
        """Raises ValueError when a bound is too small to learn anything."""
        if window < 2:
            raise ValueError(f"window must be at least 2 answers, not {window}")
        if max_keys < 4:
            raise ValueError(f"max_keys must be at least 4, one a level of detail, not {max_keys}")
        self.window = window
        self.max_keys = max_keys
        self._keep = math.exp(-1.0 / window)
        self._slots: OrderedDict[_Key, int] = OrderedDict()  # least recently observed first
        self._free = max_keys  # slots never used yet are below it
        self._counts = np.zeros((max_keys, _BINS), np.float32)
        self._mass = [0.0] * max_keys  # sums of the rows
        self._seen = [0] * max_keys

    def __len__(self) -> int:
        """Kinds remembered."""
        return len(self._slots)

    def predict(self, request: PlacementRequest, prefix_key: int | None = None) -> OutputPrediction:
        """What is to be expected of this request; ``prefix_key`` stands for the first blocks of its prompt."""
        shares, observations = self._distribution(_keys(request, prefix_key))
        limit = request.max_output_tokens
        if limit is None:
            return OutputPrediction(float(shares @ _MIDDLE), _quantile(shares, 0.9), observations)
        mean_tokens = float(shares @ np.minimum(_MIDDLE, limit))
        return OutputPrediction(mean_tokens, min(_quantile(shares, 0.9), float(limit)), observations)

    def observe(self, request: PlacementRequest, prefix_key: int | None, output_tokens: int) -> None:
        """Learn from an answer that came to its end; one that was broken off says nothing about its length.

        An answer cut at ``max_output_tokens`` only tells that it would have been at least that long: it is
        counted among the longer ones as those are distributed so far.
        """
        keys = _keys(request, prefix_key)
        shares, _ = self._distribution(keys)
        limit = request.max_output_tokens
        longest = int(shares.cumsum().searchsorted(0.99)) + _OUTLIER_BINS
        place = min(_bin(output_tokens), longest, _BINS - 1)
        beyond = None
        if limit is not None and output_tokens >= limit:
            beyond = shares.copy()
            beyond[:place] = 0.0
            beyond /= max(float(beyond.sum()), 1e-300)
        # Finest first: the coarse kinds, which all requests share, end up as the most recent.
        slots = [self._slot(key) for key in reversed(keys)]
        counts = self._counts
        counts[slots] *= self._keep
        if beyond is None:
            counts[slots, place] += 1.0
        else:
            counts[slots] += beyond
        for slot in slots:
            self._mass[slot] = self._mass[slot] * self._keep + 1.0
            self._seen[slot] += 1

    def _distribution(self, keys: list[_Key]) -> tuple[Floats, int]:
        """Share of every bin, and the answers seen of the finest kind known; ``keys`` from coarse to fine."""
        slots: list[int] = []
        weights: list[float] = []
        assumed, observations = 1.0, 0
        for key in keys:
            slot = self._slots.get(key)
            if slot is None:
                break  # what is finer was observed together with this one, or evicted before it
            total = self._mass[slot] + _PRIOR_ANSWERS
            parent = _PRIOR_ANSWERS / total
            assumed *= parent
            weights = [weight * parent for weight in weights]
            weights.append(1.0 / total)
            slots.append(slot)
            observations = self._seen[slot]
        if not slots:
            return _ASSUMED, 0
        shares: Floats = assumed * _ASSUMED
        shares += np.array(weights) @ self._counts[slots]
        return shares, observations

    def _slot(self, key: _Key) -> int:
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
            return slot
        if self._free:
            self._free -= 1
            slot = self._free
        else:
            _, slot = self._slots.popitem(last=False)
            self._counts[slot] = 0.0
            self._mass[slot], self._seen[slot] = 0.0, 0
        self._slots[key] = slot
        return slot

    def _saved(self) -> list[list[Any]]:
        """[key, answers seen, first filled bin, counts up to the last filled one] of every kind, oldest first."""
        entries: list[list[Any]] = []
        for key, slot in self._slots.items():
            filled = np.flatnonzero(self._counts[slot])
            first, last = int(filled[0]), int(filled[-1])
            counts = [float(f"{count:.4g}") for count in self._counts[slot, first : last + 1]]
            entries.append([list(key), self._seen[slot], first, counts])
        return entries

    def _restore(self, key: _Key, seen: int, first: int, counts: Floats) -> None:
        slot = self._slot(key)
        self._counts[slot] = 0.0
        self._counts[slot, first : first + len(counts)] = counts
        self._mass[slot], self._seen[slot] = float(counts.sum()), seen


def dump_output_lengths(lengths: OutputLengths) -> bytes:
    """What was learned, for `load_output_lengths`."""
    return json.dumps({"bins": _BINS, "kinds": lengths._saved()}, separators=(",", ":")).encode()


def load_output_lengths(saved: bytes, *, window: int = 256, max_keys: int = 65_536) -> OutputLengths:
    """Raises ValueError when ``saved`` was not written by `dump_output_lengths`.

    Of more kinds than ``max_keys``, the most recently observed are kept.
    """
    lengths = OutputLengths(window=window, max_keys=max_keys)
    try:
        content = json.loads(saved)
        if content["bins"] != _BINS:
            raise ValueError(f"histograms of {content['bins']} bins, not {_BINS}")
        for key, seen, first, counts in content["kinds"]:
            lengths._restore(*_checked(key, seen, first, counts))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not saved output lengths: {error!r}") from None
    return lengths


def _checked(key: Any, seen: Any, first: Any, counts: Any) -> tuple[_Key, int, int, Floats]:
    """One saved kind, if it can have been learned; raises ValueError or TypeError otherwise."""
    *names, last = key
    if not 1 <= len(key) <= 4 or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the kind {key!r} is no model, route, tenant and prefix")
    if not isinstance(last, int if len(key) == 4 else str):
        raise ValueError(f"the kind {key!r} ends in the wrong type")
    histogram = np.array(counts, np.float64)
    if histogram.ndim != 1 or not 0 <= int(first) <= int(first) + len(histogram) <= _BINS:
        raise ValueError(f"the histogram of {key!r} is out of bounds")
    if not (np.isfinite(histogram).all() and (histogram >= 0).all() and histogram.any()):
        raise ValueError(f"the histogram of {key!r} holds what is no count")
    if int(seen) < 1:
        raise ValueError(f"the kind {key!r} has {seen} answers")
    return tuple(key), int(seen), int(first), histogram


def _keys(request: PlacementRequest, prefix_key: int | None) -> list[_Key]:
    model, route, tenant = request.model, request.route, request.tenant
    keys: list[_Key] = [(model,), (model, route), (model, route, tenant)]
    if prefix_key is not None:
        keys.append((model, route, tenant, prefix_key))
    return keys


def _bin(tokens: int) -> int:
    return min(bisect_left(_LAST_TOKEN, tokens), _BINS - 1)


def _quantile(shares: Floats, quantile: float) -> float:
    """The length that a share ``quantile`` of answers stays below, interpolated within its bin."""
    below = shares.cumsum()
    place = min(int(below.searchsorted(quantile)), _BINS - 1)
    share = float(shares[place])
    into = (quantile - float(below[place]) + share) / share if share > 0 else 1.0
    low = _FIRST_TOKEN[place] - 1
    return low + min(into, 1.0) * (_LAST_TOKEN[place] - low)
