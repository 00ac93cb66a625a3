"""State stores and executors behind their small interfaces."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cache_index import Holder, Tier
from conductor.actions import ActionKind, DryRunExecutor, TierAction
from conductor.state_store import FileStateStore, MemoryStateStore, StateStore


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    return MemoryStateStore() if request.param == "memory" else FileStateStore(tmp_path / "state")


def test_values_are_kept_by_key(store: StateStore) -> None:
    assert store.get("calibration") is None
    store.put("calibration", b"one")
    store.put("calibration", b"two")
    store.put("other", b"")
    assert store.get("calibration") == b"two"
    assert store.get("other") == b""


def test_files_survive_and_keys_cannot_leave_the_folder(tmp_path: Path) -> None:
    FileStateStore(tmp_path).put("a", b"1")
    assert FileStateStore(tmp_path).get("a") == b"1"
    with pytest.raises(ValueError, match="state key"):
        FileStateStore(tmp_path).put("../a", b"1")


async def test_a_dry_run_only_tells() -> None:
    action = TierAction(
        kind=ActionKind.REPLICATE,
        source=Holder("a"),
        source_tier=Tier.DEVICE,
        target=Holder("b"),
        target_tier=Tier.HOST,
        sequence_hashes=(1, 2),
        benefit_s=1.0,
        cost_s=0.1,
        kv_bytes=4096,
        reason="hot",
    )
    executor = DryRunExecutor()
    assert action.kind in executor.capabilities
    with capture_logs() as logs:
        await executor.execute(action)
    assert logs[0]["source"] == "a"
    assert logs[0]["blocks"] == 2
