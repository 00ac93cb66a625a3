"""The names that other packages may rely on."""

import simulator

NAMES = {
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
}


def test_exported_names() -> None:
    assert set(simulator.__all__) == NAMES
    assert all(hasattr(simulator, name) for name in NAMES)
