"""The shared registry of instances: entries that every replica may write, of which the latest counts everywhere.

An entry has a version, one more than that of the entry it replaces, and the name of the replica that wrote it. The
higher version wins, of equal ones the greater name, so replicas that have heard the same entries agree, in whatever
order they heard them. Removed instances keep an entry for a day: whoever missed the removal hears of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from conductor.instance_config import InstanceConfig

KEPT_S = 86_400.0  # entries of instances that are gone


class Standing(StrEnum):
    PRESENT = "present"
    DRAINING = "draining"  # takes nothing new, and is gone at ``until_s``
    REMOVED = "removed"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """Of one instance. Times are Unix seconds; ``configured`` in a file, else over REST."""

    instance_id: str
    version: int
    replica: str
    standing: Standing
    configured: bool
    description: dict[str, Any]
    at_s: float
    until_s: float = 0.0

    @property
    def order(self) -> str:
        """Compares as entries of one instance do, also where only texts can be compared."""
        return f"{self.version:020d} {self.replica}"

    def config(self) -> InstanceConfig:
        """Raises ValueError for a description that this version cannot read."""
        return InstanceConfig(**self.description)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def encoded(entry: Entry) -> bytes:
    return _encode(entry)


def decoded(stored: bytes) -> Entry:
    """What stands behind the order. Raises msgspec.DecodeError."""
    return _decode(stored.partition(b"\n")[2])


def described(config: InstanceConfig) -> dict[str, Any]:
    """What is not the default, with its key: others have to send it to the engine."""
    description: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    if config.api_key is not None:
        description["api_key"] = config.api_key.get_secret_value()
    return description


class InstanceRegistry:
    """All entries that this replica has heard of."""

    def __init__(self, replica: str) -> None:
        self.entries: dict[str, Entry] = {}
        self.conflicts: list[str] = []
        self._replica = replica
        self._configured: dict[str, dict[str, Any]] = {}

    def write(
        self,
        instance_id: str,
        standing: Standing,
        description: dict[str, Any],
        at_s: float,
        *,
        configured: bool = False,
        until_s: float = 0.0,
    ) -> Entry:
        """The entry that replaces all earlier ones."""
        known = self.entries.get(instance_id)
        version = 1 if known is None else known.version + 1
        entry = Entry(instance_id, version, self._replica, standing, configured, description, at_s, until_s)
        self.entries[instance_id] = entry
        self._compare()
        return entry

    def merge(self, heard: Iterable[Entry]) -> list[Entry]:
        """Take in what was read; the entries that are news here."""
        news = []
        for entry in heard:
            known = self.entries.get(entry.instance_id)
            if known is None or entry.order > known.order:
                self.entries[entry.instance_id] = entry
                news.append(entry)
        self._compare()
        return news

    def missing_from(self, heard: dict[str, Entry]) -> list[Entry]:
        """Those of ours that are later than what was read."""
        return [
            entry
            for entry in self.entries.values()
            if (other := heard.get(entry.instance_id)) is None or entry.order > other.order
        ]

    def configure(self, configs: Iterable[InstanceConfig], at_s: float) -> list[Entry]:
        """Add this replica's own instances, once what others know was merged; the entries that are to be told.

        Of differing configurations the one of the replica that came last counts. What was put or removed over REST
        outlives restarts, so it counts more than a file.
        """
        told = []
        for config in configs:
            description = described(config)
            self._configured[config.id] = description
            known = self.entries.get(config.id)
            if known is None or (
                known.configured and known.standing is Standing.PRESENT and known.description != description
            ):
                told.append(self.write(config.id, Standing.PRESENT, description, at_s, configured=True))
        self._compare()
        return told

    def forget(self, now_s: float) -> list[str]:
        """Drop the entries of instances that are gone for long; their ids."""
        old = [
            entry.instance_id
            for entry in self.entries.values()
            if entry.standing is not Standing.PRESENT and max(entry.at_s, entry.until_s) + KEPT_S < now_s
        ]
        for instance_id in old:
            del self.entries[instance_id]
        return old

    def _compare(self) -> None:
        """Where the file of this replica says something else than the registry."""
        conflicts = []
        for instance_id, own in self._configured.items():
            entry = self.entries.get(instance_id)
            if entry is None:
                continue
            if entry.standing is not Standing.PRESENT:
                conflicts.append(f"{instance_id}: configured here, {entry.standing} by {entry.replica}")
            elif entry.description != own:
                differing = sorted(
                    name
                    for name in own.keys() | entry.description.keys()
                    if own.get(name) != entry.description.get(name)
                )
                conflicts.append(
                    f"{instance_id}: {', '.join(differing)} differ from what {entry.replica} "
                    f"{'configures' if entry.configured else 'was told'}, which counts"
                )
        self.conflicts = conflicts
