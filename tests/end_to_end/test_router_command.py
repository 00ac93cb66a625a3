"""`conductor router` over two conductors: one is killed while streams are under way, then the other."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from front_door_process import conductor_command, free_port, front_door
from waiting import wait_for

from conductor import __version__

pytestmark = pytest.mark.slow

ENVIRONMENT = {"CONDUCTOR_SERVER__ADMIN_TOKEN": "admin-word"}
KEY = {"authorization": "Bearer admin-word"}


def ask(url: str, tokens: int, *, stream: bool = False) -> httpx.Response:
    body = {
        "model": "emulated-8b", "prompt": list(range(300, 340)), "max_tokens": tokens, "stream": stream,
        "ignore_eos": True,
    }  # fmt: skip
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


@pytest.mark.extended
@pytest.mark.timeout(240)
def test_conductors_are_killed_and_streams_go_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        first = stack.enter_context(
            front_door(
                tmp_path, "--emulate", "2", env=ENVIRONMENT | {"CONDUCTOR_SERVER__ROUTERS_PORT": str(ports[0])},
                headers=KEY,
            )
        )  # fmt: skip
        file = tmp_path / "second.yaml"
        urls = {name: each["url"] for name, each in first.instances().items()}
        file.write_text(f"instances: [{', '.join(f'{{id: {n}, url: {u!r}}}' for n, u in urls.items())}]\n")
        second = stack.enter_context(
            front_door(
                tmp_path, "--config", str(file),
                env=ENVIRONMENT | {"CONDUCTOR_SERVER__ROUTERS_PORT": str(ports[1])}, headers=KEY,
            )
        )  # fmt: skip
        port = free_port()
        log = stack.enter_context((tmp_path / "router.log").open("wb"))
        arguments = [part for each in reversed(ports) for part in ("--conductor", f"127.0.0.1:{each}")]
        router = subprocess.Popen(
            conductor_command("router", "--port", str(port), *arguments),
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
        stack.callback(router.wait, 30)
        stack.callback(router.send_signal, signal.SIGINT)
        url = f"http://127.0.0.1:{port}"

        def health() -> dict:
            try:
                return httpx.get(f"{url}/health", trust_env=False).json()
            except httpx.TransportError:
                return {}

        wait_for(lambda: health().get("status") == "ok" and all(health()["conductors"].values()))
        assert ask(url, 4).status_code == 200
        models = httpx.get(f"{url}/v1/models", headers=KEY, trust_env=False).json()
        assert [each["id"] for each in models["data"]] == ["emulated-8b"]
        answers: list[httpx.Response] = []
        streams = [
            threading.Thread(target=lambda: answers.append(ask(url, 400, stream=True))) for _ in range(3)
        ]
        for stream in streams:
            stream.start()
        wait_for(lambda: second.samples()["conductor_active_placements"] == 3)
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        began_s = time.monotonic()
        assert ask(url, 4).status_code == 200
        assert time.monotonic() - began_s < 10.0
        wait_for(lambda: health()["conductor"] == f"127.0.0.1:{ports[0]}")
        for stream in streams:
            stream.join()
        assert [answer.text.count("data: {") for answer in answers] == [400] * 3
        assert all(answer.text.rstrip().endswith("data: [DONE]") for answer in answers)
        # The embedded engines are the first conductor's: it stands still, and they go on.
        first.process.send_signal(signal.SIGSTOP)
        try:
            wait_for(lambda: health()["conductor"] is None)
            assert ask(url, 4).status_code == 200
            metrics = httpx.get(f"{url}/metrics", trust_env=False).text
            assert "conductor_router_local_placements_total 1.0" in metrics
            assert f'version="{__version__}"' in metrics
        finally:
            first.process.send_signal(signal.SIGCONT)
        wait_for(lambda: health()["conductor"] == f"127.0.0.1:{ports[0]}")
        assert ask(url, 4).status_code == 200


@pytest.mark.extended
def test_what_cannot_be_is_said() -> None:
    for arguments, said in (
        (("--conductor", "nowhere"), "must look like HOST:PORT"),
        (("--conductor", "127.0.0.1:1"), "CONDUCTOR_SERVER__ADMIN_TOKEN"),
    ):
        done = subprocess.run(conductor_command("router", *arguments), capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
