"""The words of a node, and places.

A node records its depth and 46 bits of its parent's mixed key. A *place* is such a name with its depth.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.holder_sets import contains
from cache_index.kernels.layout import (
    DEPTH_BITS,
    DEPTH_SHIFT,
    LINKS,
    NAME_SHIFT,
    NODE_BYTES,
    NODES,
    PAIR_BYTES,
    PARENT_SHIFT,
    PLACE_DEPTH_BITS,
    SET_ID_BITS,
    UNKNOWN_DEPTH,
)
from cache_index.kernels.machine_words import LOW_32, ZERO, load32, load64, save32, save64, u64
from cache_index.kernels.tables import GOLDEN, claim, find, home_address


@inlined
def set_of(entry):
    return np.int64(load64(entry + 8) & SET_ID_BITS)


@inlined
def write_set(entry, set_id):
    save64(entry + 8, (load64(entry + 8) & ~SET_ID_BITS) | u64(set_id))


@inlined
def depth_of(entry):
    return (load64(entry + 8) >> DEPTH_SHIFT) & DEPTH_BITS


@inlined
def name_of(key):
    return (key * GOLDEN) >> NAME_SHIFT


@inlined
def parent_of(entry):
    """Name of a node's parent, 0 for a root."""
    high = (u64(load32(entry + 16)) & LOW_32) >> u64(2)
    return (load64(entry + 8) >> PARENT_SHIFT) | (high << u64(16))


@inlined
def age_of(entry):
    return load32(entry + 16) & 3


@inlined
def write_age(entry, age):
    save32(entry + 16, (load32(entry + 16) & ~3) | age)


@inlined
def write_node(entry, set_id, depth, parent):
    save64(entry + 8, u64(set_id) | (depth << DEPTH_SHIFT) | (parent << PARENT_SHIFT))
    save32(entry + 16, np.int64((parent >> u64(16)) << u64(2)))


@inlined
def place_of(name, depth):
    return (name << NAME_SHIFT) | (depth & PLACE_DEPTH_BITS)


@inlined
def node_at(state, place):
    """Address of the node at a place, 0 when there is none."""
    address = home_address(state, NODES, (place >> NAME_SHIFT) << NAME_SHIFT, NODE_BYTES)
    while load64(address + 8) != ZERO:
        depth = depth_of(address)
        if depth != UNKNOWN_DEPTH and place_of(name_of(load64(address)), depth) == place:
            return address
        address += NODE_BYTES
    return np.int64(0)


@inlined
def link(state, engine_key, key):
    if key == ZERO:  # indistinguishable from an empty entry
        return
    entry = find(state, LINKS, engine_key, PAIR_BYTES)
    empty = load64(entry + 8) == ZERO
    save64(entry + 8, key)
    if empty:
        save64(entry, engine_key)
        claim(state, LINKS, entry, PAIR_BYTES)


@inlined
def has_place(state, place, slot):
    entry = node_at(state, place)
    return entry != 0 and contains(state, set_of(entry), slot)


@inlined
def entry_at(state, hashes, domain, position):
    return find(state, NODES, hashes[position] ^ domain, NODE_BYTES)


@inlined
def fits_at(entry, depth):
    """Whether the node is known to lie at ``depth``."""
    recorded = depth_of(entry)
    return recorded == u64(depth) and recorded != UNKNOWN_DEPTH
