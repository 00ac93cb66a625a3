"""The dashboard is what its description says, and its panels lie beside each other."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest
import yaml
from chart import CHART, ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "scripts" / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_current(script: ModuleType) -> None:
    description = yaml.safe_load(script.DESCRIPTION.read_text())
    remedy = "run python scripts/dashboard.py"
    assert (CHART / "dashboards" / "conductor.json").read_text() == script.written(description), remedy


def test_no_panel_lies_on_another(script: ModuleType) -> None:
    panels = script.dashboard(yaml.safe_load(script.DESCRIPTION.read_text()))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)


def test_expressions_are_of_the_chosen_release(script: ModuleType) -> None:
    of = 'namespace=~"$namespace",job=~"$job"'
    assert script.expression("sum(rate(conductor_a_total[]))") == (
        f"sum(rate(conductor_a_total{{{of}}}[$__rate_interval]))"
    )
    assert script.expression('conductor_a{b="c"} / conductor_d') == (
        f'conductor_a{{{of},b="c"}} / conductor_d{{{of}}}'
    )


def test_it_shows_what_operators_ask_for(script: ModuleType) -> None:
    text = json.dumps(script.dashboard(yaml.safe_load(script.DESCRIPTION.read_text())))
    for name in (
        "conductor_actions_ended_total",
        "conductor_instances",
        "conductor_instance_suspensions_total",
        "conductor_hedges_total",
        "conductor_retries_total",
        "conductor_kv_event_lag_seconds",
        "conductor_good_requests_total",
    ):
        assert name in text
