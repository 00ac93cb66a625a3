"""`conductor warm`: compile all kernels ahead of the first start."""

from __future__ import annotations

import time

from rich.console import Console


def warm() -> None:
    """Compile all kernels now, the simulator's included; without this the first start and the first replay do it
    (most of a minute each, once a machine).
    """
    console = Console(stderr=True)
    started_s = time.monotonic()
    with console.status("compiling kernels"):
        import cache_index
        from conductor.rehearsal import rehearse, rehearse_reuse
        from router.chunk_walk import compiled_walk
        from router.plain_chats import kernels as chats
        from router.word_tokens import kernels as words
        from simulator.cluster import kernels as engines

        cache_index.warm()
        rehearse()
        rehearse_reuse()
        words.compile_all()
        chats.compile_all()
        compiled_walk()
        engines.compile_all()
    console.print(f"kernels ready after {time.monotonic() - started_s:.1f} s")
