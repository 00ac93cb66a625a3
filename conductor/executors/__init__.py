"""Executors: what carries tier actions out, by the store that it drives."""

from conductor.executors.dry_run import DryRunExecutor
from conductor.executors.emulated import EmulatedExecutor
from conductor.executors.lmcache_controller import LMCacheControllerExecutor
from conductor.executors.lmcache_server import LMCacheServerExecutor
from conductor.executors.mooncake import MooncakeExecutor, MooncakeStore, segment_holder
from conductor.executors.mooncake_copies import MooncakeClient, ObjectCopies

__all__ = [
    "DryRunExecutor",
    "EmulatedExecutor",
    "LMCacheControllerExecutor",
    "LMCacheServerExecutor",
    "MooncakeClient",
    "MooncakeExecutor",
    "MooncakeStore",
    "ObjectCopies",
    "segment_holder",
]
