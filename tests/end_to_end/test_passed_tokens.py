"""An engine that gets token ids answers as the one that got the text."""

from pathlib import Path
from typing import Any

from front_door_process import FrontDoor, front_door

ASKED: dict[str, Any] = {"prompt": "Where does the time go? " * 20, "max_tokens": 20, "temperature": 0}


def test_the_answer_is_the_same(tmp_path: Path, cluster: FrontDoor) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("models:\n  - {name: emulated-8b, pass_tokens: true}\n")
    expected = cluster.http.post("/v1/completions", json={"model": "emulated-8b", **ASKED}).json()
    options = ("--emulate", "1p1d", "--emulate-speed", "20", "--config", str(config))
    with front_door(tmp_path, *options) as door:
        answer = door.http.post("/v1/completions", json={"model": "emulated-8b", **ASKED}).json()
        assert door.samples()["conductor_prompts_passed_as_tokens_total"] == 1
    for document in (expected, answer):
        del document["id"], document["created"]
        document.pop("kv_transfer_params", None)
        del document["usage"]["prompt_tokens_details"]
    assert answer == expected
