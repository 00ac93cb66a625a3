"""Lines of a trace file with their numbers; a last line that was cut off is left out with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from simulator.workloads.records import TraceError

Warn = Callable[[str], None]
_Parsed = TypeVar("_Parsed")


class Line(msgspec.Struct, frozen=True, gc=False):
    content: bytes
    place: str  # "FILE, line N"
    cut_off: bool  # the file ends without ending the line


def numbered_lines(path: Path) -> Iterator[Line]:
    """All lines that are not blank."""
    place = f"{path}, line "
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            if not content.isspace():
                yield Line(content, f"{place}{number}", not content.endswith(b"\n"))


def parsed_lines(lines: Iterable[Line], parse: Callable[[Line], _Parsed], warn: Warn) -> Iterator[_Parsed]:
    """Parsed lines; a broken one raises `TraceError`, unless it is the last and has no end."""
    for line in lines:
        try:
            parsed = parse(line)
        except TraceError as error:
            if not line.cut_off:
                raise
            warn(f"{error}; the file ends in the middle of this line, which is left out")
            return
        yield parsed
