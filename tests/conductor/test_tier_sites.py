"""Where the planner of `conductor serve` may have blocks put: configured capacities in tokens."""

from __future__ import annotations

from cluster_factory import make_scheduler

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.tier_sites import TierSites
from conductor.config import Config
from conductor.instance_speeds import InstanceSpeeds

CODEC = {"ratio": 4, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9}


def test_a_tier_that_encodes_has_room_for_more_tokens() -> None:
    speeds = InstanceSpeeds.model_validate({"tiers": {"remote": {"bytes_per_s": 1e9, "codec": CODEC}}})
    scheduler = make_scheduler("m", instance_class=speeds.applied_to(LLAMA_8B_H100))
    size = 1_000 * LLAMA_8B_H100.kv_bytes_per_token
    config = Config.model_validate(
        {
            "shared_pools": [{"id": "store", "tier": "remote"}],
            "tiers": {
                "capacities": [
                    {"instance": "m0", "tier": "host", "bytes": size},
                    {"instance": "store", "tier": "remote", "bytes": size},
                ]
            },
        }
    )
    feeds = EventFeeds(scheduler.index, lambda: 0.0)
    sites = TierSites(config, scheduler.cluster, feeds, ()).now()
    feeds.close()
    assert {site.place.tier: site.capacity_tokens for site in sites} == {Tier.HOST: 1_000, Tier.REMOTE: 4_000}
