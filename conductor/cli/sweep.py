"""`conductor sweep`: every combination of clusters, policies and loads, simulated in parallel."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import typer
from rich.console import Console

from conductor.cli.cluster_options import (
    Admission,
    Hold,
    InstanceClassOption,
    TbtObjective,
    TtftObjective,
    read_setting,
    read_value,
    scheduling_settings,
)
from conductor.cli.json_output import JsonOption, write_json
from conductor.cli.point_runs import (
    HtmlPage,
    Jobs,
    OutFolder,
    RayAddress,
    make_runner,
    points_report,
    print_points,
    run_with_progress,
    write_page,
)
from conductor.cli.simulate import read_policies
from conductor.cli.trace_options import (
    Format,
    FromS,
    Limit,
    MaxInput,
    MaxOutput,
    MinInput,
    MinOutput,
    Seed,
    ToS,
    fail,
    read_or_fail,
    trace_path,
)
from simulator.experiments.clusters import ClusterSource, Setting, find_cluster
from simulator.experiments.figures import OF_BOUNDS, USUAL
from simulator.experiments.grid import NamedCluster, PolicyChoice, all_points
from simulator.experiments.workload import Load, Workload
from simulator.workloads import Selection


def sweep(
    trace: Annotated[
        str, typer.Argument(help="The trace, in any format of docs/traces.md; - reads it from stdin.")
    ],
    cluster: Annotated[
        str | None,
        typer.Option(help="Clusters, separated by commas: 8, 4p4d, cluster files, names of shipped ones."),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(help="Splits, separated by commas: 2p6d,4p4d. Each cluster with each of them."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE,...",
            help="Values for a key of the clusters: instances.*.tiers.host=1M,3M. Each with each; may be repeated.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="Separated by commas, or all; default: each cluster file's own, else slo."),
    ] = None,
    speeds: Annotated[str | None, typer.Option(help="Times as fast as recorded: 1,2,4.")] = None,
    rates: Annotated[str | None, typer.Option(help="Requests a second over the trace: 2,4,8.")] = None,
    find_rate: Annotated[
        bool,
        typer.Option("--find-rate", help="Instead of given loads: the highest rate that is served well."),
    ] = False,
    good_share: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="With --find-rate: share of requests to meet both objectives (0.9)."
        ),
    ] = None,
    instance_class: InstanceClassOption = None,
    ttft_objective_s: TtftObjective = None,
    tbt_objective_s: TbtObjective = None,
    admission: Admission = None,
    hold: Hold = None,
    trace_format: Format = None,
    limit: Limit = None,
    from_s: FromS = 0.0,
    to_s: ToS = None,
    min_input_tokens: MinInput = 0,
    max_input_tokens: MaxInput = None,
    min_output_tokens: MinOutput = 0,
    max_output_tokens: MaxOutput = None,
    seed: Seed = 0,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds/--no-bounds", help="How far from what no scheduler can exceed: seconds a load."
        ),
    ] = False,
    jobs: Jobs = None,
    ray: RayAddress = None,
    out: OutFolder = None,
    json_path: JsonOption = None,
    html: HtmlPage = None,
) -> None:
    """Simulate TRACE on every combination of clusters, policies and loads, and compare them.

    Results do not depend on how many simulations run at a time: the same sweep gives the same bytes.

    Examples:

      conductor sweep conversation_trace.jsonl --cluster 8,4p4d --policies slo,lmetric --speeds 1,2,3

      conductor sweep conversation_trace.jsonl --ratios 2p6d,4p4d,6p2d --speeds 2 --out results

      conductor sweep conversation_trace.jsonl --cluster 8 --set 'instances.*.kv_tokens=100k,200k,400k'

      conductor sweep conversation_trace.jsonl --cluster 8 --policies slo,lmetric --find-rate
    """
    console = Console(stderr=True)
    if cluster is None and ratios is None:
        fail(console, "say which clusters: --cluster 8,4p4d,cluster.yaml, or --ratios 2p6d,4p4d")
    if good_share is not None and not find_rate:
        fail(console, "--good-share belongs to --find-rate")
    if sum([speeds is not None, rates is not None, find_rate]) > 1:
        fail(console, "--speeds, --rates and --find-rate exclude each other")
    common = scheduling_settings(ttft_objective_s, tbt_objective_s, admission, hold)
    sources = _sources(console, cluster, ratios, instance_class)
    clusters = _clusters(console, sources, common, settings or [])
    chosen = None
    if policies is not None:
        chosen = {name: PolicyChoice(name) for name in read_policies(console, policies, "")}
    selection = Selection(
        from_s, to_s, min_input_tokens, max_input_tokens, min_output_tokens, max_output_tokens, limit
    )
    with trace_path(trace) as path:
        workload = Workload(path, trace_format, selection)
        read_or_fail(console, workload)  # says what is wrong with it before processes are started
        points = all_points(
            {workload.name: workload},
            clusters,
            chosen,
            _loads(console, speeds, rates, seed),
            good_share=(good_share or 0.9) if find_rate else None,
            with_bounds=bounds,
            with_curves=html is not None,
        )
        figures = run_with_progress(console, points, make_runner(jobs, ray), out)
        report = {"trace": trace, "points": points_report(points, figures)}
    title = f"{len(points)} simulations of {trace}"
    if json_path is not None:
        write_json(json_path, report)
    if json_path != "-":
        columns = (*(("highest_rate",) if find_rate else ()), *USUAL, *(OF_BOUNDS if bounds else ()))
        print_points(Console(), title, points, figures, columns)
    if html is not None:
        write_page(console, html, title, points, figures)


def _sources(
    console: Console, cluster: str | None, ratios: str | None, instance_class: str | None
) -> list[ClusterSource]:
    splits = _listed(ratios or "")
    if cluster is None:
        if not splits:
            fail(console, "--ratios names none: 2p6d,4p4d")
        return [find_cluster(split, instance_class) for split in splits]
    sources = []
    for text in _listed(cluster):
        source = find_cluster(text, instance_class)
        sources += [source.with_split(split) for split in splits] or [source]
    return sources


def _clusters(
    console: Console, sources: list[ClusterSource], common: list[Setting], settings: list[str]
) -> list[NamedCluster]:
    """Every source with every combination of values of the settings."""
    values: list[list[tuple[str, str]]] = []
    for text in settings:
        path, value = read_setting(console, text)
        values.append([(path, each) for each in _listed(text.partition("=")[2])] or [(path, str(value))])
    clusters = []
    for source in sources:
        for chosen in product(*values):
            given = [(path, read_value(value)) for path, value in chosen]
            setup = source.with_settings([*common, *given]).make()
            clusters.append(NamedCluster((("cluster", source.name), *chosen), setup))
    return clusters


def _loads(console: Console, speeds: str | None, rates: str | None, seed: int) -> list[Load]:
    given = _listed(speeds or rates or "")
    try:
        loads = [
            Load(speed=float(each), seed=seed) if speeds is not None else Load(rate=float(each), seed=seed)
            for each in given
        ]
    except ValueError as error:
        fail(console, f"--speeds and --rates are numbers such as 1,2,4: {error}")
    if not loads and (speeds is not None or rates is not None):
        fail(console, "--speeds and --rates are numbers such as 1,2,4; there is none")
    return loads or [Load(seed=seed)]


def _listed(text: str) -> list[str]:
    """What stands between commas, brackets kept together."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(f"{text},"):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in parts if part]
