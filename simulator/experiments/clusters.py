"""Clusters by what a command line or an experiment calls them, with some of their figures replaced."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from conductor.cluster_shape import read_cluster_shape
from conductor.configuration_faults import ConfigError
from conductor.placement import Role
from simulator.cluster.cluster_file import (
    DEFAULT_CLASS,
    ClusterFile,
    cluster_content,
    make_cluster,
    short_form,
)

SHIPPED_CLUSTERS: Final = Path(__file__).parent / "clusters"

Setting = tuple[str, Any]  # a path in a cluster file, such as instances.*.tiers.host, and its value


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A cluster file's content before it is checked."""

    name: str
    content: dict[str, Any]
    folder: Path  # that paths in it are relative to
    where: str  # for errors

    def make(self) -> ClusterFile:
        """Raises ConfigError naming key and remedy."""
        return make_cluster(self.content, self.folder, self.where)

    def with_settings(self, settings: Iterable[Setting]) -> ClusterSource:
        """The same cluster with other values. Raises ConfigError for a path that leads nowhere."""
        content = copy.deepcopy(self.content)
        for path, value in settings:
            _set(content, path.split("."), value, path)
        return replace(self, content=content)

    def with_split(self, split: str) -> ClusterSource:
        """The same cluster with as many instances of each role as ``2p6d`` or ``8`` says. Raises ConfigError."""
        try:
            counts = read_cluster_shape(split)
        except ValueError as error:
            raise ConfigError(f"ratio {error}") from None
        content = copy.deepcopy(self.content)
        groups = content.get("instances")
        groups = groups if isinstance(groups, list) and all(isinstance(g, dict) for g in groups) else []
        roles = [group.get("role", Role.MIXED.value) for group in groups]
        if sorted(roles) != sorted(counts):
            raise ConfigError(
                f"{self.where}: ratio {split} needs one group of instances for each of its roles "
                f"({', '.join(counts)}); there {'is' if len(roles) == 1 else 'are'} {', '.join(roles) or 'none'}"
            )
        for group in groups:
            group["count"] = counts[Role(group.get("role", Role.MIXED))]
        return replace(
            self, name=split if self.name == self.where else f"{self.name} {split}", content=content
        )


def find_cluster(text: str, instance_class: str | None = None, folder: Path = Path()) -> ClusterSource:
    """The cluster that ``text`` means: a file, the name of a shipped one, or a short form such as 8 or 4p4d.

    ``instance_class`` is for short forms; files are looked for in ``folder``. Raises ConfigError.
    """
    path = folder / text
    if not path.is_file() and re.fullmatch(r"[\w.-]+", text):
        path = SHIPPED_CLUSTERS / f"{text.removesuffix('.yaml')}.yaml"
    try:
        content = short_form(text, instance_class or DEFAULT_CLASS)
    except ConfigError as error:
        if not (path.is_file() or text.endswith((".yaml", ".yml"))):
            raise ConfigError(f"{error}; shipped are {', '.join(shipped_clusters())}") from None
    else:
        return ClusterSource(text, content, folder, text)
    if instance_class is not None:
        raise ConfigError(f"{text} says which classes its instances have; leave the instance class out")
    if not path.is_file():
        path = folder / text
    return ClusterSource(path.stem, cluster_content(path), path.parent, str(path))


def shipped_clusters() -> list[str]:
    return sorted(path.stem for path in SHIPPED_CLUSTERS.glob("*.yaml"))


def _set(content: Any, parts: list[str], value: Any, path: str) -> None:
    """Missing mappings are made; ``*`` is every entry of a list. What is set is checked with the whole file."""
    part, rest = parts[0], parts[1:]
    if isinstance(content, list):
        if part != "*" and not (part.isdecimal() and int(part) < len(content)):
            raise ConfigError(
                f"cannot set {path!r}: there is a list of {len(content)} at {part!r}; give a number below that, "
                "or * for all"
            )
        for i in range(len(content)) if part == "*" else [int(part)]:
            if rest:
                _set(content[i], rest, value, path)
            else:
                content[i] = value
    elif isinstance(content, dict):
        if rest:
            _set(content.setdefault(part, {}), rest, value, path)
        else:
            content[part] = value
    else:
        raise ConfigError(f"cannot set {path!r}: there is {content!r} where {part!r} is looked for")
