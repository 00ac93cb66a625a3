"""`conductor replay`: a trace on a simulated cluster, over HTTP, or as recorded decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from conductor.cli.cluster_options import (
    Admission,
    Hold,
    InstanceClassOption,
    Settings,
    TbtObjective,
    TtftObjective,
    read_setting,
    scheduling_settings,
)
from conductor.cli.json_output import JsonOption
from conductor.cli.output_files import writable_file, writable_folder
from conductor.cli.trace_options import (
    Format,
    FromS,
    Limit,
    MaxInput,
    MaxOutput,
    MinInput,
    MinOutput,
    Rate,
    Seed,
    Speed,
    ToS,
    fail,
    read_or_fail,
    trace_path,
)
from conductor.placement import Objectives
from simulator.experiments.clusters import find_cluster
from simulator.experiments.workload import Load, Workload, requests_at
from simulator.workloads import Selection, TraceRecord, at_rate

_MODES = """conductor replay needs to know where the requests go. One of:

  conductor replay TRACE --cluster 4p4d --policy slo,lmetric      simulated, in virtual time
  conductor replay TRACE --url http://127.0.0.1:8000              over HTTP, to a running conductor serve
  conductor replay --decisions FILE                               decisions recorded by conductor serve --record"""


def replay(
    trace: Annotated[
        str | None, typer.Argument(help="The trace, in any format of docs/traces.md; - reads it from stdin.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Simulate: 8 (mixed instances), 4p4d (four that prefill, four that decode), a cluster file, or "
            "the name of a shipped one (docs/simulation.md)."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Send over HTTP: the front door.")] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="Decide recorded decisions again: the file of serve --record.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies to compare, separated by commas, or all; default: the cluster file's, else slo. "
            "With --decisions: one, and what it would have chosen."
        ),
    ] = None,
    instance_class: InstanceClassOption = None,
    settings: Settings = None,
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
    speed: Speed = None,
    rate: Rate = None,
    seed: Seed = 0,
    json_path: JsonOption = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a run file (conductor report) and a Perfetto trace of each policy.",
            callback=writable_folder,
            is_eager=True,  # it is made before a page in it is looked at
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one HTML page with plots of all policies.", callback=writable_file),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="Write a trace for ui.perfetto.dev; of one policy. Compressed where it ends in .gz.",
            callback=writable_file,
        ),
    ] = None,
    requests: Annotated[
        bool, typer.Option("--requests", help="In the JSON report also each request.")
    ] = False,
    bounds: Annotated[
        bool, typer.Option("--bounds/--no-bounds", help="Also what no scheduler can exceed; takes seconds.")
    ] = True,
    step_by_step: Annotated[
        bool, typer.Option("--step-by-step", help="Every engine step by itself: slow, for checks.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --url: model to ask for; default: the first one served.")
    ] = None,
    max_answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --url: ask for no longer answers.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.1, help="With --url: give a request up after this long (600).")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="With --url: an API key, where keys are used.", envvar="CONDUCTOR_API_KEY"),
    ] = None,
) -> None:
    """Replay TRACE and report TTFT, TBT, reuse and load.

    With --cluster, in virtual time: engines, caches and links are modelled, the scheduler is the one that serves
    real traffic, and policies are compared on the same requests. An hour of traffic takes seconds.

    With --url, over HTTP to a running front door, on the trace's clock. Prompts are token ids generated from the
    trace's block hashes, so that equal hashes are equal tokens and caches are exercised as recorded. Exit code 1
    when any request failed.

    With --decisions, recorded decisions are decided again, without any server: exit code 0 when all come out the
    same to the last bit, 1 naming the first difference.

    Examples:

      conductor replay conversation_trace.jsonl --cluster 4p4d --policy slo,lmetric --speed 2

      conductor replay conversation_trace.jsonl --cluster cluster.yaml --policy all --json report.json

      conductor trace generate rag --rate 8 | conductor replay - --cluster 8 --set scheduling.objectives.ttft_s=1

      conductor replay conversation_trace.jsonl --url http://127.0.0.1:8000 --limit 1000
    """
    console = Console(stderr=True)
    modes = [
        name for name, given in (("--cluster", cluster), ("--url", url), ("--decisions", decisions)) if given
    ]
    if not modes:
        fail(console, _MODES)
    if len(modes) > 1:
        fail(console, f"{' and '.join(modes)} exclude each other.\n\n{_MODES}")
    for_simulations = {
        "--instance-class": instance_class,
        "--set": settings,
        "--admission": admission,
        "--hold": hold,
        "--save": save,
        "--html": html,
        "--perfetto": perfetto,
        "--requests": requests,
        "--step-by-step": step_by_step,
    }
    for_http = {"--model": model, "--max-answer-tokens": max_answer_tokens, "--timeout-s": timeout_s}
    _only(console, for_simulations, "--cluster", modes[0])
    _only(console, for_http, "--url", modes[0])
    if requests and json_path is None:
        fail(console, "--requests belongs to --json FILE")
    if decisions is not None:
        if trace is not None:
            fail(console, "--decisions FILE is replayed instead of a TRACE: leave one of them out")
        if policy is not None and "," in policy:
            fail(console, "--decisions takes one --policy")
        from conductor.cli.decision_replay import replay_decisions

        replay_decisions(decisions, policy, json_path)
        return
    if url is not None and policy is not None:
        fail(console, "over HTTP the front door decides: start conductor serve with --policy instead")
    if trace is None:
        fail(
            console,
            f"{modes[0]} needs a TRACE (docs/traces.md): conductor trace generate chat > chat.jsonl makes one",
        )
    if speed is not None and rate is not None:
        fail(console, "--speed and --rate both scale time: give one of them")
    selection = Selection(
        from_s, to_s, min_input_tokens, max_input_tokens, min_output_tokens, max_output_tokens, limit
    )
    with trace_path(trace) as path:
        load = Load(speed, rate, seed)
        if url is not None:
            records = read_or_fail(console, Workload(path, trace_format, selection))
            objectives = Objectives(
                *(ttft_objective_s or Objectives().ttft_s, tbt_objective_s or Objectives().tbt_s)
            )
            _replay_live(
                *(console, url.rstrip("/"), records, load, objectives, json_path, model),
                *(max_answer_tokens, timeout_s or 600.0, token),
            )
            return
        assert cluster is not None
        given = [read_setting(console, each) for each in settings or ()]
        given += scheduling_settings(ttft_objective_s, tbt_objective_s, admission, hold)
        setup = find_cluster(cluster, instance_class).with_settings(given).make()
        from conductor.cli.simulate import SimulationOutputs, SimulationPlan, read_policies, replay_simulated

        policies = read_policies(console, policy, setup.scheduling.policy)
        records = read_or_fail(console, Workload(path, trace_format, selection))
        try:
            workload = requests_at(records, load)
        except ValueError as error:
            fail(console, f"cannot read the trace: {error}")
        plan = SimulationPlan(trace, cluster, setup, policies, workload, load, bounds, step_by_step)
        if perfetto is not None and len(policies) > 1:
            fail(console, "--perfetto is of one policy; --save FOLDER writes a trace of each")
        replay_simulated(console, plan, SimulationOutputs(json_path, requests, save, html, perfetto))


def _replay_live(
    console: Console,
    url: str,
    records: list[TraceRecord],
    load: Load,
    objectives: Objectives,
    json_path: str | None,
    model: str | None,
    max_answer_tokens: int | None,
    timeout_s: float,
    token: str | None,
) -> None:
    from conductor.cli.live_replay import ReplayPlan
    from conductor.cli.live_run import replay_live, served_model

    if load.rate is not None:
        records = at_rate(records, load.rate, load.seed)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    plan = ReplayPlan(
        url=url,
        model=served_model(console, url, model, headers),
        speed=load.speed or 1.0,
        timeout_s=timeout_s,
        max_output_tokens=max_answer_tokens,
        headers=headers,
    )
    replay_live(console, plan, records, objectives, json_path)


def _only(console: Console, options: Mapping[str, object], belong_to: str, mode: str) -> None:
    for name, value in options.items():
        if value not in (None, False) and mode != belong_to:
            fail(console, f"{name} belongs to {belong_to}")
