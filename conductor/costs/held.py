"""What is cached of a prompt, from the index's match to estimates: the compiled steps over [holder or rank, tier].

Levels are blocks in the tiers up to each, by rows of the index; held are usable tokens, by rank of a roster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from cache_index.kernel_cache import cache_directory, cached_njit
from cache_index.kernels import views
from cache_index.kernels.views import common_beginning
from conductor.costs import tables as t
from conductor.costs.instance_class import Ints
from conductor.costs.kernels import Tokens

Hashes = NDArray[np.uint64]

_DIRECTORY = cache_directory(Path(__file__), Path(t.__file__), Path(views.__file__))
_TIERS: Final = t.TIER_LATENCY_S - t.TIER_S_PER_BYTE
_TOKENS, _ROWS, _INT = types.int32[:, ::1], types.int64[::1], types.int64


def write_held(
    levels: Tokens, holder_ids: Ints, members: Ints, block_size: int, usable_tokens: int, held: Tokens
) -> None:
    """Matched blocks ``levels`` [holder, tier] as usable tokens, in the members' rows of ``held``, zero before."""
    for m in range(members.shape[0]):
        holder = holder_ids[m]
        if levels[holder, _TIERS - 1] > 0:  # tiers up to the slowest: all
            for tier in range(_TIERS):
                held[members[m], tier] = min(levels[holder, tier] * block_size, usable_tokens)


write_held = cached_njit(write_held, _DIRECTORY, nogil=False)
WRITE_HELD: Final = (_TOKENS, _ROWS, _ROWS, _INT, _INT, _TOKENS)


def raise_levels(levels: Tokens, expected: Tokens, rows: Ints, stride: int) -> None:
    """Raise row ``rows[m]`` of ``levels`` to ``stride`` times row ``m`` of ``expected`` where that is more."""
    for m in range(expected.shape[0]):
        if expected[m, 0] > 0:
            for tier in range(_TIERS):
                levels[rows[m], tier] = max(levels[rows[m], tier], expected[m, tier] * stride)


raise_levels = cached_njit(raise_levels, _DIRECTORY, nogil=False)


def raise_by_prompt(levels: Tokens, row: int, hashes: Hashes, other: Hashes, stride: int) -> None:
    """Raise row ``row`` of ``levels`` to what two prompts have in common, in multiples of ``stride`` blocks."""
    common = common_beginning(hashes, other, 0, stride)
    for tier in range(_TIERS):
        levels[row, tier] = max(levels[row, tier], common)


raise_by_prompt = cached_njit(raise_by_prompt, _DIRECTORY, nogil=False)
_HASHES = types.Array(types.uint64, 1, "A", readonly=True)
RAISE_BY_PROMPT: Final = (_TOKENS, _INT, _HASHES, _HASHES, _INT)


def raise_by_pool(levels: Tokens, reach: Tokens, row: int) -> None:
    """Raise ``levels`` to all that its row ``row`` has, in rows and tiers where ``reach`` is 1."""
    if row >= levels.shape[0]:
        return
    held = levels[row, _TIERS - 1]
    if held > 0:
        for i in range(min(reach.shape[0], levels.shape[0])):
            for tier in range(_TIERS):
                if reach[i, tier] == 1 and levels[i, tier] < held:
                    levels[i, tier] = held


raise_by_pool = cached_njit(raise_by_pool, _DIRECTORY, nogil=False)
RAISE_BY_POOL: Final = (_TOKENS, _TOKENS, _INT)
