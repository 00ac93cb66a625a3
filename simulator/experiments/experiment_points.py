"""The points of an experiment: its traces found, its clusters made, and what was not asked for left out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from conductor.configuration_faults import ConfigError, did_you_mean
from simulator.experiments.clusters import find_cluster
from simulator.experiments.experiment_file import Experiment, WorkloadSection
from simulator.experiments.grid import NamedCluster, all_points
from simulator.experiments.point import Point
from simulator.experiments.workload import Generated, Workload
from simulator.workloads import Selection

TRACES_VARIABLE: Final = "CONDUCTOR_TRACES"


def experiment_points(
    experiment: Experiment,
    folder: Path,
    *,
    traces: Path | None,
    quick: bool = False,
    limit: int | None = None,
    only: Mapping[str, Sequence[str]] | None = None,
    with_curves: bool = False,
) -> list[Point]:
    """Its points in their order. Clusters are looked for in ``folder``, where the experiment's file is.

    Traces are looked for in ``traces``, else where the environment's ``CONDUCTOR_TRACES`` says. ``only`` keeps
    points whose labels have one of the values; ``quick`` what the experiment says; ``limit`` so many requests of
    each workload. Raises ConfigError for what cannot be found, with where to get it.
    """
    clusters = _clusters(experiment, folder)
    sections = _sections(experiment, quick)
    limits = [limit, experiment.quick.limit if quick else None]
    points: list[Point] = []
    for name, section in sections.items():
        loads = experiment.loads if section.loads is None else section.loads
        points += all_points(
            {name: _workload(section, traces, limits)},
            clusters,
            experiment.policy_choices(),
            [load.load(section.seed) for load in loads],
            good_share=experiment.find_rate,
            with_bounds=experiment.bounds,
            with_curves=with_curves,
        )
    if only is not None:
        _check_labels(points, only)
        points = _only(points, only)
    if quick:
        points = _only(points, experiment.quick.only)
    if not points:
        raise ConfigError("no point of the experiment is left: ask for more, or leave --quick out")
    used = {dict(point.labels)["workload"] for point in points}
    _check_traces({name: section for name, section in sections.items() if name in used}, traces)
    return points


def experiment_workloads(
    experiment: Experiment, *, traces: Path | None, quick: bool = False, limit: int | None = None
) -> dict[str, Workload]:
    """Its workloads by name; arguments and errors as those of `experiment_points`."""
    sections = _sections(experiment, quick)
    _check_traces(sections, traces)
    limits = [limit, experiment.quick.limit if quick else None]
    return {name: _workload(section, traces, limits) for name, section in sections.items()}


def _sections(experiment: Experiment, quick: bool) -> Mapping[str, WorkloadSection]:
    return (experiment.quick.workloads if quick else {}) or experiment.workloads


def _clusters(experiment: Experiment, folder: Path) -> list[NamedCluster]:
    clusters = []
    for name, choice in experiment.clusters.items():
        source = find_cluster(choice.cluster, choice.instance_class, folder).with_settings(choice.settings())
        labels = (("cluster", name),)
        if not experiment.variants:
            clusters.append(NamedCluster(labels, source.make()))
        for variant, settings in experiment.variants.items():
            setup = source.with_settings(settings.items()).make()
            clusters.append(NamedCluster((*labels, ("variant", variant)), setup))
    return clusters


def _workload(section: WorkloadSection, traces: Path | None, limits: Sequence[int | None]) -> Workload:
    given = [each for each in (section.limit, *limits) if each is not None]
    selection = Selection(
        start_s=section.from_s,
        end_s=section.to_s,
        min_input_tokens=section.min_input_tokens,
        max_input_tokens=section.max_input_tokens,
        min_output_tokens=section.min_output_tokens,
        max_output_tokens=section.max_output_tokens,
        limit=min(given, default=None),
    )
    source: Path | Generated
    if section.trace is not None:
        source = _folder(traces) / section.trace
    else:
        assert section.generate is not None
        source = Generated(section.generate, section.requests, section.rate, section.seed)
    return Workload(source, section.format, selection, section.output_tokens)


def _folder(traces: Path | None) -> Path:
    return traces or Path(os.environ.get(TRACES_VARIABLE) or ".")


def _check_labels(points: list[Point], wanted: Mapping[str, Sequence[str]]) -> None:
    for label, values in wanted.items():
        known: dict[str, None] = {}
        for point in points:
            labels = dict(point.labels)
            if label not in labels:
                raise ConfigError(f"points have no label {label!r}; {did_you_mean(label, labels)}")
            known[labels[label]] = None
        for value in values:
            if value not in known:
                raise ConfigError(f"no point has {label} {value!r}; {did_you_mean(value, known)}")


def _only(points: list[Point], wanted: Mapping[str, Sequence[str]]) -> list[Point]:
    return [
        point
        for point in points
        if all(dict(point.labels).get(label) in values for label, values in wanted.items())
    ]


def _check_traces(sections: Mapping[str, WorkloadSection], traces: Path | None) -> None:
    missing = [
        f"{section.trace} is not in {_folder(traces).absolute()}"
        + (f"; it can be downloaded from {section.download}" if section.download else "")
        for section in sections.values()
        if section.trace is not None and not (_folder(traces) / section.trace).is_file()
    ]
    if missing:
        raise ConfigError(
            "\n".join(missing)
            + f"\nSay where traces are with --traces FOLDER or {TRACES_VARIABLE}, or leave these out with "
            "--only workload=NAME,..."
        )
