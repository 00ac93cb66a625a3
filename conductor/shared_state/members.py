"""Instances that join and leave over REST, told to all replicas; and what others tell, done here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from conductor.cluster import InstanceState
from conductor.instance_config import InstanceConfig
from conductor.membership import CONFIGURATION, REST, Membership
from conductor.scheduler import Scheduler
from conductor.shared_state.instances import Entry, Standing, described


class Told(Protocol):
    """Takes entries for the registry (`SharedState.tell`)."""

    def __call__(self, instance_id: str, standing: Standing, **fields: Any) -> None: ...


class SharedMembers:
    """`Membership` as the REST API orders it, with every change told."""

    def __init__(self, membership: Membership, tell: Told, wall: Callable[[], float]) -> None:
        self._membership = membership
        self._tell = tell
        self._wall = wall

    def usable(self, config: InstanceConfig) -> InstanceState:
        """As `Membership.usable`."""
        return self._membership.usable(config)

    def source_of(self, instance_id: str) -> str | None:
        """As `Membership.source_of`."""
        return self._membership.source_of(instance_id)

    def put(self, config: InstanceConfig) -> bool:
        """As `Membership.put`."""
        changed = self._membership.put(config)
        self._tell(config.id, Standing.PRESENT, description=described(config))
        return changed

    def remove(self, instance_id: str) -> None:
        """As `Membership.remove`."""
        self._membership.remove(instance_id)
        self._tell(instance_id, Standing.REMOVED, description={})

    def drain(self, instance_id: str, within_s: float) -> int:
        """As `Membership.drain`; each replica waits for the placements of its own."""
        left = self._membership.drain(instance_id, within_s)
        until_s = self._wall() + within_s
        self._tell(instance_id, Standing.DRAINING, description={}, until_s=until_s)
        return left


def apply_entry(entry: Entry, membership: Membership, scheduler: Scheduler, now_s: float) -> None:
    """Make the cluster what an entry says; ``now_s`` in Unix seconds. Raises ValueError for what no instance is."""
    if entry.standing is Standing.PRESENT:
        membership.put(entry.config(), CONFIGURATION if entry.configured else REST)
        return
    instance = scheduler.cluster.get(entry.instance_id)
    if instance is None:
        return
    within_s = entry.until_s - now_s
    if entry.standing is Standing.DRAINING and within_s > 0:
        if not instance.draining:
            membership.drain(entry.instance_id, within_s)
    else:
        membership.remove(entry.instance_id)
