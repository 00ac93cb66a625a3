"""What router workers cost: `conductor serve` as one process and with two workers; engines answer at once.

Engines are one process, the load client another, and everything shares the machine's cores: where there are few,
requests/s say little. CPU per request does not depend on that: a worker's says how many workers a load needs, the
conductor's how many requests/s one conductor can place at most. Both deployments run at the same time and are
loaded in turn, so that the machine's other work troubles them alike.

Workloads: ``tokens`` (a prompt of 200 token ids), ``chat`` (4 KB of new text, tokenized by the router). Latencies
at a low rate are those of one connection with a pause after every answer, the deployments asked in turn; what
workers add is the socket to the conductor, both ways, and being two processes that sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import uvloop
import yaml

MODEL = "bench"
TOKENIZER = Path(__file__).parents[1] / "simulator" / "emulator" / "tokenizer"
ENGINES = 4
WORKERS = 2
READY_WITHIN_S = 90.0
ANSWER = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"bench","choices":[{"index":0,"text":"hello",'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":200,"total_tokens":205,"completion_tokens":5}}'
)
MODELS = json.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131_072}]}
).encode()
GAUGES = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0\n'
WORDS = (
    "the",
    "of",
    "and",
    "router",
    "in",
    "is",
    "that",
    "cache",
    "it",
    "as",
    "was",
    "with",
    "be",
    "token",
    "by",
    "on",
)


def response(body: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        content_type,
        len(body),
        body,
    )


PROBES = {
    b"GET /health ": response(b""),
    b"GET /v1/models ": response(MODELS),
    b"GET /metrics ": response(GAUGES, content_type=b"text/plain; version=0.0.4"),
}


class Engine(asyncio.Protocol):
    """Answers probes as vLLM does, and every other request with the same few words."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            asked, self.buffer = self.buffer[:end], self.buffer[end + 4 + length :]
            if asked.startswith(b"POST"):
                self.transport.write(response(ANSWER))
            else:
                known = (answer for start, answer in PROBES.items() if asked.startswith(start))
                self.transport.write(next(known, response(b"{}", b"404 Not Found")))


class Client(asyncio.Protocol):
    """One connection; ``ask`` is answered with the seconds it took."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    async def ask(self, request: bytes) -> float:
        self.answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.sent_s = time.perf_counter()
        self.transport.write(request)
        return await self.answer

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        if not self.buffer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request failed: {self.buffer[:500].decode()}")
        at = self.buffer.index(b"content-length: ", 0, end) + 16
        if len(self.buffer) < end + 4 + int(self.buffer[at : self.buffer.index(b"\r\n", at)]):
            return
        self.buffer = b""
        self.answer.set_result(time.perf_counter() - self.sent_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if getattr(self, "answer", None) is not None and not self.answer.done():
            self.answer.set_exception(ConnectionResetError("the front door closed the connection"))


class Requests:
    """Requests of one workload, each with a prompt of its own."""

    def __init__(self, workload: str) -> None:
        self.chat = workload == "chat"
        self.random = random.Random(workload)
        self.numbers = itertools.count()

    def __next__(self) -> bytes:
        if self.chat:
            text = " ".join(self.random.choices(WORDS, k=1_100))
            document: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"{next(self.numbers)} {text}"}]
            }
        else:
            document = {"prompt": self.random.choices(range(100, 30_000), k=200)}
        body = json.dumps({"model": MODEL, "max_tokens": 5, **document}).encode()
        path = b"chat/completions" if self.chat else b"completions"
        return (
            b"POST /v1/%b HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        ) % (path, len(body), body)


class Deployment:
    """A running `conductor serve`."""

    def __init__(self, name: str, config: Path, workers: int) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = (
            "-m", "conductor.cli", "serve", "--config", str(config), "--port", str(self.port),
            "--workers", str(workers), "--log-level", "error",
        )  # fmt: skip
        self.process = subprocess.Popen((sys.executable, *command), stderr=subprocess.DEVNULL)

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                url = f"http://127.0.0.1:{self.port}/v1/instances"
                instances = json.load(urllib.request.urlopen(url, timeout=10))["instances"]
                if all(instance["health"] == "up" for instance in instances):
                    return
            except (urllib.error.URLError, OSError):
                pass
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{self.name} did not become ready")
            time.sleep(0.1)

    def cpu_s(self) -> tuple[float, float]:
        """Of the conductor's process, and of all workers."""
        return cpu_seconds(self.process.pid), sum(map(cpu_seconds, self.worker_pids()))

    def worker_pids(self) -> list[int]:
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                if b"conductor.cli.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    def resident_mib(self) -> dict[str, float]:
        pages = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.worker_pids()}
        own = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        mib = os.sysconf("SC_PAGE_SIZE") / 2**20
        return {
            "conductor_mib": round(own * mib),
            "worker_mib": round(sum(pages.values()) * mib / len(pages)) if pages else 0,
        }

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def throughput(
    deployment: Deployment, workload: str, connections: int, seconds: float
) -> dict[str, Any]:
    """Closed loop: every connection asks again when it is answered."""
    requests = [Requests(f"{workload}")]
    prepared = [next(requests[0]) for _ in range(2_000)]
    following = itertools.cycle(prepared)
    clients = [await connect(deployment.port) for _ in range(connections)]
    latencies_s: list[float] = []
    ending = False

    async def drive(client: Client) -> None:
        while not ending:
            latencies_s.append(await client.ask(next(following)))

    tasks = [asyncio.create_task(drive(client)) for client in clients]
    await asyncio.sleep(seconds / 3)
    before, started_s = deployment.cpu_s(), time.perf_counter()
    latencies_s.clear()
    await asyncio.sleep(seconds)
    count, elapsed_s, after = len(latencies_s), time.perf_counter() - started_s, deployment.cpu_s()
    ending = True
    await asyncio.gather(*tasks)
    for client in clients:
        client.transport.close()
    conductor_us, workers_us = ((b - a) / count * 1e6 for a, b in zip(before, after, strict=True))
    latencies_s.sort()
    return {
        "deployment": deployment.name,
        "workload": workload,
        "requests_per_s": round(count / elapsed_s, 1),
        "conductor_cpu_us_per_request": round(conductor_us, 1),
        "worker_cpu_us_per_request": round(workers_us, 1),
        "p50_ms": round(latencies_s[len(latencies_s) // 2] * 1e3, 2),
        "p99_ms": round(latencies_s[int(len(latencies_s) * 0.99)] * 1e3, 2),
    }


async def quiet_latency(deployments: list[Deployment], count: int) -> list[dict[str, Any]]:
    """One request at a time, the deployments in turn, with a pause between."""
    clients = [await connect(deployment.port) for deployment in deployments]
    requests = Requests("tokens")
    latencies_s: list[list[float]] = [[] for _ in clients]
    for number in range(count + 20):
        for client, taken in zip(clients, latencies_s, strict=True):
            latency_s = await client.ask(next(requests))
            if number >= 20:
                taken.append(latency_s)
            await asyncio.sleep(0.005)
    rows = []
    for deployment, client, taken in zip(deployments, clients, latencies_s, strict=True):
        client.transport.close()
        taken.sort()
        p50, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
        rows.append({"deployment": deployment.name, "p50_us": round(p50 * 1e6), "p99_us": round(p99 * 1e6)})
    return rows


def run_engines() -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=1024) for _ in range(ENGINES)]
        print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
        await asyncio.gather(*(server.serve_forever() for server in servers))

    uvloop.run(serve())


async def measure(deployments: list[Deployment], seconds: float, asked: int) -> dict[str, Any]:
    rows = [
        await throughput(deployment, workload, 64, seconds)
        for workload in ("tokens", "chat")
        for deployment in deployments
    ]
    quiet = await quiet_latency(deployments, asked)
    added = {name: quiet[1][name] - quiet[0][name] for name in ("p50_us", "p99_us")}
    return {
        "rows": rows,
        "quiet": quiet,
        "added_by_workers": added,
        "memory": {deployment.name: deployment.resident_mib() for deployment in deployments},
        "requests_per_s_that_fill_one_core": {
            row["workload"]: {
                "worker": round(1e6 / row["worker_cpu_us_per_request"]),
                "conductor": round(1e6 / row["conductor_cpu_us_per_request"]),
            }
            for row in rows
            if row["worker_cpu_us_per_request"]
        },
    }


def run_all(seconds: float, asked: int) -> dict[str, Any]:
    engines = subprocess.Popen([sys.executable, __file__, "--engines"], stdout=subprocess.PIPE, text=True)
    assert engines.stdout is not None
    deployments: list[Deployment] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            ports = engines.stdout.readline().split()
            config = Path(folder) / "bench.yaml"
            document = {
                "instances": [
                    {"id": f"e{i}", "url": f"http://127.0.0.1:{port}", "instance_class": "llama-3.1-8b-h100"}
                    for i, port in enumerate(ports)
                ],
                "models": [{"name": MODEL, "tokenizer": str(TOKENIZER)}],
            }
            config.write_text(yaml.safe_dump(document))
            deployments.append(Deployment("one process", config, 1))
            deployments.append(Deployment(f"{WORKERS} workers", config, WORKERS))
            for deployment in deployments:
                deployment.wait_until_ready()
            figures = uvloop.run(measure(deployments, seconds, asked))
        finally:
            for deployment in deployments:
                deployment.stop()
            engines.kill()
            engines.wait()
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
    return {
        "benchmark": "workers",
        "machine": {**machine, "python": platform.python_version()},
        "seconds": seconds,
        **figures,
    }


def print_table(result: dict[str, Any]) -> None:
    for name in ("rows", "quiet"):
        columns = list(result[name][0])
        print("".join(f"{column:>30}" for column in columns))
        for row in result[name]:
            print("".join(f"{row[column]:>30}" for column in columns))
    for name in ("added_by_workers", "requests_per_s_that_fill_one_core", "memory"):
        print(f"{name}: {result[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="shorter runs, under 50 s in all")
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engines:
        run_engines()
        return
    result = run_all(1.5, 100) if arguments.quick else run_all(8.0, 1_000)
    if arguments.json:
        print(json.dumps(result))
    else:
        print_table(result)


if __name__ == "__main__":
    main()
