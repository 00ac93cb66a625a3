"""Room in tiers: configured capacity less what the index knows to be there."""

import numpy as np
from cluster_factory import BLOCK, hold, make_scheduler

from cache_index import Holder, Namespace, Tier
from conductor.actions import Place
from conductor.catalogue import LLAMA_8B_H100
from conductor.instance_speeds import InstanceSpeeds
from conductor.tier_room import TierRoom

CODEC = {"ratio": 4, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9}
BLOCK_BYTES = BLOCK * LLAMA_8B_H100.kv_bytes_per_token


def test_a_tier_that_encodes_has_room_for_more_raw_kv() -> None:
    speeds = InstanceSpeeds.model_validate({"tiers": {"host": {"bytes_per_s": 1e9, "codec": CODEC}}})
    scheduler = make_scheduler(instance_class=speeds.applied_to(LLAMA_8B_H100))
    room = TierRoom(scheduler.cluster, scheduler.index, {("p0", "host"): 5 * BLOCK_BYTES})
    place = Place(Holder("p0"), Tier.HOST)
    assert room.free_bytes(place) == 20 * BLOCK_BYTES
    hashes = np.arange(1, 9, dtype=np.uint64)
    scheduler.index.store(place.holder, Tier.HOST, Namespace("llama", BLOCK), hashes)
    assert room.free_bytes(place) == 12 * BLOCK_BYTES


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
