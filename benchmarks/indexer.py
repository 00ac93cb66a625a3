"""`conductor index` as a process, and `python -m dynamo.indexer` beside it where that can be imported.

Ingest: 64 engines publish chains of blocks in vLLM's format over ZMQ (64 to 256 blocks a chain, two messages
each), the very same messages to either service; blocks per CPU second of the service process, token hashing
included, best of the rounds, which alternate. Query: one keep-alive client asks over HTTP for a prompt of 12,032
tokens at block size 16 that every engine holds (hot), one, or none (cold), as many of each in turn.

Excluded: starting, connecting, making the input. The peer (NVIDIA Dynamo 1.6.1, four indexer threads, its default)
needs ``pip install --target FOLDER --no-deps ai-dynamo-runtime==1.6.1``, then ``PYTHONPATH=FOLDER``.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

BLOCK = 16
MODEL = "m"
PROMPT_TOKENS = 12_032
INGEST_ENGINES = 64
QUERY_ENGINES = (8, 64, 128)
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
START_WITHIN_S = 60.0
SETTLE_S = 0.3  # between the last handshake and the first message
Figures = dict[str, Any]


class Engines:
    """PUB sockets that speak for as many engines."""

    def __init__(self, count: int) -> None:
        self.context = zmq.Context()
        self.sockets = []
        self.endpoints = []
        self.sequences = [0] * count
        for _ in range(count):
            publisher = self.context.socket(zmq.PUB)
            publisher.setsockopt(zmq.SNDHWM, 0)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            self.sockets.append(publisher)
            self.endpoints.append(f"tcp://127.0.0.1:{port}")

    def send(self, engine: int, payload: bytes) -> None:
        self.sockets[engine].send_multipart([b"", struct.pack(">Q", self.sequences[engine]), payload])
        self.sequences[engine] += 1

    def close(self) -> None:
        self.context.destroy(0)


class Service(ABC):
    """A running index service that follows the engines, and one keep-alive connection to it."""

    name: str

    def __init__(self, engines: Engines) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = (sys.executable, "-m", *self.arguments(engines))
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            self._wait_until_up()
            self.follow(engines)
        except BaseException:
            self.stop()
            raise
        time.sleep(SETTLE_S)

    @abstractmethod
    def arguments(self, engines: Engines) -> Sequence[str]:
        """Module and arguments that start it."""

    @abstractmethod
    def follow(self, engines: Engines) -> None:
        """Return once all engines' streams are connected."""

    @abstractmethod
    def has_applied(self, messages: int, residencies: int) -> bool:
        """Whether so many messages were applied, which store so many blocks. Asked often, so it must be cheap."""

    @abstractmethod
    def question(self, tokens: list[int]) -> bytes:
        """The body of `POST /query`."""

    @abstractmethod
    def holders(self, answer: Any) -> int:
        """How many engines hold the whole prompt, by the answer."""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if content else {}
        self.connection.request(method, path, content, headers)
        response = self.connection.getresponse()
        text = response.read()
        if response.status not in (200, 201):
            raise RuntimeError(f"{method} {path} answered {response.status}: {text[:200]!r}")
        return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def wait_for(self, messages: int, residencies: int) -> None:
        deadline_s = time.monotonic() + 120
        while not self.has_applied(messages, residencies):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name} did not apply {messages} messages")
            time.sleep(0.05)

    def stop(self) -> None:
        self.connection.close()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_until_up(self) -> None:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                self.call("GET", "/health")
                return
            except OSError:
                self.connection.close()
                if time.monotonic() > deadline_s or self.process.poll() is not None:
                    raise RuntimeError(f"{self.name} did not start") from None
                time.sleep(0.05)


class Conductor(Service):
    """Our own."""

    name = "ours"

    def arguments(self, engines: Engines) -> Sequence[str]:
        return ("conductor.cli", "index", "--port", str(self.port), "--log-level", "error")

    def follow(self, engines: Engines) -> None:
        for i, endpoint in enumerate(engines.endpoints):
            body = {"endpoint": endpoint, "type": "vLLM", "modelname": MODEL, "block_size": BLOCK}
            self.call("POST", "/register", body | {"instance_id": f"engine-{i}"})
        deadline_s = time.monotonic() + START_WITHIN_S
        while any(s["state"] == "connecting" for s in self.call("GET", "/v1/cache/streams")["streams"]):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the streams did not connect")
            time.sleep(0.05)

    def has_applied(self, messages: int, residencies: int) -> bool:
        return bool(self.call("GET", "/v1/cache/occupancy")["residencies"] >= residencies)

    def question(self, tokens: list[int]) -> bytes:
        return json.dumps({"model": MODEL, "token_ids": tokens, "block_size": BLOCK}).encode()

    def holders(self, answer: Any) -> int:
        return sum(entry["longest_matched"] == PROMPT_TOKENS for entry in answer["default"].values())


class Dynamo(Service):
    """The peer."""

    name = "dynamo"

    def arguments(self, engines: Engines) -> Sequence[str]:
        workers = ",".join(f"{i + 1}={endpoint}" for i, endpoint in enumerate(engines.endpoints))
        size, port = str(BLOCK), str(self.port)
        options = ("--port", port, "--block-size", size, "--model-name", MODEL, "--workers", workers)
        return ("dynamo.indexer", *options)

    def follow(self, engines: Engines) -> None:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            workers = self.call("GET", "/workers")
            if len(workers) == len(engines.endpoints) and all(w["status"] == "active" for w in workers):
                return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the workers did not become active: {workers[:2]}")
            time.sleep(0.05)

    def has_applied(self, messages: int, residencies: int) -> bool:
        lines = str(self.call("GET", "/metrics")).splitlines()
        counted = [line for line in lines if line.startswith("dynamo_kvrouter_kv_cache_events_applied")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in counted if "stored" in line) >= messages

    def question(self, tokens: list[int]) -> bytes:
        return json.dumps({"model_name": MODEL, "token_ids": tokens}).encode()

    def holders(self, answer: Any) -> int:
        return sum(entry["longest_matched"] == PROMPT_TOKENS for entry in answer["instances"].values())


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


def make_messages(chains_per_engine: int) -> tuple[list[tuple[int, bytes]], int]:
    """(engine, payload) in the order of sending, and the number of blocks."""
    generator = np.random.default_rng(0)
    messages: list[tuple[int, bytes]] = []
    blocks = 0
    for _ in range(chains_per_engine):
        seconds: list[tuple[int, bytes]] = []
        for engine in generator.permutation(INGEST_ENGINES).tolist():
            count = int(generator.integers(64, 257))
            tokens = generator.integers(0, 128_000, count * BLOCK).tolist()
            hashes = generator.integers(1, 1 << 62, count).tolist()
            half = count // 2
            messages.append((engine, stored(hashes[:half], None, tokens[: half * BLOCK])))
            seconds.append((engine, stored(hashes[half:], hashes[half - 1], tokens[half * BLOCK :])))
            blocks += count
        messages += seconds
    return messages, blocks


def measure_ingest(kind: type[Service], messages: list[tuple[int, bytes]], blocks: int) -> Figures:
    engines = Engines(INGEST_ENGINES)
    service = kind(engines)
    try:
        cpu_s, rss, started_s = service.cpu_s(), service.rss_bytes(), time.perf_counter()
        for engine, payload in messages:
            engines.send(engine, payload)
        service.wait_for(len(messages), blocks)
        wall_s, cpu_s = time.perf_counter() - started_s, service.cpu_s() - cpu_s
        return {
            "blocks_per_cpu_s": round(blocks / cpu_s),
            "blocks_per_s": round(blocks / wall_s),
            "bytes_per_block": round((service.rss_bytes() - rss) / blocks, 1),
        }
    finally:
        service.stop()
        engines.close()


def measure_queries(kind: type[Service], engines_count: int, queries: int) -> Figures:
    engines = Engines(engines_count)
    service = kind(engines)
    try:
        generator = np.random.default_rng(1)
        prompts = [generator.integers(0, 128_000, PROMPT_TOKENS).tolist() for _ in range(3)]
        hashes = list(range(1, PROMPT_TOKENS // BLOCK + 1))
        for engine in range(engines_count):
            engines.send(engine, stored(hashes, None, prompts[0]))
        engines.send(0, stored([10_000 + each for each in hashes], None, prompts[1]))
        service.wait_for(engines_count + 1, (engines_count + 1) * len(hashes))
        result: Figures = {}
        for name, tokens, held in zip(("hot", "one", "cold"), prompts, (engines_count, 1, 0), strict=True):
            body = service.question(tokens)
            found = service.holders(service.call("POST", "/query", body))
            if found != held:
                raise RuntimeError(f"{service.name}: {found} engines hold the {name} prompt, not {held}")
            durations = np.empty(queries)
            for i in range(queries):
                started_s = time.perf_counter()
                service.call("POST", "/query", body)
                durations[i] = time.perf_counter() - started_s
            for percentile in (50, 99):
                value = float(np.percentile(durations, percentile)) * 1e3
                result[f"{name}_p{percentile}_ms"] = round(value, 2)
        return result
    finally:
        service.stop()
        engines.close()


def compare_ingest(kinds: Sequence[type[Service]], chains_per_engine: int, rounds: int) -> Figures:
    messages, blocks = make_messages(chains_per_engine)
    found: dict[str, list[Figures]] = {kind.name: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            found[kind.name].append(measure_ingest(kind, messages, blocks))
    best = {name: max(rows, key=lambda row: row["blocks_per_cpu_s"]) for name, rows in found.items()}
    return {
        "engines": INGEST_ENGINES,
        "messages": len(messages),
        "blocks": blocks,
        "services": best,
        "ratio": _ratio(best, "blocks_per_cpu_s"),
    }


def _ratio(by_name: dict[str, Figures], key: str) -> float | None:
    return round(by_name["ours"][key] / by_name["dynamo"][key], 2) if "dynamo" in by_name else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer blocks, queries and rounds")
    options = parser.parse_args()
    kinds: list[type[Service]] = [Conductor]
    if importlib.util.find_spec("dynamo") and importlib.util.find_spec("dynamo.indexer"):
        kinds.append(Dynamo)
    chains, rounds, queries = (40, 2, 150) if options.quick else (200, 3, 1000)
    ingest = compare_ingest(kinds, chains, rounds)
    answers = {
        count: {kind.name: measure_queries(kind, count, queries) for kind in kinds} for count in QUERY_ENGINES
    }
    if options.json:
        print(json.dumps({"benchmark": "indexer", "ingest": ingest, "queries": answers}))
        return
    print(
        f"ingest: {ingest['engines']} engines, {ingest['messages']:,} messages, {ingest['blocks']:,} blocks"
    )
    for name, figures in ingest["services"].items():
        print(f"  {name:<8}" + "  ".join(f"{value:,} {key}" for key, value in figures.items()))
    print(f"  ratio of blocks per CPU second: {ingest['ratio'] or 'no peer'}")
    for count, by_name in answers.items():
        print(f"/query at {count} engines, ms")
        for name, figures in by_name.items():
            print(f"  {name:<8}" + "  ".join(f"{key[:-3]} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
