"""Experiment files: what they may say, and the points they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_points import small_trace

from cache_index import Tier
from conductor.configuration_faults import ConfigError
from conductor.policies import POLICIES
from simulator.experiments.experiment_file import (
    Experiment,
    find_experiment,
    read_experiment,
    shipped_experiments,
)
from simulator.experiments.experiment_points import experiment_points
from simulator.experiments.workload import Generated, Load

CONTENT: dict[str, Any] = {
    "title": "A title",
    "question": "Which?",
    "source": "A paper",
    "workloads": {
        "recorded": {"trace": "small.jsonl", "download": "https://example.com/small", "limit": 30},
        "drawn": {"generate": "rag", "requests": 50, "rate": 5, "seed": 4, "output_tokens": 1, "loads": [{}]},
    },
    "clusters": {
        "one": {"cluster": "1", "set": {"scheduling.objectives.ttft_s": 9}},
        "pair": {"cluster": "1p1d"},
    },
    "variants": {"small": {"instances.*.kv_tokens": "50k"}, "host": {"instances.*.tiers.host": "1M"}},
    "policies": {
        "ours": {"policy": "slo", "parameters": {"decode_prefill_tokens": 0}},
        "none": {"policy": "random"},
    },
    "loads": [{"speed": 2}, {"rate": 3}],
    "expected": [
        {"where": {"policy": "ours"}, "figures": {"mean_ttft_s": 3.07}},
        {
            "where": {"policy": "ours", "cluster": "pair"},
            "figures": {"mean_ttft_s": 1.0, "reuse_percent": 40},
        },
    ],
    "quick": {"limit": 10, "only": {"policy": ["ours"]}},
}


def experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate(CONTENT | changes)


def write(folder: Path, content: Any) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("path", shipped_experiments(), ids=lambda path: path.stem)
def test_every_shipped_experiment_makes_points(path: Path, tmp_path: Path) -> None:
    shipped = read_experiment(path)
    if not shipped.clusters:
        return
    for section in shipped.workloads.values():
        if section.trace is not None:
            assert section.download is not None, "traces are not shipped: say where they are"
            small_trace(tmp_path).rename(tmp_path / section.trace)
    points = experiment_points(shipped, path.parent, traces=tmp_path)
    quick = experiment_points(shipped, path.parent, traces=None, quick=True)
    assert 0 < len(quick) <= len(points), "the quick part needs no traces"


def test_the_comparison_has_every_policy_on_every_workload(tmp_path: Path) -> None:
    path = find_experiment("policies")
    shipped = read_experiment(path)
    for name in ("conversation_trace", "synthetic_trace"):
        small_trace(tmp_path).rename(tmp_path / f"{name}.jsonl")
    points = [dict(point.labels) for point in experiment_points(shipped, path.parent, traces=tmp_path)]
    combinations = {(point["workload"], point["policy"]) for point in points}
    assert combinations == {(workload, policy) for workload in shipped.workloads for policy in POLICIES}


def test_points_are_all_combinations(tmp_path: Path) -> None:
    small_trace(tmp_path)
    points = experiment_points(experiment(), Path(), traces=tmp_path)
    assert len(points) == 2 * 2 * 2 * (2 + 1), "clusters x variants x policies x loads of both workloads"
    first, last = points[0], points[-1]
    assert dict(first.labels) == {
        "workload": "recorded",
        "cluster": "one",
        "variant": "small",
        "policy": "ours",
        "load": "x2",
    }
    assert first.workload.source == tmp_path / "small.jsonl"
    assert first.workload.selection.limit == 30
    assert first.cluster.instances[0].kv_tokens == 50_000
    assert first.scheduling.objectives.ttft_s == 9
    assert first.scheduling.policy_parameters == {"decode_prefill_tokens": 0}
    assert last.workload.source == Generated("rag", 50, 5, 4)
    assert (last.workload.output_tokens, last.load) == (1, Load(seed=4))
    assert last.cluster.instances[0].tier_tokens == {Tier.HOST: 1_000_000}


def test_traces_are_found_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_trace(tmp_path)
    monkeypatch.setenv("CONDUCTOR_TRACES", str(tmp_path))
    assert experiment_points(experiment(), Path(), traces=None)[0].workload.source == tmp_path / "small.jsonl"


def test_a_missing_trace_is_told_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment_points(experiment(), Path(), traces=tmp_path)
    assert f"small.jsonl is not in {tmp_path}; it can be downloaded from https://example.com/small" in str(
        caught.value
    )
    assert "--only workload=NAME" in str(caught.value)
    assert experiment_points(experiment(), Path(), traces=tmp_path, only={"workload": ["drawn"]})


def test_a_part_can_be_asked_for(tmp_path: Path) -> None:
    small_trace(tmp_path)
    quick = experiment_points(experiment(), Path(), traces=tmp_path, quick=True)
    assert {dict(point.labels)["policy"] for point in quick} == {"ours"}
    assert {point.workload.selection.limit for point in quick} == {10}
    only = {"cluster": ["pair"], "load": ["x2", "x1"]}
    chosen = experiment_points(experiment(), Path(), traces=tmp_path, only=only)
    assert {dict(point.labels)["load"] for point in chosen} == {"x2", "x1"}
    for wrong, message in (
        ({"cluster": ["pear"]}, "no point has cluster 'pear'; did you mean 'pair'"),
        ({"clusters": ["pair"]}, "points have no label 'clusters'; did you mean 'cluster'"),
    ):
        with pytest.raises(ConfigError, match=message):
            experiment_points(experiment(), Path(), traces=tmp_path, only=wrong)
    other = experiment(quick={"workloads": {"calls": {"generate": "api"}}})
    stand_ins = experiment_points(other, Path(), traces=None, quick=True, limit=7)
    assert {dict(point.labels)["workload"] for point in stand_ins} == {"calls"}
    assert {point.workload.selection.limit for point in stand_ins} == {7}
    with pytest.raises(ConfigError, match="no point of the experiment is left"):
        experiment_points(experiment(), Path(), traces=tmp_path, quick=True, only={"policy": ["none"]})


def test_the_most_particular_expectation_comes_last() -> None:
    labels = {"policy": "ours", "cluster": "pair", "workload": "drawn"}
    assert experiment().expected_of(labels) == {"mean_ttft_s": 1.0, "reuse_percent": 40}
    assert experiment().expected_of({**labels, "cluster": "one"}) == {"mean_ttft_s": 3.07}
    assert experiment().expected_of({**labels, "policy": "none"}) == {}


def test_policies_may_be_all_some_or_the_clusters_own(tmp_path: Path) -> None:
    assert list(experiment(policies="all").policy_choices() or ()) == list(POLICIES)
    assert list(experiment(policies=["slo", "random"]).policy_choices() or ()) == ["slo", "random"]
    assert experiment(policies=None).policy_choices() is None
    small_trace(tmp_path)
    own = experiment_points(experiment(policies=None, quick={}), Path(), traces=tmp_path)
    assert {dict(point.labels)["policy"] for point in own} == {"slo"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, "unknown key 'titel'; did you mean 'title'?"),
        ({"workloads": {}}, "give workloads and clusters to simulate, or sizes"),
        ({"clusters": {}}, "clusters is required"),
        ({"workloads": {"a": {}}}, "'workloads.a': give trace (a file) or generate"),
        (
            {"workloads": {"a": {"generate": "chatt"}}},
            "unknown kind of workload 'chatt'; did you mean 'chat'?",
        ),
        ({"workloads": {"a": {"trace": "t", "rate": 2}}}, "rate is for generated workloads"),
        ({"workloads": {"a": {"generate": "rag", "format": "azure"}}}, "format is for traces"),
        ({"policies": ["slo", "best"]}, "unknown policy 'best'"),
        ({"policies": {"x": {"policy": "slo", "parameters": {"y": 1}}}}, "unknown parameter 'y'"),
        ({"report": ["mean_ttft"]}, "unknown figure 'mean_ttft'; did you mean 'mean_ttft_s'?"),
        (
            {"orders": [{"figure": "mean_ttft", "label": "policy", "ascending": ["ours", "none"]}]},
            "unknown figure 'mean_ttft'; did you mean 'mean_ttft_s'?",
        ),
        ({"report": ["ttft_by_bound"]}, "ttft_by_bound is a figure of bounds: set bounds: true"),
        ({"expected": [{"where": {}, "figures": {"good": 1}}]}, "unknown figure 'good'"),
        ({"loads": [{"speed": 1, "rate": 1}]}, "give one of them"),
        ({"clusters": {"a": {"clutser": "8"}}}, "unknown key 'clusters.a.clutser'; did you mean 'cluster'?"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_experiment(write(tmp_path, CONTENT | changes))
    assert message in str(caught.value)


def test_files_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no experiment 'policy': give a file, or one of .*policies"
    ):
        find_experiment("policy")
    with pytest.raises(ConfigError, match="cannot read the experiment"):
        read_experiment(tmp_path / "gone.yaml")
    path = tmp_path / "x.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_experiment(path)
    path.write_text("- a")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        read_experiment(path)
