"""`conductor top` over a real server: one frame, JSON, and live on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from front_door_process import FrontDoor, conductor_command, front_door
from rich.console import Console

from conductor.cli.top_figures import Figures
from conductor.cli.top_frame import SORTS, frame, height

KEY = "top-key-1a2b3c"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Two prefill and two decode engines that have served; the REST API takes a key."""
    env = {"CONDUCTOR_SERVER__ADMIN_TOKEN": KEY}
    arguments = ("--emulate", "2p2d", "--emulate-speed", "10")
    bearer = {"authorization": f"Bearer {KEY}"}
    with front_door(tmp_path_factory.mktemp("top"), *arguments, env=env, headers=bearer) as opened:
        body = {"model": "emulated-8b", "prompt": "What is a cache? " * 200, "max_tokens": 9, "stream": True}
        for _ in range(3):
            assert opened.http.post("/v1/completions", json=body).status_code == 200
        opened.wait_until(lambda: opened.get("/v1/cluster")["window"]["ended"], "requests ended")
        yield opened


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = conductor_command("top", *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def test_one_frame_where_there_is_no_terminal(door: FrontDoor) -> None:
    shown = run("--url", door.url, "--token", KEY)
    assert (shown.returncode, shown.stderr) == (0, "")
    for expected in (
        "4 of 4 up",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "goal 2.00 s",
        "refused 0",
    ):
        assert expected in shown.stdout
    assert "\x1b" not in shown.stdout
    reuse = door.get("/v1/cluster")["window"]["token_reuse_planned"]
    assert f"prompt tokens reused {reuse * 100:.1f}%" in shown.stdout


def test_as_json_by_the_environment(door: FrontDoor) -> None:
    told = run("--json", CONDUCTOR_URL=door.url, CONDUCTOR_SERVER__ADMIN_TOKEN=KEY)
    document = json.loads(told.stdout)
    assert [row["id"] for row in document["instances"]] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert document["cluster"]["window"]["placed"] == 3
    assert document["problems"] == [] and set(document["actions"]) >= {"planned", "running"}


def test_what_is_wrong_is_said_in_one_line(door: FrontDoor) -> None:
    without = run("--url", door.url, "--once")
    assert without.returncode == 2 and "takes an administrator's key" in without.stderr
    away = run("--url", "http://127.0.0.1:9", "--once")
    assert away.returncode == 2 and "cannot reach http://127.0.0.1:9" in away.stderr
    assert away.stderr.count("\n") == 1
    unknown = run("--url", door.url, "--sort", "colour")
    assert unknown.returncode == 2 and "kv" in unknown.stderr
    assert KEY not in door.log.read_text()


class Terminal:
    """`conductor top` on a pseudo-terminal of 40 lines and 120 columns."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self.shown = ""

    def wait_for(self, text: str, within_s: float = 20.0) -> None:
        """Until it has been written since the last call."""
        deadline_s = time.monotonic() + within_s
        seen = ""
        while text not in seen:
            assert time.monotonic() < deadline_s, f"{text!r} was not shown: {seen[-2000:]}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                seen += os.read(self._descriptor, 65_536).decode(errors="replace")

    def end(self, within_s: float = 20.0) -> int:
        """The exit code. What is written until then is read: a terminal that nobody reads holds its writer up."""
        deadline_s = time.monotonic() + within_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline_s, "it did not end"
            with contextlib.suppress(OSError):  # it has closed its end
                if select.select([self._descriptor], [], [], 0.1)[0]:
                    os.read(self._descriptor, 65_536)
        return code

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    command = conductor_command("top", *arguments)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def test_live_on_a_terminal(door: FrontDoor) -> None:
    with terminal("--url", door.url, "--token", KEY, "--interval-s", "0.3") as shown:
        shown.wait_for("prefill-1")
        shown.wait_for("sorted by name")
        for name in list(SORTS)[1:]:
            shown.press("s")
            shown.wait_for(f"sorted by {name}")
        shown.press("q")
        assert shown.end() == 0


def test_a_server_that_goes_is_asked_again(tmp_path: Path) -> None:
    with (
        front_door(tmp_path, "--emulate", "1") as short,
        terminal("--url", short.url, "--interval-s", "0.3") as shown,
    ):
        shown.wait_for("mixed-0")
        assert short.stop() == 0
        shown.wait_for("trying again: cannot reach")
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 0


def test_a_frame_has_no_more_lines_than_the_terminal() -> None:
    row = {
        **{"id": "p", "health": "up", "retry_in_s": None, "kv_usage": 0.5, "queue_ms": 10.0},
        **{"pending_prefills": 1, "active_decodes": 2, "engine_running": None, "engine_waiting": None},
        **{f"{tier}_blocks": 10 for tier in ("device", "host", "disk", "pod", "remote")},
        **{"block_size": 16, "kv_bytes_per_token": 131072},
    }
    rows = [{**row, "id": f"{role}-{n}", "role": role} for role in ("prefill", "decode") for n in range(300)]
    window = dict.fromkeys(
        ("goodput_share", "ttft_attainment", "tbt_attainment", "token_reuse_planned", "token_reuse_reported")
    )
    window["token_reuse_reported_of"] = None
    window |= {f"{of}_{p}_ms": None for of in ("ttft", "tbt") for p in ("p50", "p90", "p99")}
    window |= {"requests_per_s": 0.0, "goodput_per_s": 0.0, "refused": 0}
    cluster = {
        "instances": {"total": 600, "by_health": {"up": 600}},
        "now": {
            "active_placements": 0,
            "queue_mean_ms": None,
            "queue_max_ms": None,
            "kv_usage_mean": None,
            "kv_usage_max": None,
        },
        "window": window,
        "objectives": {"ttft_ms": 2000.0, "tbt_ms": 50.0},
        "policy": "slo",
    }
    problem = {"severity": "warning", "says": "an instance is down"}
    figures = Figures(cluster, rows, {"planned": 0}, [problem] * 5)
    for lines in (24, 40, 100):
        console = Console(width=100, height=lines, record=True, file=io.StringIO())
        room = lines - height(figures)
        console.print(frame(figures, "name", room, "the last line"))
        text = console.export_text()
        assert len(text.splitlines()) <= lines, text
        assert "the last line" in text and "prefill-0" in text and "decode-0" in text and "more" in text
