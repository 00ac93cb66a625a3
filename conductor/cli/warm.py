"""`conductor warm`: compile the index's kernels ahead of the first start."""

from __future__ import annotations

import time

from rich.console import Console


def warm() -> None:
    """Compile the index's kernels now; without this the first start does it (half a minute, once a machine)."""
    console = Console(stderr=True)
    started_s = time.monotonic()
    with console.status("compiling the index's kernels"):
        import cache_index

        cache_index.warm()
    console.print(f"kernels ready after {time.monotonic() - started_s:.1f} s")
