"""State stores and executors behind their small interfaces."""

import asyncio
import time
from pathlib import Path

import pytest
from cluster_factory import make_scheduler, request

from conductor.catalogue import LLAMA_8B_H100
from conductor.cli import learned
from conductor.cli.learned import save_learned, save_learned_forever, saved_calibrations, saved_lengths
from conductor.placement import Usage
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


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path)
    scheduler = make_scheduler("m")
    scheduler.calibration(LLAMA_8B_H100).observe_prefill(0.1, 0.2)
    for seed in range(40):
        placement = scheduler.place(request(64, seed=seed), float(seed))
        scheduler.finished(placement.placement_id, seed + 0.5, Usage(64, 9, 0))
    save_learned(scheduler, store)
    again = FileStateStore(tmp_path)
    assert saved_calibrations(again)[LLAMA_8B_H100.name].prefill.factor > 1.0
    assert saved_lengths(again).predict(request(64)).mean_tokens == pytest.approx(9, abs=2)


async def test_what_was_learned_is_saved_while_more_is_learned(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "_SAVE_EVERY_S", 0.0)
    scheduler = make_scheduler("m")
    lengths = scheduler.gate.lengths
    for number in range(300):
        lengths.observe(request(tenant=f"t{number}"), None, 9)
    saving = asyncio.create_task(save_learned_forever(scheduler, store))
    for number in range(40):
        await asyncio.sleep(0.002)
        lengths.observe(request(tenant=f"later{number}"), number, 9)
    deadline_s = time.monotonic() + 20.0
    while len(saved_lengths(store)) < 300 + 2 * 40:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    saving.cancel()
    loaded = saved_lengths(store)
    assert loaded.predict(request(tenant="t7")).observations == 1
    assert loaded.predict(request(tenant="later7"), 7).observations == 1


def test_broken_learned_state_is_ignored(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path)
    store.put("calibrations", b"{")
    store.put("output_lengths", b"\x00")
    assert saved_calibrations(store) == {}
    assert len(saved_lengths(store)) == 0
