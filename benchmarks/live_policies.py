"""The `slo` policy against cache-blind ones, through the whole product: front door, engines, KV events, replay.

For each policy in turn: `conductor serve --emulate 2p2d`, then `conductor replay` of the same requests. Reports
reuse and client-side TTFT, and ratios to the first policy. The engines' hardware is emulated (their clocks are
real), so the figures show what placement changes, not what a GPU does. Without --trace a trace of conversations is
generated: system prompt, history and new turn, as the Mooncake format records them.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

CONDUCTOR = (sys.executable, "-m", "conductor.cli")
START_WITHIN_S = 60.0


def write_conversations(path: Path, requests: int, seed: int = 0) -> None:
    """Conversations of growing history behind one of three system prompts, 12 requests a second."""
    generator = random.Random(seed)
    conversations: list[list[int]] = []
    next_hash = 100
    with path.open("w") as trace:
        for i in range(requests):
            if conversations and generator.random() < 0.75:
                history = conversations[generator.randrange(len(conversations))]
            else:
                history = [generator.randrange(3)]
                conversations.append(history)
            for _ in range(generator.randint(1, 4)):
                history.append(next_hash)
                next_hash += 1
            record = {
                "timestamp": round(i * 1000 / 12),
                "input_length": len(history) * 512 - generator.randrange(400),
                "output_length": generator.randint(10, 80),
                "hash_ids": list(history),
            }
            trace.write(json.dumps(record) + "\n")
            if len(history) > 24:
                conversations.remove(history)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(policy: str, trace: Path, limit: int, speed: float, cluster: str) -> dict[str, Any]:
    port = free_port()
    serve = subprocess.Popen(
        (*CONDUCTOR, "serve", "--emulate", cluster, "--emulate-speed", str(speed), "--port", str(port),
         "--policy", policy, "--log-level", "error"),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if serve.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"conductor serve --policy {policy} did not become ready")
            time.sleep(0.1)
        replay = subprocess.run(
            (
                *CONDUCTOR,
                "replay",
                str(trace),
                "--url",
                url,
                "--speed",
                str(speed),
                "--limit",
                str(limit),
                "--json",
                "-",
            ),
            stdout=subprocess.PIPE,
            stderr=None if sys.stderr.isatty() else subprocess.DEVNULL,
            check=False,
        )
        figures: dict[str, Any] = json.loads(replay.stdout)
        return figures
    finally:
        serve.send_signal(signal.SIGINT)
        serve.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="Mooncake JSONL; default: generated conversations")
    parser.add_argument(
        "--policies", nargs="+", default=["slo", "round_robin", "least_loaded", "prefix_match"]
    )
    parser.add_argument("--cluster", default="2p2d")
    parser.add_argument("--limit", type=int, default=1000, help="requests per policy")
    parser.add_argument("--speed", type=float, default=1.0, help="of trace and engines alike")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="two policies, 150 requests")
    options = parser.parse_args()
    if options.quick:
        options.policies, options.limit = options.policies[:2], min(options.limit, 150)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = options.trace
        if trace is None:
            trace = Path(folder) / "conversations.jsonl"
            write_conversations(trace, options.limit)
        for policy in options.policies:
            figures = run(policy, trace, options.limit, options.speed, options.cluster)
            results[policy] = {
                "request_count": figures["request_count"],
                "error_request_count": figures["error_request_count"],
                "reused_ratio": round(figures["prefix_cache_reused_ratio"], 4),
                "ttft_mean_ms": round(figures["time_to_first_token"]["avg"], 1),
                "ttft_p50_ms": round(figures["time_to_first_token"]["p50"], 1),
                "ttft_p99_ms": round(figures["time_to_first_token"]["p99"], 1),
                "tbt_p50_ms": round(figures["longest_tenth_token_latency"]["p50"], 1),
                "prefill_load_cv": round(figures["prefill_load_cv"], 3),
            }
    first = results[options.policies[0]]
    for figures in results.values():
        figures["ttft_mean_ratio"] = round(figures["ttft_mean_ms"] / first["ttft_mean_ms"], 2)
    if options.json:
        print(json.dumps({"benchmark": "live_policies", "speed": options.speed, "results": results}))
        return
    columns = list(first)
    print(f"{'policy':<14}" + "".join(f"{column:>18}" for column in columns))
    for policy, figures in results.items():
        print(f"{policy:<14}" + "".join(f"{figures[column]:>18}" for column in columns))


if __name__ == "__main__":
    main()
