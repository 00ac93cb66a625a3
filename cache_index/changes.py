"""What several holders got and lost, as one table: for whoever follows many caches at once."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_index.hashing import Hashes


class Changes(msgspec.Struct, frozen=True, gc=False):
    """Rows in the order in which they came about: (owner, stored, start, stop, first).

    ``owner`` is a position among those that `CacheIndex.apply` is given. Where ``stored`` is 1, it got the blocks
    ``chains[start:stop]`` of a chain whose hashes begin at ``chains[first]``; where it is 0, it lost
    ``removed[start:stop]``.
    """

    rows: NDArray[np.int64]
    chains: Hashes
    removed: Hashes
