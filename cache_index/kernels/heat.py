"""Where recent matches ended: for the eviction, and for those who ask what is used most."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.layout import HEAT, HEAT_HALVING, HEAT_ROW_BITS, HEAT_WAYS, MATCHES, MAX_AGE
from cache_index.kernels.machine_words import ONE, ZERO, load64, save64, u64
from cache_index.kernels.nodes import write_age
from cache_index.kernels.tables import GOLDEN


@inlined
def warm_up(state, entry):
    """Count a match that ended at the node: for the eviction and for hot_prefixes."""
    write_age(entry, MAX_AGE)
    key = load64(entry)
    row = state[HEAT] + np.int64((key * GOLDEN) >> u64(64 - HEAT_ROW_BITS)) * (16 * HEAT_WAYS)
    least = row
    for way in range(HEAT_WAYS):
        address = row + 16 * way
        if load64(address) == key:
            save64(address + 8, load64(address + 8) + ONE)
            return
        if load64(address + 8) < load64(least + 8):
            least = address
    count = load64(least + 8)
    if count > ZERO:  # a rare key wears an established one down before it takes the place
        save64(least + 8, count - ONE)
    else:
        save64(least, key)
        save64(least + 8, ONE)


@inlined
def cool_down(state):
    state[MATCHES] += 1
    if state[MATCHES] >= HEAT_HALVING:
        state[MATCHES] = 0
        for i in range(HEAT_WAYS << HEAT_ROW_BITS):
            address = state[HEAT] + 16 * i + 8
            save64(address, load64(address) >> ONE)
