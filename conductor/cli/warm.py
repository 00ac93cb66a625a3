"""`conductor warm`: compile all kernels ahead of the first start."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Final

import typer
from rich.console import Console

_MOST_PROCESSES: Final = 3  # the index's kernels take nearly as long as all others, so more would wait
_CONTEXT: Final = get_context("fork")


def _index() -> None:
    from cache_index import warm

    warm()


def _router() -> None:
    from router.chunk_walk import compiled_walk
    from router.plain_chats import kernels as chats
    from router.word_tokens import kernels as words

    words.compile_all()
    chats.compile_all()
    compiled_walk()


def _simulator() -> None:
    from simulator.cluster import kernels

    kernels.compile_all()


def _decisions() -> None:
    from conductor.rehearsal import rehearse

    rehearse()


def _reuse() -> None:
    from conductor.rehearsal import rehearse_reuse

    rehearse_reuse()


_AT_ONCE: Final[dict[str, Callable[[], None]]] = {
    "index": _index,
    "router": _router,
    "simulator": _simulator,
}
_BEHIND_INDEX: Final[dict[str, Callable[[], None]]] = {  # which they use
    "decisions": _decisions,
    "reuse": _reuse,
}


def warm() -> None:
    """Compile all kernels now, the simulator's included; without this the first start and the first replay do it
    (a minute or two each on a slow machine, once).
    """
    console = Console(stderr=True)
    started_s = time.monotonic()
    most = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    left, running = dict(_AT_ONCE), dict[str, BaseProcess]()
    with console.status("") as status:
        try:
            while left or running:
                while left and len(running) < most:
                    name = next(iter(left))
                    running[name] = _CONTEXT.Process(target=_apart, args=(left.pop(name),))
                    running[name].start()
                status.update(f"compiling kernels: {', '.join(running)}")
                wait([process.sentinel for process in running.values()])
                for name in [name for name, process in running.items() if not process.is_alive()]:
                    if running.pop(name).exitcode != 0:
                        console.print(f"the kernels of {name} could not be compiled: see above")
                        raise typer.Exit(1)
                    if name == "index":
                        left |= _BEHIND_INDEX
        finally:
            for process in running.values():
                process.kill()
    console.print(f"kernels ready after {time.monotonic() - started_s:.1f} s")


def _apart(compile_some: Callable[[], None]) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C ends the process that started this one, and that this
    compile_some()
