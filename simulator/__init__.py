"""The engine model: performance, paged KV cache, continuous batching; traces to drive it with.

The same model over HTTP, in real time and in a process of its own, is ``python -m simulator.emulator``.
"""

from simulator.engine import Engine, EngineLimits
from simulator.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KvCache, KvEvent
from simulator.link import SharedLink
from simulator.performance import PROFILES, PerformanceModel
from simulator.sequence import RemoteKv, Submission
from simulator.workloads import TraceError, TraceRecord, prompt_tokens, read_mooncake

__all__ = [
    "PROFILES",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Engine",
    "EngineLimits",
    "KvCache",
    "KvEvent",
    "PerformanceModel",
    "RemoteKv",
    "SharedLink",
    "Submission",
    "TraceError",
    "TraceRecord",
    "prompt_tokens",
    "read_mooncake",
]
