"""`conductor warm`: compile all kernels ahead of the first start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Final

from rich.console import Console

_MOST_PROCESSES: Final = 3  # the index's kernels take nearly as long as all others, so more would wait


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
_BEHIND_INDEX: Final[dict[str, Callable[[], None]]] = {
    "decisions": _decisions,
    "reuse": _reuse,
}  # which they use


def warm() -> None:
    """Compile all kernels now, the simulator's included; without this the first start and the first replay do it
    (a minute or two each on a slow machine, once).
    """
    console = Console(stderr=True)
    started_s = time.monotonic()
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        pending: dict[Future[None], str] = {pool.submit(make): name for name, make in _AT_ONCE.items()}
        with console.status("") as status:
            while pending:
                status.update(f"compiling kernels: {', '.join(pending.values())}")
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    future.result()
                    if pending.pop(future) == "index":
                        pending |= {pool.submit(make): name for name, make in _BEHIND_INDEX.items()}
    console.print(f"kernels ready after {time.monotonic() - started_s:.1f} s")
