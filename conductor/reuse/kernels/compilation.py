"""Where the kernels are kept: all files here are compiled together."""

from __future__ import annotations

from pathlib import Path

from cache_index.kernel_cache import cache_directory

DIRECTORY = cache_directory(*sorted(Path(__file__).parent.glob("*.py")))
