"""docs/simulation.md names every key of cluster files and experiments, and its examples are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from simulated_points import small_trace

from simulator.cluster.cluster_file import ClusterSection, make_cluster
from simulator.experiments.clusters import shipped_clusters
from simulator.experiments.experiment_file import Experiment
from simulator.experiments.experiment_points import experiment_points
from simulator.experiments.figures import FIGURES

TEXT = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in section.model_fields.items():
        annotation = str(field.annotation)
        arguments = (field.annotation, *getattr(field.annotation, "__args__", ()))
        nested = [each for each in arguments if isinstance(each, type) and issubclass(each, BaseModel)]
        described = name in ("links", "loads", "policies") or prefix + name == "quick.workloads"
        if not nested or described:
            found.append(f"{prefix}{name}")
        else:
            step = {"list": "[]", "dict": ".NAME"}.get(annotation[:4], "")
            found += keys(nested[0], f"{prefix}{name}{step}.")
    return found


@pytest.mark.parametrize("section", [ClusterSection, Experiment])
def test_every_key_is_documented(section: type[BaseModel]) -> None:
    found = keys(section)
    assert len(found) > 15
    missing = [key for key in found if f"`{key}`" not in TEXT and f"`{key}.NAME`" not in TEXT]
    assert not missing


def test_every_figure_and_shipped_cluster_is_documented() -> None:
    assert not [name for name in (*FIGURES, *shipped_clusters()) if f"`{name}`" not in TEXT]


def test_the_cluster_file_shown_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "measured.yaml").write_text("{extends: llama-3.1-8b-h100, name: measured}")
    made = make_cluster(yaml.safe_load(YAML[0]), tmp_path, "docs")
    assert [spec.name for spec in made.cluster.instances[:5]] == [
        "fill0",
        "fill1",
        "fill2",
        "fill3",
        "speak0",
    ]


def test_the_experiment_shown_makes_points(tmp_path: Path) -> None:
    small_trace(tmp_path).rename(tmp_path / "conversation_trace.jsonl")
    shown = Experiment.model_validate(yaml.safe_load(YAML[1]))
    points = experiment_points(shown, tmp_path, traces=tmp_path)
    assert len(points) == (1 + 2) * 2 * 2
    assert shown.expected_of(dict(points[0].labels)) == {"reuse_percent": 16.9}


def test_the_program_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    small_trace(tmp_path).rename(tmp_path / "conversation_trace.jsonl")
    (tmp_path / "cluster.yaml").write_text("instances: [{}]")
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(program, {})
    assert 0.0 < float(capsys.readouterr().out) <= 1.0
