"""Where results are to be written: whether they can be is told before the work begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import typer

_Given = TypeVar("_Given", str, Path)


def writable_file(path: _Given | None) -> _Given | None:
    """A callback of an option. Raises BadParameter where no file can be written; ``-`` is stdout."""
    if path is None or str(path) == "-":
        return path
    file = Path(path)
    if file.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "this user may not write there" if file.parent.is_dir() else "there is no such folder"
        raise typer.BadParameter(f"cannot write {path}: {reason}")
    return path


def writable_folder(path: Path | None) -> Path | None:
    """The same for a folder, which is made where it is not there."""
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make the folder {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise typer.BadParameter(f"cannot write to {path}: this user may not write there")
    return path
