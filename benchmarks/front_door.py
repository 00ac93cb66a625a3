"""Throughput of the front door on one core, next to the engine alone and to a FastAPI + httpx proxy.

Three processes take part: a minimal engine, the proxy that is measured, and a closed-loop load client. With
two or more cores the proxy has one to itself; engine and client share another. The placement service is
trivial and prompts are not tokenized: this is the cost of the data path alone. Compare figures of one run
with each other: the ratios carry over to other machines, the absolute numbers do not. Where the load client
is the limit, ``requests_per_core_s`` (requests per CPU second of the proxy) says what the proxy could do.

Workloads: ``small`` (64 connections, a short chat answered at once), ``burst`` (64 streams of 64 events,
sent as fast as they are read), ``paced`` (256 streams, an event every 10 ms, the load is fixed at 25,600
events/s: read the CPU column).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `router` is the package, not the script here

MODEL = "bench"
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":12,"total_tokens":17,"completion_tokens":5}}'
)
COMMON_HEAD = b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
JSON_RESPONSE = COMMON_HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
STREAM_HEAD = (
    COMMON_HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Workload:
    name: str
    connections: int
    events: int = 0
    gap_ms: int = 0

    @property
    def request(self) -> bytes:
        document: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say hello to the world in one short sentence."}],
            "max_tokens": self.events or 16,
        }
        if self.events:
            document |= {"stream": True, "seed": self.gap_ms}
        body = json.dumps(document).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\naccept: */*\r\n"
            b"authorization: Bearer none\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        ) % (len(body), body)


WORKLOADS = (
    Workload("small", connections=64),
    Workload("burst", connections=64, events=64),
    Workload("paced", connections=256, events=100, gap_ms=10),
)


class Engine(asyncio.Protocol):
    """Answers every request without looking further than its length, limit and pace."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        head_end = data.find(b"\r\n\r\n")
        self.buffer = data
        if head_end < 0:
            return
        at = data.lower().find(b"content-length: ") + 16
        if len(data) < head_end + 4 + int(data[at : data.index(b"\r\n", at)]):
            return
        self.buffer = b""
        if b'"stream"' not in data:
            self.transport.write(JSON_RESPONSE)
            return
        document = json.loads(data[head_end + 4 :])
        events, gap_s = document["max_tokens"], document["seed"] / 1e3
        if gap_s:
            self.transport.write(STREAM_HEAD + CHUNK)
            self.send_later(events - 1, gap_s, self.loop.time())
        else:
            self.transport.write(STREAM_HEAD + CHUNK * events + DONE)

    def send_later(self, events: int, gap_s: float, last_s: float) -> None:
        self.loop.call_at(last_s + gap_s, self.send_event, events, gap_s, last_s + gap_s)

    def send_event(self, events: int, gap_s: float, due_s: float) -> None:
        if self.transport.is_closing():
            return
        if events == 0:
            self.transport.write(DONE)
        else:
            self.transport.write(CHUNK)
            self.send_later(events - 1, gap_s, due_s)


async def run_engine(_: argparse.Namespace) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def run_front_door(arguments: argparse.Namespace) -> None:
    import logging

    import structlog

    from conductor.placement import (
        InstanceFailure,
        ModelCard,
        Placement,
        PlacementRequest,
        PrefixPlan,
        Target,
        Usage,
    )
    from router import FrontDoorServer, RouterServices, RouterSettings, create_app

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    port = arguments.engine_port
    engine = Target("engine-0", f"http://127.0.0.1:{port}", "127.0.0.1", port)

    class OneEngine:
        """Places everything on the only engine."""

        def __init__(self) -> None:
            self.numbers = itertools.count()

        def place(self, request: PlacementRequest, now_s: float) -> Placement:
            number = next(self.numbers)
            plan = PrefixPlan(tokens=0, segments=(), fetch_s=0.0, prefill_s=0.01)
            return Placement(
                f"p{number}", request.request_id, request.model, engine, engine, 0, plan, 0.01, 0.01
            )

        def prefill_finished(self, placement_id: str, now_s: float) -> None: ...

        def first_token(self, placement_id: str, now_s: float) -> None: ...

        def finished(self, placement_id: str, now_s: float, usage: Usage) -> None: ...

        def cancelled(self, placement_id: str, now_s: float) -> None: ...

        def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None: ...

        def models(self) -> list[ModelCard]:
            return [ModelCard(MODEL, None, 1)]

    services = RouterServices(OneEngine(), settings=RouterSettings(log_requests=False))
    server = FrontDoorServer(create_app(services), services, port=0)
    await server.start()
    print(server.port, flush=True)
    await server.wait_closed()


async def run_plain_proxy(arguments: argparse.Namespace) -> None:
    """What one writes first: FastAPI in front, httpx behind, the response streamed through."""
    import socket

    import httpx
    import uvicorn

    app = FastAPI()
    client = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{arguments.engine_port}",
        timeout=60,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )

    @app.post("/v1/chat/completions")
    async def proxy(request: Request) -> StreamingResponse:
        headers = {"content-type": "application/json"}
        asked = client.build_request(
            "POST", "/v1/chat/completions", content=await request.body(), headers=headers
        )
        answer = await client.send(asked, stream=True)

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                yield piece
            await answer.aclose()

        return StreamingResponse(pieces(), answer.status_code, media_type=answer.headers["content-type"])

    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listening.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[listening])


class Load(asyncio.Protocol):
    """One connection of the client: the next request follows the last response."""

    request = b""
    latencies_s: list[float]
    events = 0
    first_error = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.need = 0
        self.head = b""
        self.send()

    def send(self) -> None:
        self.sent_s = time.perf_counter()
        self.need = -1
        self.transport.write(Load.request)

    def data_received(self, data: bytes) -> None:
        if self.need == -1:
            data = self.head + data
            head_end = data.find(b"\r\n\r\n")
            if head_end < 0:
                self.head = data
                return
            self.head = b""
            if not data.startswith(b"HTTP/1.1 200"):
                Load.first_error = Load.first_error or data[:200].decode("latin-1")
                self.transport.close()
                return
            at = data.lower().find(b"content-length: ", 0, head_end)
            if at >= 0:
                self.need = head_end + 4 + int(data[at + 16 : data.index(b"\r\n", at)])
            else:
                self.need = 0  # chunked
        if self.need:
            self.need -= len(data)
            if self.need == 0:
                self.answered()
        else:
            Load.events += data.count(b"data: {")
            if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
                self.answered()

    def answered(self) -> None:
        Load.latencies_s.append(time.perf_counter() - self.sent_s)
        self.send()


async def run_client(arguments: argparse.Namespace) -> None:
    """Print requests/s, events/s, latencies, and the CPU seconds that process ``watch`` used meanwhile."""
    workload = next(one for one in WORKLOADS if one.name == arguments.workload)
    Load.request, Load.latencies_s = workload.request, []
    loop = asyncio.get_running_loop()
    for _ in range(workload.connections):
        await loop.create_connection(Load, "127.0.0.1", arguments.port)
    await asyncio.sleep(arguments.seconds / 3)
    Load.latencies_s.clear()
    events, cpu_s, started_s = Load.events, cpu_seconds(arguments.watch), time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    elapsed_s = time.perf_counter() - started_s
    events, cpu_s = Load.events - events, cpu_seconds(arguments.watch) - cpu_s
    latencies_s = sorted(Load.latencies_s) or [float("nan")]
    requests = len(Load.latencies_s)
    row = {
        "requests_per_s": round(requests / elapsed_s, 1),
        "events_per_s": round(events / elapsed_s) if workload.events else None,
        "cpu_us_per_request": round(cpu_s / requests * 1e6, 1) if requests and not workload.events else None,
        "requests_per_core_s": round(requests / cpu_s) if cpu_s and not workload.events else None,
        "cpu_us_per_event": round(cpu_s / events * 1e6, 2) if events else None,
        "p50_ms": round(latencies_s[len(latencies_s) // 2] * 1e3, 2),
        "p99_ms": round(latencies_s[int(len(latencies_s) * 0.99)] * 1e3, 2),
        "error": Load.first_error or None,
    }
    print(json.dumps(row), flush=True)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - a plain read
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ROLES = {
    "engine": run_engine,
    "front door": run_front_door,
    "fastapi+httpx": run_plain_proxy,
    "client": run_client,
}


def spawn(role: str, core: int | None, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--role", role, *arguments]

    def pin() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=pin)


def listening_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark did not start; its error is above")
    return int(line)


def measure(target: str, process: subprocess.Popen[str], port: int, core: int | None, seconds: float) -> Any:
    rows = []
    for workload in WORKLOADS:
        options = f"--port {port} --workload {workload.name} --seconds {seconds} --watch {process.pid}"
        client = spawn("client", core, *options.split())
        output, _ = client.communicate(timeout=seconds * 3 + 30)
        rows.append({"target": target, "workload": workload.name, **json.loads(output)})
    return rows


def run_all(seconds: float) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, load_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    engine = spawn("engine", load_core)
    processes = [engine]
    rows = []
    try:
        engine_port = listening_port(engine)
        rows += measure("engine alone", engine, engine_port, load_core, seconds)
        for role in ("front door", "fastapi+httpx"):
            proxy = spawn(role, proxy_core, "--engine-port", str(engine_port))
            processes.append(proxy)
            rows += measure(role, proxy, listening_port(proxy), load_core, seconds)
            proxy.terminate()
            proxy.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        "benchmark": "front_door",
        "machine": {"cores": len(cores), "machine": platform.machine(), "python": platform.python_version()},
        "seconds": seconds,
        "rows": rows,
        "ratios": ratios(rows),
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    by_key = {(row["target"], row["workload"]): row for row in rows}

    def ratio(workload: str, figure: str, over: str) -> float | None:
        ours, theirs = by_key["front door", workload][figure], by_key[over, workload][figure]
        return round(ours / theirs, 3) if ours and theirs else None

    return {
        "requests_per_s_over_fastapi_httpx": ratio("small", "requests_per_s", "fastapi+httpx"),
        "events_per_s_over_fastapi_httpx": ratio("burst", "events_per_s", "fastapi+httpx"),
        "cpu_per_paced_event_over_fastapi_httpx": ratio("paced", "cpu_us_per_event", "fastapi+httpx"),
        "requests_per_core_s_over_fastapi_httpx": ratio("small", "requests_per_core_s", "fastapi+httpx"),
        "requests_per_s_over_engine_alone": ratio("small", "requests_per_s", "engine alone"),
    }


def print_table(result: dict[str, Any]) -> None:
    figures = tuple(name for name in result["rows"][0] if name not in ("target", "workload", "error"))
    print(f"{'target':<15}{'workload':<10}" + "".join(f"{name:>20}" for name in figures))
    for row in result["rows"]:
        cells = "".join(f"{'-' if row[name] is None else row[name]:>20}" for name in figures)
        print(f"{row['target']:<15}{row['workload']:<10}{cells}  {row['error'] or ''}")
    for name, value in result["ratios"].items():
        print(f"{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="shorter runs, under 50 s in all")
    parser.add_argument("--seconds", type=float, help="measured time per workload (default 6, quick 2)")
    for hidden in ("--role", "--workload"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--port", "--engine-port", "--watch"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        uvloop.run(ROLES[arguments.role](arguments))
        return
    result = run_all(arguments.seconds or (2.0 if arguments.quick else 6.0))
    if arguments.json:
        print(json.dumps(result))
    else:
        print_table(result)


if __name__ == "__main__":
    main()
