"""Room in tiers: configured capacity less what the index knows to be there."""

import numpy as np
from cluster_factory import BLOCK, hold, make_scheduler

from cache_index import Holder, Tier
from conductor.actions import Place
from conductor.catalogue import LLAMA_8B_H100
from conductor.tier_room import TierRoom

BLOCK_BYTES = BLOCK * LLAMA_8B_H100.kv_bytes_per_token


def test_room_is_what_is_left_of_a_configured_capacity() -> None:
    scheduler = make_scheduler()
    room = TierRoom(
        scheduler.cluster,
        scheduler.index,
        {("p0", "device"): 5 * BLOCK_BYTES, ("p1", "device"): 2 * BLOCK_BYTES, ("pool", "remote"): 1e12},
    )
    for name in ("p0", "p1"):
        hold(scheduler, name, np.arange(3 * BLOCK, dtype=np.uint32))
    assert room.free_bytes(Place(Holder("p0"), Tier.DEVICE)) == 2 * BLOCK_BYTES
    assert room.free_bytes(Place(Holder("p1"), Tier.DEVICE)) == 0  # it holds more than it was said to
    assert room.free_bytes(Place(Holder("pool"), Tier.REMOTE)) == 1e12
    assert room.free_bytes(Place(Holder("p0"), Tier.HOST)) is None
