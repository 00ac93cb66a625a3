"""Several changes in one call."""

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


@kernel(STATE, INTEGER, IN_U64, IN_U64, WORD, WORD, INTEGER, nogil=False)
def exchange(address, slot, lost, hashes, domain, parent, done):
    """`remove` the keys that a slot ``lost``, and then `store` what it got instead.

    ``done`` blocks of the two are applied already; returns how many are now, which is all or until room has to be
    made. Keeps the GIL: waiting for it afterwards would take longer than a few blocks.
    """
    before = lost.shape[0]
    if done < before:
        done = remove(address, slot, lost, ZERO, done)
        if done < before:
            return done
    return before + store(address, slot, hashes, hashes[:0], domain, parent, done - before)
