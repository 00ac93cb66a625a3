"""Reports as JSON: to a file, or to stdout where the path is ``-``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from conductor.cli.output_files import writable_file

JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the report as one JSON object; - for stdout.",
        callback=writable_file,
    ),
]


def write_json(path: str, value: Any) -> None:
    """Raises OSError when the file cannot be written."""
    if path == "-":
        json.dump(value, sys.stdout, indent=2)
        print()
    else:
        Path(path).write_text(json.dumps(value, indent=2) + "\n")
