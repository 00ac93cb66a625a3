"""What is cached where: block hashes, the radix index of residencies, and the events that feed it."""

from cache_index.approximate import ApproximateResidency
from cache_index.event_source import EventSource, StreamBooks
from cache_index.event_sources import EventSources
from cache_index.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    MalformedEventError,
    decode_batch,
)
from cache_index.hashing import Namespace, chain_hashes, fold_extra_keys, sequence_hashes
from cache_index.ingest import IngestCounters, StreamIngest
from cache_index.mooncake import MooncakeEventSource
from cache_index.prompt_match import PromptMatcher
from cache_index.radix import CacheIndex
from cache_index.residency import (
    HeldRange,
    Holder,
    HotPrefix,
    IndexStats,
    Tier,
    TreeNode,
    UnknownHolderError,
)
from cache_index.self_check import KernelError, warm
from cache_index.sglang_load import LoadStat, SglangLoadFeeds
from cache_index.snapshot import SaveReport, Snapshot, SnapshotError, load, save
from cache_index.streams import StreamConfig, StreamPosition, StreamStats
from cache_index.trtllm import TrtllmEventSource
from cache_index.zmq_source import VllmEventSource

__all__ = [
    "ApproximateResidency",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheIndex",
    "EventBatch",
    "EventSource",
    "EventSources",
    "HeldRange",
    "Holder",
    "HotPrefix",
    "IndexStats",
    "IngestCounters",
    "KernelError",
    "LoadStat",
    "MalformedEventError",
    "MooncakeEventSource",
    "Namespace",
    "PromptMatcher",
    "SaveReport",
    "SglangLoadFeeds",
    "Snapshot",
    "SnapshotError",
    "StreamBooks",
    "StreamConfig",
    "StreamIngest",
    "StreamPosition",
    "StreamStats",
    "Tier",
    "TreeNode",
    "TrtllmEventSource",
    "UnknownHolderError",
    "VllmEventSource",
    "chain_hashes",
    "decode_batch",
    "fold_extra_keys",
    "load",
    "save",
    "sequence_hashes",
    "warm",
]
