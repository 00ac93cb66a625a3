"""The set of the wire kernels."""

from __future__ import annotations

from pathlib import Path

from cache_index.kernel_set import KernelSet
from cache_index.kernels.compilation import SOURCES as INDEX_SOURCES

SOURCES = (*INDEX_SOURCES, *sorted(Path(__file__).parent.glob("*.py")))
KERNELS = KernelSet(*SOURCES)
CACHE_DIRECTORY = KERNELS.directory
kernel, compile_all = KERNELS.kernel, KERNELS.compile_all
