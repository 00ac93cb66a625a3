"""Tier actions wait for the budgets of links, and go with the engines that they are for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from front_door_process import front_door

CONFIG = """
emulation: {cluster: "2", restart_after_s: 60}
tiers: {budget: {bytes_per_s: 1}}
"""


@pytest.mark.extended
def test_actions_wait_for_links_and_end_with_their_engine(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG)
    with front_door(tmp_path, "--config", str(config)) as door:

        def ordered() -> Any:
            places = {"source": {"instance": "mixed-0", "tier": "device"}}
            places["target"] = {"instance": "mixed-1", "tier": "device"}
            body = {"model": "emulated-8b", "token_ids": list(range(64)), "copy": True, **places}
            answer = door.http.post("/v1/cache/move", json=body)
            assert answer.status_code == 202, answer.text
            return answer.json()["actions"][0]["id"]

        def action(action_id: str) -> dict[str, Any]:
            return door.get(f"/v1/actions/{action_id}")

        first, second = ordered(), ordered()
        door.wait_until(lambda: action(first)["state"] == "failed", "the source has none of it")
        waiting = "waits for the budget of mixed-0 (out)"
        door.wait_until(lambda: action(second)["detail"] == waiting, "the link has been used up")
        assert action(second)["state"] == "planned"
        os.kill(door.engine_pids()["mixed-1"], signal.SIGKILL)
        door.wait_until(lambda: action(second)["state"] == "cancelled", "its target is down")
        assert action(second)["detail"] == "mixed-1 is gone"
