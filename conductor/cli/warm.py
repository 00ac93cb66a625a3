"""`conductor warm`: compile all kernels ahead of the first start."""

from __future__ import annotations

import time

from rich.console import Console


def warm() -> None:
    """Compile all kernels now; without this the first start does it (most of a minute, once a machine)."""
    console = Console(stderr=True)
    started_s = time.monotonic()
    with console.status("compiling kernels"):
        import cache_index
        from conductor.rehearsal import rehearse

        cache_index.warm()
        rehearse()
    console.print(f"kernels ready after {time.monotonic() - started_s:.1f} s")
