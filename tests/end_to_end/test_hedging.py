"""An engine that stands still is late long before it is down: a second one answers meanwhile."""

import os
import signal
from pathlib import Path

from front_door_process import front_door

MODEL = "emulated-8b"
CONFIG = "routing: {hedge_quantile: 0.9, hedge_least_s: 0.3}\n"


def test_a_second_engine_answers_for_one_that_stands_still(tmp_path: Path) -> None:
    config = tmp_path / "conductor.yaml"
    config.write_text(CONFIG)
    options = ("--emulate", "2", "--emulate-speed", "20", "--config", str(config))
    with front_door(tmp_path, *options) as door:
        body = {"model": MODEL, "prompt": list(range(5, 325)), "max_tokens": 2}
        for _ in range(70):  # until it is known what is late
            answer = door.http.post("/v1/completions", json=body)
        query = {"model": MODEL, "token_ids": body["prompt"]}
        victim = door.http.post("/v1/placements?dry_run=true", json=query).json()["decode_instance"]
        pid = door.engine_pids()[victim]
        os.kill(pid, signal.SIGSTOP)
        try:
            hedged = door.http.post("/v1/completions", json=body)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert hedged.status_code == 200
        assert hedged.json()["choices"] == answer.json()["choices"]
        other = hedged.headers["x-conductor-decode-instance"]
        assert (other != victim, hedged.headers["x-conductor-attempts"]) == (True, "2")
        placement = door.get(f"/v1/placements/{hedged.headers['x-conductor-placement-id']}")
        assert f"asked beside placement {placement['hedge_of']}, which was late" in placement["why"]
        assert placement["excluded"] == {victim: "has this request already"}
        left = door.get(f"/v1/placements/{placement['hedge_of']}")
        assert (left["prefill_instance"], left["outcome"]) == (victim, "cancelled")
        assert door.samples()['conductor_hedges_total{outcome="won"}'] >= 1
