"""Where the tier planner of `conductor serve` may have blocks put, as instances and LMCache servers come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from cache_index import Holder, Tier
from cache_index.lmcache_directory import is_lmcache, server_holder
from cache_index.lmcache_keys import CHUNK_TOKENS
from conductor.actions import Place
from conductor.cli.event_feeds import EventFeeds
from conductor.cluster import Cluster
from conductor.config import Config
from conductor.instance_config import InstanceConfig
from conductor.tier_planner import Site

_log = structlog.get_logger(__name__)


class TierSites:
    """Places whose capacity is configured, and the host tiers of the embedded cluster.

    An LMCache server and the stores behind it are sites of the engines that load from it.
    """

    def __init__(
        self, config: Config, cluster: Cluster, feeds: EventFeeds, embedded: Sequence[InstanceConfig]
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._feeds = feeds
        self._embedded = embedded
        self._unsized: set[str] = set()  # servers that were warned of
        self._known: tuple[tuple[int, int], list[Site]] = ((-1, -1), [])

    def now(self) -> list[Site]:
        """Those of which an instance is known; the same list until instances or servers change."""
        state = (self._cluster.version, self._feeds.lmcache.version)
        if self._known[0] != state:
            self._known = state, [*self._configured(), *self._of_embedded()]
        return self._known[1]

    def _configured(self) -> list[Site]:
        pools = {pool.id: pool for pool in self._config.shared_pools}
        users = self._users()
        sites = []
        for each in self._config.tiers.capacities:
            if each.tier == "device":
                continue
            holder = Holder(each.instance)
            members: frozenset[str] | None = frozenset({each.instance})
            pool = pools.get(each.instance)
            if pool is not None:
                members = None if pool.members is None else frozenset(pool.members)
            elif is_lmcache(holder):
                members = frozenset(users.get(holder, ()))
            owner = next((i for i in self._cluster if members is None or i.instance_id in members), None)
            if owner is not None:
                place = Place(holder, Tier[each.tier.upper()])
                tokens = int(each.bytes / owner.instance_class.stored_bytes_per_token(place.tier))
                chunk_tokens = CHUNK_TOKENS if is_lmcache(holder) else None
                speed = None
                if pool is not None and pool.bytes_per_s is not None:
                    speed = owner.instance_class.tiers.get(place.tier)
                    speed = None if speed is None else replace(speed, bytes_per_s=pool.bytes_per_s)
                sites.append(Site(place, tokens, members, speed, chunk_tokens))
        if self._config.executors.lmcache_servers is not None:
            self._warn_of_unsized(users)
        return sites

    def _warn_of_unsized(self, users: Iterable[Holder]) -> None:
        """A server tells its size once in its life, which may have been before ours; so it is configured."""
        sized = {each.instance for each in self._config.tiers.capacities if each.tier == "host"}
        servers = {server_holder(each.instance_id) for each in self._feeds.lmcache.servers()}
        unsized = {holder.instance_id for holder in users if holder in servers} - sized
        for instance_id in sorted(unsized - self._unsized):
            _log.warning(
                "tier_planner.server_without_capacity",
                server=instance_id,
                remedy=f"nothing is planned for it; list {{instance: '{instance_id}', tier: host, bytes: ...}} "
                "under tiers.capacities",
            )
        self._unsized |= unsized

    def _users(self) -> dict[Holder, set[str]]:
        """The instances that load from each LMCache server, and from each store behind one."""
        users: dict[Holder, set[str]] = {}
        behind = {server.instance_id: holders for server, holders in self._feeds.lmcache.reach()}
        for instance in self._cluster:
            for rank in instance.ranks:
                for server in self._feeds.prompts.servers_of(rank.holder):
                    for holder in behind.get(server, (server_holder(server),)):
                        users.setdefault(holder, set()).add(instance.instance_id)
        return users

    def _of_embedded(self) -> list[Site]:
        emulation = self._config.emulation
        tokens = emulation.host_blocks * emulation.block_size
        if not tokens:
            return []
        return [
            Site(Place(rank.holder, Tier.HOST), tokens, frozenset({each.id}))
            for each in self._embedded
            if (instance := self._cluster.get(each.id)) is not None
            for rank in instance.ranks
        ]
