"""The names others build on."""

from __future__ import annotations

import cache_index


def test_exported_names() -> None:
    assert set(cache_index.__all__) >= {
        "BlocksCleared",
        "BlocksRemoved",
        "BlocksStored",
        "CacheIndex",
        "Changes",
        "EventBatch",
        "HeldRange",
        "Holder",
        "HotPrefix",
        "IndexStats",
        "IngestCounters",
        "KernelError",
        "MalformedEventError",
        "Namespace",
        "Snapshot",
        "SnapshotError",
        "StreamConfig",
        "StreamIngest",
        "StreamPosition",
        "StreamStats",
        "Tier",
        "TreeNode",
        "UnknownHolderError",
        "VllmEventSource",
        "chain_hashes",
        "decode_batch",
        "fold_extra_keys",
        "load",
        "save",
        "sequence_hashes",
        "warm",
    }
    assert all(hasattr(cache_index, name) for name in cache_index.__all__)
    assert list(cache_index.__all__) == sorted(cache_index.__all__)
