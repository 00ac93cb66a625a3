"""Starting a process quickly, and saying so where it cannot be quick."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Importing and building make many objects and hardly any garbage: looking for it takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def announce_compilation(say: Callable[[str], object] = lambda text: print(text, file=sys.stderr)) -> None:
    """Said once, when it begins: the first start on a machine, and the first simulation, take a minute or two."""
    from cache_index.kernel_set import on_first_compilation  # not loaded by processes that compile nothing

    on_first_compilation(
        lambda: say(
            "compiling kernels: a minute or two, once on this machine (`conductor warm` does it on several cores)"
        )
    )
