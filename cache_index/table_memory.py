"""Memory of the tables: zeroed pages from the system, and their reuse while a table grows.

Fresh pages cost several times what is then done with them (they are zeroed by the kernel, and on a virtual
machine provided by the host), and a table that grows in small steps would need its whole size anew for each
step. So the pages that moved entries leave behind are mapped, huge page by huge page, to where the larger
table comes to need them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

HUGE_PAGE = 1 << 21
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4  # linux/mman.h; the last one needs Linux 5.7


class TableMemory:
    """``size`` zeroed bytes at ``address``; a page is provided when it is first touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        large = size >= HUGE_PAGE
        self._map = mmap.mmap(
            -1, size + HUGE_PAGE if large else size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        everything = np.frombuffer(self._map, np.uint8)
        start = -int(everything.ctypes.data) % HUGE_PAGE if large else 0
        self._start = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.bytes = everything[start : start + size]
        self.address = int(self.bytes.ctypes.data)
        self.released = 0  # everything below was given away
        self.received = 0  # nothing above was received
        if large:
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def hand_over(self, until: int, taker: TableMemory, unused_from: int) -> None:
        """Give the pages below ``until`` away: to ``taker``, which needs none below ``unused_from``."""
        while self.released + HUGE_PAGE <= until:
            target = max(taker.received, -(-unused_from // HUGE_PAGE) * HUGE_PAGE)
            if target + HUGE_PAGE <= taker.size and _move_page(
                self.address + self.released, taker.address + target
            ):
                taker.bytes[target : target + HUGE_PAGE] = 0
                taker.received = target + HUGE_PAGE
            else:
                self._map.madvise(mmap.MADV_DONTNEED, self._start + self.released, HUGE_PAGE)
            self.released += HUGE_PAGE


def available_bytes() -> int:
    """Memory that this process can still get: what the machine has, within the limit of its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        available = min(available, int(limit[0]) - int(used[0]))
    return max(available, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _move_page(source: int, target: int) -> bool:
    """Map the huge page at ``source`` to ``target``; zeros take its place. False if the system cannot."""
    flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
    return bool(_mremap(source, HUGE_PAGE, HUGE_PAGE, flags, target) == target)


_mremap = ctypes.CDLL(None).mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
