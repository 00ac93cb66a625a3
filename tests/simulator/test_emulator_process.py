"""The emulator as a process: command line, signals, parents, ranks."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from simulator.emulator.__main__ import arguments, config_from

COMMAND = [sys.executable, "-m", "simulator.emulator", "--model", "m"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_although_a_request_runs(emulator: Any, number: signal.Signals) -> None:
    engine = emulator()
    body = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with engine.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine.process.send_signal(number)
        with pytest.raises(httpx.TransportError):
            for _ in lines:
                pass
    assert engine.process.wait(timeout=10) == 0


def test_it_ends_when_its_parent_is_gone(free_port: int) -> None:
    # A process between us and the emulator plays the parent that dies.
    script = (
        "import subprocess, sys, os;"
        "child = subprocess.Popen([*sys.argv[1:], '--parent-pid', str(os.getpid())]);"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *COMMAND, "--port", str(free_port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None and parent.stdin is not None
    child = int(parent.stdout.readline())
    deadline_s = time.monotonic() + 20
    with httpx.Client() as http:
        while True:
            try:
                if http.get(f"http://127.0.0.1:{free_port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    while is_alive(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie nobody reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_in_use_is_an_error(emulator: Any) -> None:
    engine = emulator()
    for options in (["--port", engine.port], ["--port", 1, "--kv-event-port", engine.event_port]):
        ended = subprocess.run([*COMMAND, *map(str, options)], capture_output=True, timeout=20)
        assert ended.returncode != 0
        assert ended.stdout == b""
        assert b"in use" in ended.stderr
        assert all(msgspec.json.decode(line) for line in ended.stderr.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--port"),
        (["--port", "1", "--speed", "0"], "speed"),
        (["--port", "1", "--kv-blocks", "10", "--max-model-len", "1000"], "does not fit"),
        (["--port", "1", "--dp-size", "2", "--kv-event-port", "5", "--kv-replay-port", "6"], "2 .* apart"),
        (["--port", "1", "--kv-replay-port", "6"], "needs an event port"),
        (["--port", "1", "--role", "cook"], "--role"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = arguments()
    with pytest.raises((SystemExit, ValueError)) as refused:
        config_from(parser.parse_args(["--model", "m", *options]))
    assert re.search(message, f"{refused.value} {capsys.readouterr().err}")


def test_defaults() -> None:
    config = config_from(arguments().parse_args(["--model", "m", "--port", "1"]))
    assert (config.block_size, config.kv_blocks, config.context_tokens) == (16, 28_000, 131_072)
    small = config_from(arguments().parse_args(["--model", "m", "--port", "1", "--kv-blocks", "100"]))
    assert small.context_tokens == 1600


def test_data_parallel_ranks(emulator: Any) -> None:
    engine = emulator("--speed", 20, "--dp-size", 2)
    sources = engine.http.get("/kv_event_sources").json()
    assert [sources[rank]["endpoint"] for rank in "01"] == [
        f"tcp://*:{engine.event_port}",
        f"tcp://*:{engine.event_port + 1}",
    ]

    def cached(rank: int) -> int:
        body = {"prompt": [51] * 40, "max_tokens": 1}
        answer = engine.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(0), cached(1), cached(0), cached(1)] == [0, 0, 32, 32]
    assert 'engine="1"' in engine.http.get("/metrics").text
    refused = engine.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-data-parallel-rank": "2"})
    assert refused.status_code == 400


def test_ranks_are_chosen_by_load(emulator: Any) -> None:
    engine = emulator("--dp-size", 2)
    long = {"prompt": [53] * 40, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with engine.http.stream("POST", "/v1/completions", json=long) as first:
        first_lines = first.iter_lines()  # dropping the iterator would close the stream
        next(first_lines)
        with engine.http.stream("POST", "/v1/completions", json=long) as second:
            second_lines = second.iter_lines()
            next(second_lines)
            running = [
                line.rsplit(" ", 1)[1]
                for line in engine.http.get("/metrics").text.splitlines()
                if line.startswith("vllm:num_requests_running{")
            ]
    assert running == ["1.0", "1.0"]


def test_the_log_is_structured_and_on_stderr(free_port: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--port", str(free_port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    with httpx.Client() as http:
        deadline_s = time.monotonic() + 20
        while True:
            try:
                http.get(f"http://127.0.0.1:{free_port}/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
    process.terminate()
    output, rest = process.communicate(timeout=10)
    assert output == ""
    events = [msgspec.json.decode(line)["event"] for line in [first, *rest.splitlines()]]
    assert events == ["starting", "stopping"]
    assert process.returncode == 0
