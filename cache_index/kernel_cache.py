"""Where compiled kernels are kept between runs.

Numba decides by a source file's time stamp whether a cached kernel is still good, and it does not see
changes in the files a kernel calls into. A wrong guess returns wrong results without any error. The
directory used here is therefore named after the hash of all source that is compiled together, and of
Numba's version.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config


def cache_directory(*sources: Path) -> Path:
    """A writable directory that only these exact ``sources`` use, the files whose code is compiled together.

    It lies under ``NUMBA_CACHE_DIR``, else ``XDG_CACHE_HOME``, else ``~/.cache``; where none of them
    can be written, a fresh temporary directory is used, and kernels are compiled on every start.
    """
    digest = digest_of(*sources)
    home = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    directory = base / "kv-conductor" / f"kernels-{digest}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kv-conductor-kernels-"))
    if os.access(directory, os.W_OK):
        return directory
    return Path(tempfile.mkdtemp(prefix="kv-conductor-kernels-"))


def digest_of(*sources: Path) -> str:
    """What names the directory."""
    code = b"".join(source.read_bytes() for source in sources)
    return hashlib.sha256(code + numba.__version__.encode()).hexdigest()[:16]


def cached_njit(function: Callable[..., Any], directory: Path, *, nogil: bool = True) -> Any:
    """``numba.njit`` with its cache in ``directory``; the process-wide setting is left as it was.

    ``nogil`` lets other threads run meanwhile, which costs a call a third of a microsecond.
    """
    settings: Any = config
    previous = settings.CACHE_DIR
    settings.CACHE_DIR = str(directory)
    try:
        return numba.njit(cache=True, nogil=nogil, error_model="numpy")(function)
    finally:
        settings.CACHE_DIR = previous
