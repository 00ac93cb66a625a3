"""The roll: which instances the sources list, brought into the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from conductor.instance_config import InstanceConfig
from conductor.membership import Membership, UnknownInstanceError

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """An instance as a source lists it.

    ``life`` tells two engines apart that follow each other under one description, such as a pod's UID.
    ``withheld`` is why it is to get no requests for now.
    """

    config: InstanceConfig
    life: str = ""
    withheld: str | None = None


@dataclass(slots=True)
class SourceState:
    """What is known of one source; times in seconds of the wall clock."""

    name: str
    detail: str  # what it reads, for people
    listed: dict[str, Listed] = field(default_factory=dict)  # as far as it is in the cluster
    refused: dict[str, str] = field(default_factory=dict)  # what it lists besides, and why that is left out
    synced_s: float | None = None  # when it was last heard
    error: str | None = None  # why it cannot be heard now
    failures: int = 0
    changes: Counter[str] = field(default_factory=Counter)


class Roll:
    """Applies what changes in a source's list: an instance is added, replaced, withheld, or drained and removed.

    Only changes of a list are applied. Who removes a listed instance over REST therefore does not get it back
    until its source describes it differently. An instance belongs to the source that listed it first; another one's
    of the same id or URL is refused until the first lets it go. Not thread-safe: one event loop.
    """

    def __init__(self, membership: Membership, wall_clock: Callable[[], float], *, drain_s: float) -> None:
        self._membership = membership
        self._wall_clock = wall_clock
        self._drain_s = drain_s
        self._wanted: dict[str, dict[str, Listed]] = {}
        self._unusable: dict[str, dict[str, str]] = {}
        self.sources: dict[str, SourceState] = {}

    def add_source(self, name: str, detail: str) -> None:
        self.sources[name] = SourceState(name, detail)
        self._wanted[name] = {}
        self._unusable[name] = {}

    def call(self, source: str, listing: Iterable[Listed], unusable: Mapping[str, str] | None = None) -> None:
        """The whole list of a source, as it is now; ``unusable`` is what cannot be read, and why.

        What was listed before under an id that is unusable now stays as it was.
        """
        self._wanted[source] = {each.config.id: each for each in listing}
        self._unusable[source] = dict(unusable or {})
        self._apply(self.sources[source])

    def heard(self, source: str) -> None:
        """The source answers: its list is as it was told last."""
        state = self.sources[source]
        state.synced_s = self._wall_clock()
        if state.error is not None:
            _log.info("source of instances is back", source=source)
            state.error = None

    def failed(self, source: str, reason: str) -> None:
        """The source cannot be heard; what it listed last stays."""
        state = self.sources[source]
        state.failures += 1
        if state.error != reason:
            _log.error("source of instances failed; what it listed last stays", source=source, reason=reason)
        state.error = reason

    def check(self) -> None:
        """Take in what was refused because another source had it, and has no longer."""
        for state in self.sources.values():
            if state.refused.keys() - self._unusable[state.name].keys():
                self._apply(state)

    def _apply(self, state: SourceState) -> None:
        wanted, refused = self._wanted[state.name], dict(self._unusable[state.name])
        for instance_id in [each for each in state.listed if each not in wanted and each not in refused]:
            self._drop(state, instance_id)
        for instance_id, each in wanted.items():
            known = state.listed.get(instance_id)
            if each is known or each == known:
                continue
            if known is None and (reason := self._taken(each.config, state.name)) is not None:
                refused[instance_id] = reason
                continue
            try:
                self._put(state, each, known)
            except ValueError as error:
                refused[instance_id] = str(error)
                continue
            state.listed[instance_id] = each
        for instance_id, reason in refused.items():
            if state.refused.get(instance_id) != reason:
                _log.warning(
                    "listed instance is left out", source=state.name, instance=instance_id, reason=reason
                )
        state.refused = refused

    def _put(self, state: SourceState, each: Listed, known: Listed | None) -> None:
        """Raises ValueError for what cannot be an instance."""
        membership, instance_id = self._membership, each.config.id
        present = membership.source_of(instance_id) is not None
        if known is None:
            membership.put(each.config, state.name)
            state.changes["added"] += 1
        elif known.config != each.config or known.life != each.life:
            if present and known.config == each.config:
                membership.remove(instance_id)  # another engine of the same description
            membership.put(each.config, state.name)
            state.changes["replaced"] += 1
        elif not present:
            return  # somebody has taken it out, and its source says nothing new of it
        if each.withheld is not None:
            state.changes["withheld"] += known is None or known.withheld is None
            membership.withhold(instance_id, each.withheld)
        elif known is not None and known.withheld is not None:
            state.changes["readmitted"] += 1
            membership.readmit(instance_id)

    def _drop(self, state: SourceState, instance_id: str) -> None:
        del state.listed[instance_id]
        if self._membership.source_of(instance_id) != state.name:
            return  # it was taken out, or somebody else has it now
        try:
            self._membership.drain(instance_id, self._drain_s)
        except UnknownInstanceError:
            return
        state.changes["drained"] += 1

    def _taken(self, config: InstanceConfig, source: str) -> str | None:
        """Why an instance cannot be this source's."""
        owner = self._membership.source_of(config.id)
        if owner not in (None, source):
            return f"the id {config.id!r} is taken by an instance of another source ({owner})"
        for other in self._membership.configs():
            if other.url == config.url and other.id != config.id:
                owner = self._membership.source_of(other.id)
                if owner != source:
                    return (
                        f"{config.url} is in the cluster already, as {other.id!r} of another source ({owner})"
                    )
        return None
