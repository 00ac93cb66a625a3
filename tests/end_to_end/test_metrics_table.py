"""The table of metrics in docs/api.md has every metric that a running server shows, and no other."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from front_door_process import FrontDoor, front_door
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from conductor.index_metrics import RegistrationCollector

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "api.md"
KEY = "metrics-key-5f6a"


def documented() -> dict[str, str]:
    """Names of the table with the labels beside them. `_more_total` continues what the name before begins with."""
    text = DOCS.read_text()
    section = text[text.index("\n## Metrics") :]
    names: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `conductor_"):
            first, labels = line.split("|")[1:3]
            beginning = ""
            for name in re.findall(r"`(\w+)`", first):
                if not name.startswith("_"):
                    beginning = name
                    whole = name
                else:
                    whole = _continued(beginning, name)
                assert whole not in names, f"{whole} is there twice"
                names[whole] = labels.strip()
    return names


def _continued(beginning: str, name: str) -> str:
    family = beginning.removesuffix("_total").rpartition("_")[0]
    return family + name


def declared() -> set[str]:
    """Names in the sources of collectors, also of those that need a Redis or several conductors; no `_total`."""
    names = set()
    for package in ("conductor", "router"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if "MetricFamily" in text:
                names |= {
                    node.value
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and re.fullmatch(r"conductor_[a-z_]+[a-z]", node.value)
                }
    return names


def shown(text: str) -> dict[str, set[str]]:
    """Names as they are asked for, with their labels as far as there is a series to tell them."""
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        names[name] = labels
    return names


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FrontDoor]]:
    """With router workers, and with tracing in one process: whatever can be switched on is on in one of them."""
    pytest.importorskip("opentelemetry.sdk")
    folder = tmp_path_factory.mktemp("metrics")
    content = {
        "api_keys": [{"name": "root", "key": KEY, "admin": True, "limits": {"requests_per_minute": 1}}],
        "emulation": {"cluster": "2p2d", "speed": 10, "host_blocks": 1000},
        "index": {"max_blocks": 100_000, "snapshot_interval_s": 1.0},
        "scheduling": {"record": str(folder / "record.jsonl")},
        "server": {"workers": 2},
        "state_dir": str(folder / "state"),
        "tier_planner": {"actions": "all"},
    }
    traced = {
        "emulation": {"cluster": "1", "speed": 10},
        "tracing": {"otlp_endpoint": "http://127.0.0.1:9"},
    }
    files = []
    for number, each in enumerate((content, traced)):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump(each))
    bearer = {"authorization": f"Bearer {KEY}"}
    with (
        front_door(folder, "--config", str(files[0]), headers=bearer) as whole,
        front_door(folder, "--config", str(files[1])) as tracing,
    ):
        for _ in range(2):
            whole.http.post("/v1/completions", json={"model": "emulated-8b", "prompt": "Hello!"})
        time.sleep(1.5)
        yield [whole, tracing]


@pytest.mark.slow
@pytest.mark.timeout(180)  # starts two servers
def test_the_table_is_the_registry(doors: list[FrontDoor]) -> None:
    registry = CollectorRegistry()
    registry.register(RegistrationCollector(lambda: 0))  # of `conductor index`
    found = shown(generate_latest(registry).decode())
    for door in doors:
        found |= shown(door.http.get("/metrics").text)
    table = documented()
    assert found.keys() - table.keys() == set(), "not in the table of docs/api.md"
    known = found.keys() | declared()
    stale = {name for name in table if name not in known and name.removesuffix("_total") not in known}
    assert stale == set(), "in the table of docs/api.md, and nowhere else"
    missing = {name for name in declared() if not any(each.startswith(name) for each in table)}
    assert missing == set(), "declared, and not in the table of docs/api.md"
    for name, labels in found.items():
        for label in labels:
            assert re.search(rf"\b{label}\b", table[name]), f"the table does not name {name}'s label {label}"
