"""How much may still be stored or removed before something must grow."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from cache_index.kernel_set import inlined
from cache_index.kernels.holder_sets import members_of
from cache_index.kernels.layout import (
    ANCHORS,
    BITS_POOL,
    COPIES,
    FANOUT,
    GAPS,
    LINKS,
    LIVE,
    MAX_BLOCKS,
    MOVING,
    MOVING_ROOM,
    NODES,
    POOL_CAPACITY,
    SET_POOL,
    SETS,
    SMALL_POOL,
    USED,
    WANTED,
)
from cache_index.kernels.tables import table_room


@inlined
def room(state):
    """Blocks that can surely be stored before something must grow."""
    least = min(table_room(state, NODES), table_room(state, LINKS))
    least = min(least, min(table_room(state, COPIES), state[MAX_BLOCKS] - state[NODES + USED]))
    return max(min(least, removal_room(state)), 0)


@inlined
def removal_room(state):
    """Blocks that can surely be removed before something must grow."""
    least = min(table_room(state, FANOUT), table_room(state, GAPS), table_room(state, ANCHORS)) // 3
    least = min(least, table_room(state, SETS))
    for pool in (SET_POOL, SMALL_POOL, BITS_POOL):
        least = min(least, state[pool + POOL_CAPACITY] - state[pool + LIVE] - 2)
    if state[MOVING] != 0:
        least = min(least, MOVING_ROOM)
    return max(least, 0)


@inlined
def has_room_to_rewrite(state, set_id):
    state[WANTED] = 0
    wanted = 4 * members_of(state, set_id) + 16
    if min(table_room(state, FANOUT), table_room(state, GAPS), table_room(state, ANCHORS)) >= wanted:
        return True
    state[WANTED] = wanted
    return False
