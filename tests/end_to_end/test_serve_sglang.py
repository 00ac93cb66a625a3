"""`conductor serve` over engines that hand over as SGLang's do: both legs at once, meeting in a room."""

import os
import signal
import threading
from pathlib import Path

from front_door_process import front_door

MODEL = "emulated-8b"
SGLANG = {"CONDUCTOR_EMULATION__PROTOCOL": "sglang"}


def test_answers_are_those_of_one_engine_and_survive_a_prefill_engine(tmp_path: Path) -> None:
    options = ("--emulate", "2p1d", "--emulate-speed", "10")
    with front_door(tmp_path, *options, env=SGLANG) as door:
        body = {"model": MODEL, "prompt": list(range(100, 400)), "max_tokens": 12}
        answers = [door.http.post("/v1/completions", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        short = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        streamed = door.http.post("/v1/chat/completions", json=short)
        assert streamed.text.endswith("data: [DONE]\n\n")
        # Even what a decode engine could compute at once goes through a prefill engine.
        for answer in (*answers, streamed):
            assert answer.headers["x-conductor-prefill-instance"].startswith("prefill-")
            assert answer.headers["x-conductor-decode-instance"] == "decode-0"
            assert answer.headers["x-conductor-attempts"] == "1"
        victim = answers[-1].headers["x-conductor-prefill-instance"]
        pid = door.engine_pids()[victim]
        os.kill(pid, signal.SIGSTOP)  # it takes the request, and never computes it
        killer = threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL))
        killer.start()
        answer = door.http.post("/v1/completions", json=body)
        killer.join()
        assert answer.status_code == 200
        assert answer.json()["choices"] == answers[0].json()["choices"]
        assert answer.headers["x-conductor-prefill-instance"] != victim
