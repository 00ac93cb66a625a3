"""`conductor index` as a process: what it ingests per CPU second over ZMQ, and how fast it answers `/query`.

Ingest: 64 engines publish chains of blocks in vLLM's format (a shared prefix and a tail each, 64 to 256 blocks);
blocks per CPU second of the service process. Query: one keep-alive client asks for a prompt of 12,032 tokens at
block size 16, held by every engine (hot), by one, or by none (cold).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

BLOCK = 16
PROMPT_TOKENS = 12_032
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Service:
    """A running `conductor index` and one keep-alive connection to it."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "conductor.cli",
                "index",
                "--port",
                str(self.port),
                "--log-level",
                "error",
            ),
            stderr=subprocess.DEVNULL,
        )
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        deadline_s = time.monotonic() + 60
        while True:
            try:
                self.call("GET", "/health")
                return
            except OSError:
                self.connection.close()
                if time.monotonic() > deadline_s or self.process.poll() is not None:
                    raise RuntimeError("conductor index did not start") from None
                time.sleep(0.1)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        self.connection.request(
            method, path, content, {"content-type": "application/json"} if content else {}
        )
        response = self.connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} answered {response.status}: {text[:200]!r}")
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def blocks_seen(self) -> int:
        return sum(stream["events"] for stream in self.call("GET", "/v1/cache/streams")["streams"])

    def stop(self) -> None:
        self.connection.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=30)


class Engines:
    """PUB sockets that speak for as many engines."""

    def __init__(self, service: Service, count: int) -> None:
        self.context = zmq.Context()
        self.sockets = []
        self.sequences = [0] * count
        for i in range(count):
            publisher = self.context.socket(zmq.PUB)
            publisher.setsockopt(zmq.SNDHWM, 0)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            self.sockets.append(publisher)
            service.call(
                "POST",
                "/register",
                {
                    "endpoint": f"tcp://127.0.0.1:{port}",
                    "type": "vLLM",
                    "modelname": "m",
                    "instance_id": f"engine-{i}",
                    "block_size": BLOCK,
                },
            )
        deadline_s = time.monotonic() + 30
        while any(s["state"] == "connecting" for s in service.call("GET", "/v1/cache/streams")["streams"]):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the streams did not connect")
            time.sleep(0.05)

    def send(self, engine: int, payload: bytes) -> None:
        self.sockets[engine].send_multipart([b"", struct.pack(">Q", self.sequences[engine]), payload])
        self.sequences[engine] += 1

    def close(self) -> None:
        self.context.destroy(0)


def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
    }
    return msgspec.msgpack.encode([time.time(), [event], 0])


def measure_ingest(sequences_per_engine: int, engines_count: int = 64) -> dict[str, Any]:
    service = Service()
    try:
        engines = Engines(service, engines_count)
        generator = np.random.default_rng(0)
        messages: list[tuple[int, bytes]] = []
        blocks = 0
        for engine in range(engines_count):
            for _ in range(sequences_per_engine):
                count = int(generator.integers(64, 257))
                tokens = generator.integers(0, 128_000, count * BLOCK).tolist()
                hashes = generator.integers(1, 1 << 62, count).tolist()
                half = count // 2
                messages.append((engine, stored(hashes[:half], None, tokens[: half * BLOCK])))
                messages.append((engine, stored(hashes[half:], hashes[half - 1], tokens[half * BLOCK :])))
                blocks += count
        random.Random(0).shuffle(order := list(range(engines_count)))
        by_engine: dict[int, list[bytes]] = {e: [m for owner, m in messages if owner == e] for e in order}
        cpu_s, rss, started_s = service.cpu_s(), service.rss_bytes(), time.perf_counter()
        for turn in range(2 * sequences_per_engine):
            for engine in order:
                engines.send(engine, by_engine[engine][turn])
        while service.blocks_seen() < len(messages):
            time.sleep(0.05)
        wall_s, cpu_s = time.perf_counter() - started_s, service.cpu_s() - cpu_s
        engines.close()
        return {
            "engines": engines_count,
            "messages": len(messages),
            "blocks": blocks,
            "blocks_per_cpu_s": round(blocks / cpu_s),
            "blocks_per_s": round(blocks / wall_s),
            "bytes_per_block": round((service.rss_bytes() - rss) / blocks, 1),
        }
    finally:
        service.stop()


def measure_queries(engines_count: int, queries: int) -> dict[str, Any]:
    service = Service()
    try:
        engines = Engines(service, engines_count)
        generator = np.random.default_rng(1)
        hot, single, cold = (generator.integers(0, 128_000, PROMPT_TOKENS).tolist() for _ in range(3))
        hashes = list(range(1, PROMPT_TOKENS // BLOCK + 1))
        for engine in range(engines_count):
            engines.send(engine, stored(hashes, None, hot))
        engines.send(0, stored([10_000 + h for h in hashes], None, single))
        while service.blocks_seen() < engines_count + 1:
            time.sleep(0.02)
        result: dict[str, Any] = {"engines": engines_count}
        for name, tokens in (("hot", hot), ("one", single), ("cold", cold)):
            body = json.dumps({"model": "m", "token_ids": tokens, "block_size": BLOCK}).encode()
            answer = service.call("POST", "/query", body)["default"]
            held = sum(entry["longest_matched"] == PROMPT_TOKENS for entry in answer.values())
            assert held == {"hot": engines_count, "one": 1, "cold": 0}[name], answer
            durations = np.empty(queries)
            for i in range(queries):
                started_s = time.perf_counter()
                service.call("POST", "/query", body)
                durations[i] = time.perf_counter() - started_s
            result[f"{name}_p50_ms"] = round(float(np.percentile(durations, 50)) * 1e3, 2)
            result[f"{name}_p99_ms"] = round(float(np.percentile(durations, 99)) * 1e3, 2)
        engines.close()
        return result
    finally:
        service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer blocks and queries")
    options = parser.parse_args()
    ingest = measure_ingest(40 if options.quick else 200)
    queries = [measure_queries(count, 150 if options.quick else 1000) for count in (8, 64, 128)]
    if options.json:
        print(json.dumps({"benchmark": "indexer", "ingest": ingest, "queries": queries}))
        return
    for name, value in ingest.items():
        print(f"{name:<24}{value:>14,}")
    columns = list(queries[0])
    print("".join(f"{column:>14}" for column in columns))
    for row in queries:
        print("".join(f"{row[column]:>14}" for column in columns))


if __name__ == "__main__":
    main()
