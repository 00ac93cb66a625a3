"""What the chart asks a running process: probes, and every metric of its alerts, dashboard and autoscaler."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chart import CHART, EVERYTHING, configuration, container, render
from front_door_process import START_WITHIN_S, FrontDoor, conductor_command, free_port, front_door
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
SCRAPED = {"namespace", "pod", "job"}  # labels that Prometheus adds to every series


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Started with what the chart renders by default, with two router workers and a state folder."""
    folder = tmp_path_factory.mktemp("chart")
    values: dict[str, Any] = {
        "config": {"server": {"workers": 2}, "emulation": {"cluster": "2p2d", "speed": 10}},
        "persistence": {"enabled": True, "mountPath": str(folder / "state")},
    }
    file = configuration(render(values), folder)
    with front_door(folder, "--config", str(file), "--host", "127.0.0.1") as opened:
        yield opened


@pytest.fixture(scope="module")
def series(door: FrontDoor) -> dict[str, set[str] | None]:
    """Names of all series with their labels; None where there is none to see them by."""
    found: dict[str, set[str] | None] = {}
    for family in text_string_to_metric_families(door.http.get("/metrics").text):
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = None
        for sample in family.samples:
            found[sample.name] = set(sample.labels)
    return found


def _expressions() -> list[str]:
    objects = render(EVERYTHING)
    rules = [rule for group in objects["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    dashboard = json.loads(objects["Dashboard"]["data"]["conductor.json"])
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    return [rule["expr"] for rule in rules] + panels + variables


def test_alerts_and_dashboard_ask_for_metrics_that_exist(series: dict[str, set[str] | None]) -> None:
    expressions = _expressions()
    assert len(expressions) > 50
    for expression in expressions:
        names = re.findall(r"\bconductor_\w+", expression)
        assert names and set(names) <= set(series), expression


def test_they_group_by_labels_that_exist(series: dict[str, set[str] | None]) -> None:
    checked = 0
    for expression in _expressions():
        for by, name in re.findall(r"by \(([^)]+)\) ?\((?:rate\(|increase\()?(conductor_\w+)", expression):
            labels = series[name]
            if labels is not None:
                assert {each.strip() for each in by.split(",")} <= labels | SCRAPED, expression
                checked += 1
    assert checked > 15


def test_the_autoscaler_may_ask_for_metrics_that_exist(series: dict[str, set[str] | None]) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    metric = schema["properties"]["autoscaling"]["properties"]["podMetrics"]["items"]["properties"]["name"]
    assert metric["enum"] and set(metric["enum"]) <= set(series)


def test_probes_are_answered(door: FrontDoor) -> None:
    serving = container(render({}))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert door.http.get(serving[probe]["httpGet"]["path"]).status_code == 200


def test_a_process_without_engines_is_alive_and_not_ready(tmp_path: Path) -> None:
    """Engines that are away must not get the pod killed."""
    values = {"config": {"instances": [{"id": "away", "url": f"http://127.0.0.1:{free_port()}"}]}}
    objects = render(values)
    serving, port = container(objects), free_port()
    file = configuration(objects, tmp_path)
    alive, ready = (serving[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness"))
    with (tmp_path / "serve.log").open("wb") as log:
        arguments = ("serve", "--config", str(file), "--host", "127.0.0.1", "--port", str(port))
        process = subprocess.Popen(conductor_command(*arguments), stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            deadline_s = time.monotonic() + START_WITHIN_S
            while True:
                assert process.poll() is None and time.monotonic() < deadline_s
                try:
                    assert client.get(alive).status_code == 200
                    break
                except httpx.TransportError:
                    time.sleep(0.05)
            assert client.get(ready).status_code == 503
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_the_file_is_used(door: FrontDoor) -> None:
    assert set(door.worker_pids()) == {"0", "1"}
    assert httpx.get(f"{door.url}/v1/models", trust_env=False).json()["data"][0]["id"] == "emulated-8b"
