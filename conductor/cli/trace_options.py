"""Options that say which requests of which trace, and how fast: the same in every command that reads one."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from simulator.experiments.workload import Workload, read_records
from simulator.workloads import TraceError, TraceFormat, TraceRecord

Format = Annotated[
    TraceFormat | None, typer.Option("--format", help="The file's format; default: by content.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many requests that pass.")]
FromS = Annotated[float, typer.Option("--from-s", min=0, help="Leave out what arrives before.")]
ToS = Annotated[float | None, typer.Option("--to-s", min=0, help="Leave out what arrives from then on.")]
MinInput = Annotated[int, typer.Option(min=0, help="Leave out shorter prompts (tokens).")]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Leave out longer prompts (tokens).")]
MinOutput = Annotated[int, typer.Option(min=0, help="Leave out shorter answers (tokens).")]
MaxOutput = Annotated[int | None, typer.Option(min=0, help="Leave out longer answers (tokens).")]
Speed = Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="Divide all times by this.")]
Rate = Annotated[
    float | None,
    typer.Option(
        min=1e-6,
        max=1e6,
        help="Scale times to this many requests a second; ShareGPT gets Poisson arrivals.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything drawn; equal seeds give equal traces.")]


def warn_on(console: Console) -> Callable[[str], None]:
    """What readers are given to say that something is left out."""

    def warn(text: str) -> None:
        console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    return warn


def fail(console: Console, message: str) -> NoReturn:
    """Say what is wrong with what was asked for, and end with exit code 2."""
    console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


@contextmanager
def trace_path(trace: str) -> Iterator[Path]:
    """The file of a TRACE argument; ``-`` is what stands on stdin, kept in a file for that long."""
    if trace != "-":
        yield Path(trace)
        return
    with tempfile.TemporaryDirectory(prefix="conductor-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


def cannot_read(error: TraceError | OSError) -> str:
    """In words, without the number that the system has for it."""
    if isinstance(error, OSError):
        return f"cannot read the trace {error.filename or ''}: {error.strerror}"
    return f"cannot read the trace: {error}"


def read_or_fail(console: Console, workload: Workload) -> list[TraceRecord]:
    """Its requests in order of arrival; exit code 2 with the reason when they cannot be read."""
    try:
        return read_records(workload, warn_on(console))
    except (TraceError, OSError) as error:
        fail(console, cannot_read(error))
