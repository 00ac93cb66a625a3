"""The real command line: decisions of a running front door are recorded, and decided again."""

import json
import subprocess
from pathlib import Path

import pytest
from front_door_process import conductor_command, front_door


@pytest.mark.extended
def test_decisions_of_a_running_cluster_replay_to_the_last_bit(tmp_path: Path) -> None:
    recording = tmp_path / "decisions.jsonl"
    options = ("--emulate", "2p2d", "--emulate-speed", "20", "--record", str(recording))
    with front_door(tmp_path, *options) as door:
        for i in range(12):
            question = {"role": "user", "content": f"{i % 3} " + "and so on " * 200}
            body = {"model": "emulated-8b", "messages": [question], "max_tokens": 12, "stream": i % 2 == 0}
            assert door.http.post("/v1/chat/completions", json=body).status_code == 200
        asked = {"model": "emulated-8b", "text": "a prompt that is tokenized here"}
        placement = door.http.post("/v1/placements", json=asked).json()
        assert placement["token_source"] == "local"
        progress = f"/v1/placements/{placement['placement_id']}/progress"
        assert door.http.post(progress, json={"event": "finished"}).json()["outcome"] == "finished"
        leaving = door.instances()["prefill-1"]
        assert door.http.delete("/v1/instances/prefill-1").json()["status"] == "removed"
        again = {"url": leaving["url"], "role": "prefill"}
        assert door.http.put("/v1/instances/prefill-9", json=again).status_code == 201
        door.wait_until(door.all_up, "the instance under its new name is up")
        assert "prefill-9" in door.instances()
        assert door.http.post("/v1/placements", json=asked).status_code == 200
    result = subprocess.run(
        conductor_command("replay", "--decisions", str(recording), "--json", "-"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    figures = json.loads(result.stdout)
    assert (result.returncode, figures["equal"], figures["decisions"]) == (0, True, 14)
    assert figures["ended"] == "closed"
