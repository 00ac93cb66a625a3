"""Room for sockets: a cluster of a thousand engines needs several thousand file descriptors."""

from __future__ import annotations

import resource


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
