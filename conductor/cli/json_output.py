"""Reports as JSON: to a file, or to stdout where the path is ``-``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def _can_be_written(path: str | None) -> str | None:
    """Told before the work begins whose report it is to hold."""
    if path is None or path == "-":
        return path
    file = Path(path)
    if file.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "this user may not write there" if file.parent.is_dir() else "there is no such folder"
        raise typer.BadParameter(f"cannot write {path}: {reason}")
    return path


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the report as one JSON object; - for stdout.",
        callback=_can_be_written,
    ),
]


def write_json(path: str, value: Any) -> None:
    """Raises OSError when the file cannot be written."""
    if path == "-":
        json.dump(value, sys.stdout, indent=2)
        print()
    else:
        Path(path).write_text(json.dumps(value, indent=2) + "\n")
