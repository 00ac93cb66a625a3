"""What is cached where: block hashes, the radix index of residencies, and the events that feed it."""

from cache_index.event_source import EventSource
from cache_index.hashing import Namespace, chain_hashes, fold_extra_keys, sequence_hashes
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, IndexStats, Tier, TreeNode, UnknownHolderError
from cache_index.self_check import KernelError, warm
from cache_index.zmq_source import StreamConfig, StreamStats, VllmEventSource

__all__ = [
    "CacheIndex",
    "EventSource",
    "Holder",
    "IndexStats",
    "KernelError",
    "Namespace",
    "StreamConfig",
    "StreamStats",
    "Tier",
    "TreeNode",
    "UnknownHolderError",
    "VllmEventSource",
    "chain_hashes",
    "fold_extra_keys",
    "sequence_hashes",
    "warm",
]
