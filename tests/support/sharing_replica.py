"""A conductor's scheduler and membership that share their state, without engines and HTTP."""

from __future__ import annotations

import time

from cluster_factory import SUSPENSION, facts
from redis_process import RedisProcess

from cache_index import CacheIndex
from conductor.cluster import Cluster
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership, instance_of
from conductor.placement import Objectives
from conductor.policies import make_policy
from conductor.scheduler import Scheduler
from conductor.shared_state import RedisLink, SharedMembers, SharedState
from conductor.shared_state_config import SharedStateConfig

LEASE_S = 1.0
CONFIG = SharedStateConfig(namespace="t", lease_s=LEASE_S, batch_s=0.02, timeout_s=0.2)


def engine(name: str, port: int = 8000, **fields: object) -> InstanceConfig:
    return InstanceConfig(id=name, url=f"http://{name}:{port}", block_size=16, **fields)


class SharingReplica:
    """Its instances are up as soon as they are there."""

    def __init__(
        self, server: RedisProcess, name: str, *configured: InstanceConfig, policy: str = "slo"
    ) -> None:
        cluster = Cluster()
        for config in configured:
            cluster.add(instance_of(config))
        self.scheduler = Scheduler(
            cluster, CacheIndex(), make_policy(policy), Objectives(), SUSPENSION, id_prefix=f"{name}-"
        )
        self.membership = Membership(self.scheduler, time.monotonic, configured)
        self.membership.watcher = self
        link = RedisLink(server.url, CONFIG.namespace, CONFIG.timeout_s)
        self.state = SharedState(CONFIG, link, name, time.monotonic)
        self.members = SharedMembers(self.membership, self.state.tell, time.time)
        self._configured = configured
        for instance in cluster:
            self.watch(instance)

    def watch(self, instance, endpoints=None) -> None:
        self.scheduler.instance_up(instance.instance_id, facts())

    def forget(self, instance_id: str) -> None:
        pass

    def start(self) -> SharingReplica:
        self.state.start(self.scheduler, self.membership, "http://h:1", self._configured, lambda: 0)
        return self

    async def die(self) -> None:
        """As by kill -9: it says nothing more."""
        task, self.state._task = self.state._task, None
        assert task is not None
        self.state._closing = True
        await task

    def instances(self) -> dict[str, str]:
        return {i.instance_id: i.url for i in self.scheduler.cluster}

    def load_of(self, instance_id: str) -> tuple[float, float]:
        """Pending prefills and active decodes as decisions see them."""
        from conductor.costs import tables as t

        row = self.scheduler.cluster.tables.loads[self.scheduler.cluster[instance_id].ranks[0].row]
        return float(row[t.PENDING_PREFILLS]), float(row[t.ACTIVE_DECODES])
