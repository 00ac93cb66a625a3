"""A file of instances: read whenever it changes, and in words what is wrong with it, with the line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from conductor.configuration_faults import explain_each, read_yaml
from conductor.discovery.roll import Listed, Roll
from conductor.instance_config import InstanceConfig
from conductor.own_thread import in_own_thread

SOURCE: Final = "file"


class InstanceFileError(Exception):
    """The file cannot be used; the message names line and field."""


class InstanceFile(BaseModel):
    """What such a file holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instances: Annotated[list[InstanceConfig], Field(description="As in the configuration.")]


def read_instances(path: Path) -> list[InstanceConfig]:
    """Raises InstanceFileError; of several problems it tells each."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InstanceFileError(f"cannot be read: {error}") from None
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # what JSON may be indented with, and YAML, which includes it, may not
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        raise InstanceFileError(_as_one_line(error)) from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise InstanceFileError(f"line 1: must hold a mapping with 'instances: [...]', not {found}")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    try:
        instances = InstanceFile.model_validate(content).instances
    except ValidationError as error:
        problems = [
            f"line {line_of(root, location)}: {problem}"
            for location, problem in explain_each(error, InstanceFile)
        ]
        raise InstanceFileError("; ".join(problems)) from None
    first: dict[str, int] = {}
    for number, instance in enumerate(instances):
        if first.setdefault(instance.id, number) != number:
            line = line_of(root, ("instances", number, "id"))
            raise InstanceFileError(
                f"line {line}: 'instances.{number}.id': the id {instance.id!r} is used more than once; "
                "ids must be unique"
            )
    return instances


def line_of(node: yaml.Node | None, location: Sequence[int | str]) -> int:
    """Of the key or entry at ``location``, or of the innermost part of it that is there; counted from 1."""
    line = 1
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == part), None)
            if found is None:
                return line
            line, node = found[0].start_mark.line + 1, found[1]
        else:
            return line
    return line


class WatchedInstanceFile:
    """A source of the roll. What the file held last stays while it is broken or away.

    It is looked at every ``check_s``: a change of what the path leads to counts, in place, by renaming, or by a
    symbolic link on the way, as Kubernetes exchanges the files of a ConfigMap. Notifications of the kernel would
    miss some of these, and all on network file systems.
    """

    def __init__(self, path: Path, roll: Roll, *, check_s: float) -> None:
        self._path = path
        self._roll = roll
        self._check_s = check_s
        self._seen: tuple[int, ...] | None = None
        roll.add_source(SOURCE, str(path))

    def check(self) -> None:
        """Read the file if it may have changed."""
        self._take(self._look())

    async def check_forever(self) -> None:
        """On a thread of its own: a network file system that hangs must hold up nothing else."""
        while True:
            await asyncio.sleep(self._check_s)
            self._take(await in_own_thread(self._look, "instance-file"))

    def _look(self) -> list[InstanceConfig] | InstanceFileError | None:
        """None when nothing has changed."""
        seen = _appearance(self._path)
        if seen is not None and seen == self._seen:
            return None
        self._seen = seen
        try:
            return read_instances(self._path)
        except InstanceFileError as error:
            return error

    def _take(self, found: list[InstanceConfig] | InstanceFileError | None) -> None:
        if isinstance(found, InstanceFileError):
            self._roll.failed(SOURCE, f"{self._path}: {found}")
        elif found is not None:
            self._roll.call(SOURCE, [Listed(each) for each in found])
            self._roll.heard(SOURCE)
        elif self._roll.sources[SOURCE].error is None:
            self._roll.heard(SOURCE)


def _appearance(path: Path) -> tuple[int, ...] | None:
    """None when the file is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _as_one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"is not valid YAML: {' '.join(str(error).split())}"
    return f"line {mark.line + 1}: is not valid YAML: {getattr(error, 'problem', None) or 'unexpected text'}"
