"""Makes the chart's Grafana dashboard of its description, scripts/dashboard.yaml.

python scripts/dashboard.py
"""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import yaml

DESCRIPTION = Path(__file__).with_suffix(".yaml")
DASHBOARD = Path(__file__).parents[1] / "helm" / "conductor" / "dashboards" / "conductor.json"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CHOSEN = 'namespace=~"$namespace",job=~"$job"'
_WIDTH, _HEIGHT, _A_ROW = 8, 8, 3  # of a panel in Grafana's grid of 24 columns
_LETTERS = "ABCDEFGH"


def dashboard(description: list[dict[str, Any]]) -> dict[str, Any]:
    """As Grafana imports it. Raises KeyError for a panel without title, unit or series."""
    panels: list[dict[str, Any]] = []
    numbers, top = count(1), 0
    for row in description:
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append(
            {
                "id": next(numbers),
                "type": "row",
                "title": row["row"],
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        top += 1
        for position, panel in enumerate(row["panels"]):
            line, column = divmod(position, _A_ROW)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": top + line * _HEIGHT}
            panels.append(_panel(panel, next(numbers), place))
        top += -(-len(row["panels"]) // _A_ROW) * _HEIGHT
    return {
        "uid": "kv-conductor",
        "title": "Conductor",
        "tags": ["conductor", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def expression(described: str) -> str:
    """With the rate interval, and of the chosen namespace and release."""

    def chosen(found: re.Match[str]) -> str:
        name, own = found.groups()
        return f"{name}{{{_CHOSEN},{own}}}" if own else f"{name}{{{_CHOSEN}}}"

    with_labels = re.sub(r"\b(conductor_\w+)(?:\{([^}]*)\})?", chosen, described)
    return with_labels.replace("[]", "[$__rate_interval]")


def written(description: list[dict[str, Any]]) -> str:
    return json.dumps(dashboard(description), indent=1) + "\n"


def _panel(panel: dict[str, Any], number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel["title"],
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "targets": [
            {"refId": letter, "expr": expression(described), "legendFormat": legend}
            for letter, (legend, described) in zip(_LETTERS, panel["series"].items(), strict=False)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    seen = "conductor_inflight_requests"
    return [
        source,
        _variable("namespace", "Namespace", f"label_values({seen}, namespace)"),
        _variable("job", "Release", f'label_values({seen}{{namespace=~"$namespace"}}, job)'),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    DASHBOARD.write_text(written(yaml.safe_load(DESCRIPTION.read_text())))
