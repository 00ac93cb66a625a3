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
        from simulator.cluster.kernels import compile_all

        cache_index.warm()
        rehearse()
        rehearse_reuse()
        compile_all()
    console.print(f"kernels ready after {time.monotonic() - started_s:.1f} s")
