"""Our front door beside other routers: the same engines and clients, each router alone on one core, in one run.

Ours is the real thing, `conductor serve --config FILE`: the `slo` policy, its scheduler and cache index, exact
tokens of every prompt, health checks, metrics. The others are SMG (PyPI `smg`), SGLang's router (`sglang-router`)
and vLLM's (`vllm-router`) with their cache-aware policies. Engines and clients are C programs (`load/`, compiled
with `cc` or `gcc`) that share the second core and are many times as fast as any of the routers. Routers are
measured in turn for every workload, round by round; figures are medians of the rounds.

Workloads:

- `small_c16`, `small_c64`: short chats answered at once, 16 and 64 connections in a closed loop;
- `rate_500`: the same at 500 requests a second, due at fixed times; what it adds to an engine's latency counts;
- `turns_128k`: chats of 128 KB, of which all but the last turn (1 KB) was seen before, 16 connections;
- `unique_128k`: chats of 128 KB that nobody has seen (not with --quick);
- `burst`: 64 streams of 256 events, as fast as they are read;
- `paced`: 256 streams, an event every 10 ms: the load is fixed at 25,600 events/s, read the CPU column.

`per_core_s` are requests (or events) for each CPU second of the router: what it would do with the core for itself
where others use this machine too. With --idle-streams the memory of a router that holds so many silent streams is
measured as well; the limit of open files must be twice their number.

Each of the other routers needs a virtual environment of its own (two of them install a command `smg`):

  for p in smg sglang-router vllm-router; do
    python -m venv /tmp/peers/$p && /tmp/peers/$p/bin/pip install $p
  done
  python benchmarks/router.py --peers /tmp/peers
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import shutil
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
from workloads.load_processes import compiled, cpu_seconds, free_port, rss_mb, spawn

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "simulator" / "emulator" / "tokenizer"
MODEL = "bench"
ENGINES = 4
MARK = "########"  # which the client replaces by a number: no other request has it
PEERS = ("smg", "sglang-router", "vllm-router")
START_WITHIN_S = 300.0  # the first start of a fresh checkout compiles the index
CHAT_BYTES = 128 * 1024
TURN_BYTES = 1024
CHATS, TURNS = 8, 8
HOLD_US = 3_600_000_000  # between two events of a stream that is to stay silent
SPARE_FILES = 200
RATE_LASTS = 3  # times as long as the others: a hundredth of its requests is few
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Workload:
    """``figure`` is what is compared; ``rate`` is in requests a second, none for a closed loop."""

    name: str
    connections: int
    figure: str = "requests_per_s"
    rate: float | None = None
    rehearsed: bool = False  # caches are filled before anything is measured
    quick: bool = True


WORKLOADS = (
    Workload("small_c16", 16),
    Workload("small_c64", 64),
    Workload("rate_500", 64, figure="p99_ms", rate=500.0),
    Workload("turns_128k", 16, rehearsed=True),
    Workload("unique_128k", 16, quick=False),
    Workload("burst", 64, figure="events_per_s"),
    Workload("paced", 256, figure="events_per_s"),
)


# ---- the requests ----


VOCABULARY = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so said what up its about into
than them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long here get both between life being
under never day same another know while last might us great old year off come since against go came right used take
three request cache engine prompt token latency server model memory answer question system message 42 1,000 3.14
"""
WORDS = VOCABULARY.split()
FREQUENCIES = [1 / rank for rank in range(1, len(WORDS) + 1)]  # Zipf's law


def words(generator: random.Random, size_bytes: int) -> str:
    return " ".join(generator.choices(WORDS, FREQUENCIES, k=size_bytes // 2))[:size_bytes]


def chats(generator: random.Random) -> list[list[dict[str, str]]]:
    """Turns of conversations grown to 128 KB, one turn after the other; the last text is new each time."""
    grown = []
    for _ in range(CHATS):
        messages = [{"role": "system", "content": words(generator, 8 * TURN_BYTES)}]
        while len(json.dumps(messages)) < CHAT_BYTES:
            for role in ("user", "assistant"):
                messages.append({"role": role, "content": words(generator, TURN_BYTES)})
        new = {"role": "user", "content": MARK + words(generator, TURN_BYTES)}
        for turn in range(TURNS, 0, -1):
            grown.append([*messages[: len(messages) - 2 * turn], new])
    return grown


def requests(workload: str) -> list[dict[str, Any]]:
    generator = random.Random(workload)
    question = [{"role": "user", "content": f"{MARK} Say hello to the world in one short sentence, please."}]
    match workload:
        case "burst":
            return [{"model": MODEL, "messages": question, "stream": True, "max_tokens": 256, "seed": 0}]
        case "paced":
            return [{"model": MODEL, "messages": question, "stream": True, "max_tokens": 100, "seed": 10_000}]
        case "idle":
            return [{"model": MODEL, "messages": question, "stream": True, "max_tokens": 2, "seed": HOLD_US}]
        case "turns_128k":
            return [{"model": MODEL, "messages": messages, "max_tokens": 16} for messages in chats(generator)]
        case "unique_128k":
            text = MARK + words(generator, CHAT_BYTES)
            unseen = [{"role": "system", "content": text}, *question]
            return [{"model": MODEL, "messages": unseen, "max_tokens": 16}]
    return [{"model": MODEL, "messages": question, "max_tokens": 16}]


def write_requests(folder: Path) -> None:
    for name in (*(workload.name for workload in WORKLOADS), "idle"):
        lines = [json.dumps(document) + "\n" for document in requests(name)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


# ---- the processes ----


@dataclass
class Target:
    """Something that answers chat completions on ``port``; ``rows`` are its figures by workload."""

    name: str
    port: int
    process: subprocess.Popen[str]
    start_rss_mb: float = 0.0
    rows: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def our_command(folder: Path, port: int, engines: list[str]) -> list[str]:
    config = {
        "server": {"port": port},
        "scheduling": {"policy": "slo"},
        "models": [{"name": MODEL, "tokenizer": str(TOKENIZER)}],
        "instances": [{"id": f"engine-{i}", "url": url, "block_size": 16} for i, url in enumerate(engines)],
        "log": {"level": "warning"},
    }
    file = folder / "conductor.yaml"
    file.write_text(json.dumps(config))  # which is YAML too
    return [sys.executable, "-m", "conductor.cli", "serve", "--config", str(file)]


def peer_command(name: str, command: Path, port: int, engines: list[str]) -> list[str]:
    level = "warning" if name == "vllm-router" else "warn"
    return [
        str(command),
        *(() if name == "vllm-router" else ("launch",)),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--worker-urls", *engines),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", level),
    ]


def find_peer(name: str, folder: Path | None) -> Path | None:
    """``FOLDER/name/bin/name``, ``FOLDER/name``, or on PATH."""
    if folder is not None:
        for path in (folder / name / "bin" / name, folder / name):
            if path.is_file():
                return path
    found = shutil.which(name)
    return None if found is None else Path(found)


def wait_until_served(target: Target, log: Path) -> None:
    """Until a chat is answered through every engine. Raises SystemExit with the router's log."""
    body = requests("small_c16")[0]
    deadline_s = time.monotonic() + START_WITHIN_S
    answered = 0
    while answered < ENGINES:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(
                f"http://127.0.0.1:{target.port}{PATH}", json=body, trust_env=False, timeout=5.0
            )
            answered += answer.status_code == 200
        if target.process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{target.name} did not start:\n{log.read_text()[-2000:]}")
        if answered == 0:
            time.sleep(0.1)


@contextlib.contextmanager
def running(folder: Path, core: int, peers: dict[str, Path], engines: list[str]) -> Iterator[list[Target]]:
    """Every router, ready, on the same core; they are measured in turn."""
    targets: list[Target] = []
    try:
        for name in ("conductor", *peers):
            port = free_port()
            ours = name == "conductor"
            command = (
                our_command(folder, port, engines) if ours else peer_command(name, peers[name], port, engines)
            )
            log = folder / f"{name}.log"
            with log.open("w") as output:
                process = spawn(core, *command, stdout=output, stderr=output, cwd=ROOT)
            targets.append(Target(name, port, process))
            wait_until_served(targets[-1], log)
            targets[-1].start_rss_mb = rss_mb(process.pid)
        yield targets
    finally:
        for target in targets:
            target.process.send_signal(signal.SIGINT)
        for target in targets:
            with contextlib.suppress(subprocess.TimeoutExpired):
                target.process.wait(timeout=5)
            target.process.kill()
            target.process.wait()


# ---- measuring ----


def measure(folder: Path, core: int, target: Target, workload: Workload, seconds: float) -> dict[str, float]:
    command = [
        folder / "client",
        target.port,
        folder / f"{workload.name}.jsonl",
        workload.connections,
        seconds,
    ]
    if workload.rate is not None:
        command.append(workload.rate)
    client = spawn(core, *map(str, command), stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.readline()
    used_s = cpu_seconds(target.process.pid)
    line = client.stdout.readline()
    used_s = cpu_seconds(target.process.pid) - used_s
    client.wait()
    if not line:
        raise SystemExit(f"the client of {workload.name} failed with {target.name}; its error is above")
    row: dict[str, Any] = json.loads(line)
    why = row.pop("first_refusal")
    if row["errors"] or row["refused"]:
        print(f"{target.name}, {workload.name}: {row['errors']} errors, {row['refused']} refused: {why}",
              file=sys.stderr)  # fmt: skip
    count = row["events_per_s"] or row["requests_per_s"]
    row["per_core_s"] = round(count * seconds / used_s) if used_s else 0
    row["rss_mb"] = round(rss_mb(target.process.pid), 1)
    return row


def rehearse(target: Target, workload: Workload) -> None:
    """Fill the caches, one request after the other: with the longest of each chat's turns."""
    with httpx.Client(base_url=f"http://127.0.0.1:{target.port}", trust_env=False, timeout=60) as client:
        for document in requests(workload.name)[TURNS - 1 :: TURNS]:
            client.post(PATH, json=document).raise_for_status()


def hold_streams(folder: Path, core: int, target: Target, wanted: int) -> dict[str, float]:
    """Memory of a router between its clients and engines with so many streams that are silent."""
    before_mb = rss_mb(target.process.pid)
    command = (folder / "client", target.port, folder / "idle.jsonl", wanted, "hold")
    client = spawn(core, *map(str, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdout is not None
    held = client.stdout.readline()
    time.sleep(1.0)
    row = {
        "streams": int(held.split()[1]) if held else 0,
        "rss_mb": round(rss_mb(target.process.pid), 1),
        "added_mb": round(rss_mb(target.process.pid) - before_mb, 1),
    }
    client.communicate(timeout=30)
    return row


def most_streams(wanted: int) -> int:
    """As many as the limit of open files lets a router hold, which needs two a stream."""
    most = (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_FILES) // 2
    if most < wanted:
        print(f"the limit of open files allows {most} streams, not {wanted}: raise `ulimit -Hn` to "
              f"{2 * wanted + SPARE_FILES}", file=sys.stderr)  # fmt: skip
    return min(wanted, most)


def run_all(folder: Path, peers: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the router, one for engines and clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    router_core, load_core = cores[:2]
    ports = [free_port() for _ in range(ENGINES)]
    backend = spawn(load_core, folder / "backend", MODEL, *map(str, ports), stdout=subprocess.PIPE)
    workloads = [each for each in WORKLOADS if each.quick or not options.quick]
    idle: dict[str, dict[str, float]] = {}
    try:
        assert backend.stdout is not None
        backend.stdout.readline()
        direct = Target("direct", ports[0], backend)
        with running(folder, router_core, peers, [f"http://127.0.0.1:{port}" for port in ports]) as routers:
            for workload in workloads:
                for target in routers if workload.rehearsed else ():
                    rehearse(target, workload)
                for _ in range(options.rounds):
                    for target in (direct, *routers):
                        if target is not direct or workload.rate is not None:
                            seconds = options.seconds * (RATE_LASTS if workload.rate else 1)
                            row = measure(folder, load_core, target, workload, seconds)
                            target.rows.setdefault(workload.name, []).append(row)
            if options.idle_streams:
                streams = most_streams(options.idle_streams)
                for target in routers:
                    idle[target.name] = hold_streams(folder, load_core, target, streams)
            targets = [direct, *routers]
    finally:
        backend.kill()
        backend.wait()
    return figures(targets, idle, len(cores), options)


def figures(
    targets: list[Target], idle: dict[str, dict[str, float]], cores: int, options: argparse.Namespace
) -> dict[str, Any]:
    rows = [
        {
            "router": target.name,
            "workload": workload,
            **{key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]},
        }
        for target in targets
        for workload, rounds in target.rows.items()
    ]
    by_key = {(row["router"], row["workload"]): row for row in rows}

    def ratio(workload: str, figure: str, over: str = "smg") -> float | None:
        if (over, workload) not in by_key or not by_key[over, workload][figure]:
            return None
        return round(float(by_key["conductor", workload][figure] / by_key[over, workload][figure]), 2)

    routers = [target for target in targets if target.name != "direct"]
    compared = {workload.name: workload.figure for workload in WORKLOADS if workload.rate is None}
    return {
        "benchmark": "routers",
        "machine": {"cores": cores, "machine": platform.machine(), "python": platform.python_version()},
        "seconds": options.seconds,
        "rounds": options.rounds,
        "small_rps_ratio_vs_smg": ratio("small_c64", "requests_per_s"),
        "big_rps_ratio_vs_smg": ratio("turns_128k", "requests_per_s"),
        "sse_ratio_vs_smg": ratio("burst", "events_per_s"),
        "paced_event_cpu_ratio_vs_smg": ratio("paced", "per_core_s"),
        "added_p99_ms_500rps": {
            target.name: round(
                by_key[target.name, "rate_500"]["p99_ms"] - by_key["direct", "rate_500"]["p99_ms"], 3
            )
            for target in routers
        },
        "rss_mb": {
            target.name: {
                "start": round(target.start_rss_mb, 1),
                "after": max(round_["rss_mb"] for rounds in target.rows.values() for round_ in rounds),
            }
            for target in routers
        },
        "idle_streams": idle,
        "ratios": {
            over.name: {
                name: ratio(name, compared[name], over.name) for name in over.rows if name in compared
            }
            for over in routers[1:]
        },
        "per_core_ratios": {
            over.name: {name: ratio(name, "per_core_s", over.name) for name in over.rows if name in compared}
            for over in routers[1:]
        },
        "rows": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    columns = (
        "requests_per_s",
        "events_per_s",
        "per_core_s",
        "p50_ms",
        "p99_ms",
        "first_event_p50_ms",
        "rss_mb",
    )
    print(f"{'router':<15}{'workload':<13}" + "".join(f"{name:>19}" for name in columns))
    for row in sorted(result["rows"], key=lambda row: str(row["workload"])):
        print(f"{row['router']:<15}{row['workload']:<13}" + "".join(f"{row[name]:>19,}" for name in columns))
    for name, value in result.items():
        if name not in ("rows", "benchmark"):
            print(f"{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="SMG only, one short round, within 50 s")
    parser.add_argument("--peers", type=Path, help="folder with smg/bin/smg and so on; default: PATH")
    parser.add_argument("--only", nargs="+", choices=PEERS, help="which of the others (default: all)")
    parser.add_argument("--seconds", type=float, help="measured time a workload (default 3, quick 1)")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--idle-streams", type=int, default=0, help="hold so many silent streams, say 10000")
    options = parser.parse_args()
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    options.rounds = options.rounds or (1 if options.quick else 3)
    wanted = options.only or (PEERS[:1] if options.quick else PEERS)
    found = {name: find_peer(name, options.peers) for name in wanted}
    for name in (name for name, path in found.items() if path is None):
        print(f"{name} is not found: pip install it in a virtual environment of its own, see --help",
              file=sys.stderr)  # fmt: skip
    peers = {name: path for name, path in found.items() if path is not None}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiled(folder)
        write_requests(folder)
        result = run_all(folder, peers, options)
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)


if __name__ == "__main__":
    main()
