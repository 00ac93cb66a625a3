"""The set of the engine model's kernels: all files here are compiled together."""

from __future__ import annotations

from pathlib import Path

from cache_index.kernel_set import KernelSet

KERNELS = KernelSet(*sorted(Path(__file__).parent.glob("*.py")))
