from .approximate import ApproximateResidency
from .array_file import SnapshotError
from .changes import Changes
from .event_source import EventSource, StreamBooks
from .event_sources import EventSources
from .events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    MalformedEventError,
    decode_batch,
)
from .hashing import Namespace, chain_hashes, fold_extra_keys, sequence_hashes
from .ingest import IngestCounters, StreamIngest
from .mooncake import MooncakeEventSource
from .prompt_match import PromptMatcher
from .radix import CacheIndex
from .residency import (
    HeldRange,
    Holder,
    HotPrefix,
    IndexStats,
    Tier,
    TreeNode,
    UnknownHolderError,
)
from .self_check import KernelError, warm
from .sglang_load import LoadStat, SglangLoadFeeds
from .snapshot import SaveReport, Snapshot, load, save
from .streams import StreamConfig, StreamPosition, StreamStats
from .trtllm import TrtllmEventSource
from .zmq_source import VllmEventSource

__all__ = [
    "ApproximateResidency",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheIndex",
    "Changes",
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
