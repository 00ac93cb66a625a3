"""Many changes of one namespace in one call."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from cache_index.kernels.compilation import IN_I64, IN_ROWS, IN_U64, INTEGER, STATE, WORD, kernel
from cache_index.kernels.machine_words import ZERO
from cache_index.kernels.residencies import remove, store


@kernel(STATE, IN_I64, IN_ROWS, IN_U64, IN_U64, WORD, INTEGER, INTEGER)
def apply(address, slots, rows, chains, removed, domain, row, done):
    """Apply the rows of a `Changes` from one on, of which ``done`` blocks are applied already.

    ``slots`` are those of the owners. Returns the row and the blocks of it reached, which is the end or
    where room has to be made first, and how many blocks were applied.
    """
    applied = 0
    while row < rows.shape[0]:
        slot, start, stop = slots[rows[row, 0]], rows[row, 2], rows[row, 3]
        before = done
        if rows[row, 1] != 0:
            parent = chains[start - 1] if start > rows[row, 4] else ZERO
            done = store(address, slot, chains[start:stop], chains[:0], domain, parent, done)
        else:
            done = remove(address, slot, removed[start:stop], domain, done)
        applied += done - before
        if done < stop - start:
            break
        row, done = row + 1, 0
    return row, done, applied
