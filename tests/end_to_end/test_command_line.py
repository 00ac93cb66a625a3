"""The command line as a user meets it: help, errors, start, Ctrl-C."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import yaml
from front_door_process import alive, children, conductor_command, front_door

from conductor.cli import main


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(conductor_command(*arguments), capture_output=True, text=True, timeout=60)


@dataclass(frozen=True)
class Ended:
    returncode: object
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """A command within this process, which has imported what every command imports."""

    def ended(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["conductor", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return Ended(end.value.code or 0, *capsys.readouterr())

    return ended


COMMANDS = [
    "serve",
    "emulate",
    "replay",
    "sweep",
    "experiment",
    "report",
    "trace",
    "plan",
    "index",
    "top",
    "cache",
    "register",
    "config",
    "warm",
]


def test_every_command_is_listed(run: Callable[..., Ended]) -> None:
    listed = run("--help").stdout
    assert all(command in listed for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Callable[..., Ended], command: str) -> None:
    helped = run(command, "--help")
    assert helped.returncode == 0
    assert "Usage" in helped.stdout


def test_paragraphs_of_help_are_as_wide_as_the_terminal(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "\n scheduler is the one that serves real traffic, and policies are compared on" in (
        run("replay", "--help").stdout
    )
    assert "sizes, and at best at each size (Belady's MIN, which" in " ".join(
        run("trace", "stats", "--help").stdout.split()
    )


def test_the_version_is_printed() -> None:
    assert _run("--version").stdout.startswith("conductor 0.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "nothing to route to"),
        (["serve", "--emulate", "2x"], "'2x' is no cluster shape"),
        (["serve", "--emulate", "1", "--policy", "best"], "unknown policy 'best'"),
        (["serve", "--config", "/nonexistent.yaml"], "cannot read the configuration file /nonexistent.yaml"),
        (["replay", "/nonexistent.jsonl", "--cluster", "2"], "cannot read the trace"),
        (["serve", "--emulate", "1", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (["serve", "--emulate", "1", "--host", "192.0.2.1"], "choose another --host"),
        (["register", "e", "http://x:1", "--url", "x:2"], "--url 'x:2' must look like http://host:port"),
        (["replay", "trace.jsonl"], "One of: conductor replay TRACE --cluster 4p4d"),
        (
            ["replay", "t", "--cluster", "4p"],
            "'4p' is no cluster shape: neither a number of mixed instances (8)",
        ),
        (["experiment", "run", "all"], "there is no experiment 'all'"),
        (["register", "e", "10.0.0.1:8000"], "url '10.0.0.1:8000' must look like http://host:port"),
        (["register", "e", "http://x:1", "--set", "rnks=2"], "unknown key 'rnks'; did you mean 'ranks'?"),
    ],
)
def test_mistakes_are_one_clear_message(run: Callable[..., Ended], arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_a_command_is_loaded_is_one_line(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert run("serve") == Ended(130, "", "conductor: interrupted\n")


def test_a_wrong_key_in_the_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("instances:\n  - {id: a, url: 'http://127.0.0.1:1', rolle: prefill}\n")
    done = _run("serve", "--config", str(path))
    assert done.returncode == 2
    assert "unknown key 'instances.0.rolle'; did you mean 'role'?" in done.stderr


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"models: [{{name: m, tokenizer: {tmp_path}}}]\nemulation: {{cluster: '1'}}\n")
    done = _run("serve", "--config", str(path))
    assert done.returncode == 2
    assert "the tokenizer of 'm' cannot be loaded" in done.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run("serve", "--emulate", "1", "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


def test_a_port_in_use_that_an_emulated_engine_was_to_have_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run("emulate", "2", "--base-port", str(port))
    assert done.returncode == 2
    assert f"emulation.base_port: 127.0.0.1:{port} cannot be had (Address already in use)" in done.stderr
    assert "choose another --base-port" in done.stderr
    assert done.stdout == ""


def test_the_effective_configuration_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("server: {port: 9000}\n")
    monkeypatch.setenv("CONDUCTOR_SCHEDULING__POLICY", "random")
    effective = yaml.safe_load(_run("config", "--config", str(path)).stdout)
    assert effective["server"]["port"] == 9000
    assert effective["scheduling"]["policy"] == "random"
    assert effective["health"]["interval_s"] == 1.0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_nothing_behind(tmp_path: Path, signum: int) -> None:
    with front_door(tmp_path, "--emulate", "1p1d") as door:
        door.wait_until(lambda: "Ctrl-C" in door.log.read_text(), "the announcement")
        engines = [*door.engine_pids().values(), *children(door.process.pid)]
        assert len(engines) == 3
        assert door.stop(signum) == 0
        assert not [pid for pid in engines if alive(pid)]
        printed = door.log.read_text()
        assert "curl" in printed
        assert "prefill-0" in printed
        assert "Traceback" not in printed


@pytest.mark.extended
def test_killing_the_front_door_ends_its_engines(tmp_path: Path) -> None:
    with front_door(tmp_path, "--emulate", "1") as door:
        door.wait_until(lambda: len(door.engine_pids()) == 1, "the engine's start")
        engines = [*door.engine_pids().values(), *children(door.process.pid)]
        door.process.kill()
        door.process.wait()
        door.wait_until(lambda: not [pid for pid in engines if alive(pid)], "the engines ending")


def test_a_stream_under_way_survives_the_stop(tmp_path: Path) -> None:
    with front_door(tmp_path, "--emulate", "1") as door:
        body = {"model": "emulated-8b", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with door.http.stream("POST", "/v1/completions", json=body) as response:
            received = response.iter_bytes()
            text = next(received)
            door.process.send_signal(signal.SIGTERM)
            text += b"".join(received)
        assert text.rstrip().endswith(b"data: [DONE]")
        assert text.count(b'"text"') >= 100
        assert door.process.wait(timeout=30) == 0


def test_real_engines_listed_in_a_file(tmp_path: Path) -> None:
    """`conductor emulate` in place of real engines; its output is the file that `serve --config` reads."""
    emulate = subprocess.Popen(
        conductor_command("emulate", "2", "--base-port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert emulate.stdout is not None
    try:
        lines = [emulate.stdout.readline().decode() for _ in range(7)]
        path = tmp_path / "cluster.yaml"
        path.write_text("".join(lines))
        assert len(yaml.safe_load(path.read_text())["instances"]) == 2
        with (
            front_door(tmp_path, "--config", str(path)) as door,
            openai.OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=0) as client,
        ):
            door.wait_until(
                lambda: all(i["health"] == "up" for i in door.instances().values()), "both engines being up"
            )
            raw = client.completions.with_raw_response.create(
                model="emulated-8b", prompt="hello " * 100, max_tokens=2
            )
            why = door.get(f"/v1/placements/{raw.headers['x-conductor-placement-id']}")
            assert why["token_source"] == "engine", "no tokenizer is configured, so an engine is asked"
            assert why["prompt_tokens"] == raw.parse().usage.prompt_tokens
            assert why["disaggregated"] is False
    finally:
        emulate.stdout.close()
        emulate.send_signal(signal.SIGINT)
        assert emulate.wait(timeout=30) == 0
