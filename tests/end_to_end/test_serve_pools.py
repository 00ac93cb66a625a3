"""What a shared store holds changes where requests of its members are expected to load from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from front_door_process import FrontDoor, front_door

PROMPT = list(range(1000, 3100))
POOLED = 2048

CONFIG = """
emulation: {cluster: "2"}
shared_pools:
  - {id: files, members: [mixed-1]}
  - id: store
    tier: pod
    mooncake: {endpoint: "tcp://127.0.0.1:1", model: emulated-8b, block_size: 16}
"""


def _segments(door: FrontDoor) -> list[dict[str, Any]]:
    """Of the plan of a placement, which has ended by then."""
    answer = door.http.post("/v1/placements", json={"model": "emulated-8b", "token_ids": PROMPT})
    assert answer.status_code == 200, answer.text
    placement_id = answer.json()["placement_id"]
    report = door.http.post(f"/v1/placements/{placement_id}/progress", json={"event": "cancelled"})
    assert report.status_code == 200, report.text
    segments: list[dict[str, Any]] = door.get(f"/v1/placements/{placement_id}")["plan"]["segments"]
    return segments


def test_members_are_expected_to_load_from_their_pool(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG)
    with front_door(tmp_path, "--config", str(config)) as door:
        assert _segments(door) == []
        stored = {
            "event_id": 1,
            "timestamp": 1.0,
            "event_type": "stored",
            "model_name": "emulated-8b",
            "block_size": 16,
            "backend_id": "files",
            "medium": "storage",
            "seq_hashes": list(range(1, 1 + POOLED // 16)),
            "token_ids": PROMPT[:POOLED],
            "base_block_idx": 0,
        }
        assert door.http.post("/v1/events", json=stored).json()["applied"] == 1
        loaded = {"start_token": 0, "stop_token": POOLED, "holder": "mixed-1", "rank": 0, "tier": "remote"}
        assert _segments(door) == [loaded]
        followed = {stream["instance"] for stream in door.get("/v1/cache/streams")["streams"]}
        assert {"files", "store"} <= followed
