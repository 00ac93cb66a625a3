"""The Helm chart as Helm renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "conductor"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
_APART = {"dashboard.yaml": "Dashboard", "redis-service.yaml": "RedisService"}  # second ones of a kind
EVERYTHING: dict[str, Any] = {
    "config": {"discovery": {"kubernetes": {"pods": [{"selector": "app=vllm"}]}}},
    "secret": {"name": "keys", "adminTokenKey": "admin", "env": {"CHAT_KEY": "chat"}},
    "podDisruptionBudget": {"enabled": True},
    "autoscaling": {
        "enabled": True,
        "podMetrics": [{"name": "conductor_held_requests", "averageValue": "10"}],
    },
    "networkPolicy": {
        "enabled": True,
        "ingressFrom": [{"namespaceSelector": {}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "imagePullSecrets": [{"name": "registry"}],
    "extraEnv": [{"name": "OTEL_SERVICE_NAME", "value": "front-door"}],
    "service": {"annotations": {"owner": "inference"}},
    "endpointPicker": {
        "enabled": True,
        "inferencePool": {"enabled": True, "matchLabels": {"app": "vllm"}, "targetPorts": [8000, 8001]},
    },
    "sharedState": {"enabled": True, "redis": {"enabled": True, "passwordKey": "redis"}},
    "podAnnotations": {"owner": "inference"},
    "podLabels": {"team": "inference"},
    "priorityClassName": "high",
}


def variants() -> dict[str, dict[str, Any]]:
    """Values by what they are called: the defaults, every example, and everything that can be switched on."""
    read = {name: yaml.safe_load(path.read_text()) for name, path in EXAMPLES.items()}
    return {"defaults": {}, "everything": EVERYTHING} | read


def render(values: dict[str, Any], *, name: str = "conductor") -> dict[str, dict[str, Any]]:
    """Objects by kind, and the namespace where that is another; the dashboard's ConfigMap is under ``Dashboard``,
    Redis' Service under ``RedisService``.

    Raises HelmError.
    """
    objects = {}
    with helm_python.Chart.load(CHART) as chart:
        for path, text in chart.render(values, name=name, namespace="llm").items():
            if path.endswith(".yaml"):
                for each in yaml.safe_load_all(text):
                    if each is not None:
                        kind = _APART.get(path.rpartition("/")[2], each["kind"])
                        elsewhere = each["metadata"].get("namespace", "llm")
                        kind = kind if elsewhere == "llm" else f"{kind} of {elsewhere}"
                        assert kind not in objects
                        objects[kind] = each
    return objects


def notes(values: dict[str, Any]) -> str:
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values, name="conductor", namespace="llm")["conductor/templates/NOTES.txt"]


def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The one that runs `conductor serve`."""
    (found,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def configuration(objects: dict[str, dict[str, Any]], folder: Path) -> Path:
    """The file that the process is started with, as the ConfigMap holds it."""
    path = folder / "config.yaml"
    path.write_text(objects["ConfigMap"]["data"]["config.yaml"])
    return path
