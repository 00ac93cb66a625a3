"""Traces for Perfetto, read back: lanes never overlap, and every request is there in full."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from simulated_runs import busy_pairs, finished, lost, simulated

from conductor.catalogue import LLAMA_8B_H100
from conductor.placement import Objectives
from conductor.policies import make_policy
from simulator.cluster import (
    ClusterSimulation,
    Outage,
    Outcome,
    Simulated,
    make_scheduler,
    requests_of,
    uniform,
)
from simulator.report import chrome_trace, write_chrome_trace
from simulator.workloads import generate

Event = dict[str, Any]


def events_of(run: Simulated, *outages: Outage) -> list[Event]:
    events: list[Event] = json.loads("".join(chrome_trace(run, outages)))["traceEvents"]
    return events


def names(events: list[Event], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def check(run: Simulated, events: list[Event]) -> None:
    lanes = defaultdict(list)
    slices: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X" and event["cat"] != "outage":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            assert event["cat"] not in slices[event["args"]["request"]], "each kind once"
            slices[event["args"]["request"]][event["cat"]] = event
    threads, processes = names(events, "thread_name"), names(events, "process_name")
    assert lanes.keys() <= threads.keys()
    for lane, pieces in lanes.items():
        pieces.sort()
        ends = [end for _, end in pieces]
        assert all(start >= end for (start, _), end in zip(pieces[1:], ends, strict=False)), threads[lane]
    served = [result for result in run.results if result.outcome is Outcome.FINISHED]
    assert slices.keys() == {result.number for result in served}
    for result in served:
        own = slices[result.number]
        pair = result.prefill_instance != result.decode_instance
        assert own.keys() == {"queue", "prefill", "decode"} | ({"hand-off"} if pair else set())
        in_order = sorted(
            own.values(), key=lambda event: ["queue", "prefill", "hand-off", "decode"].index(event["cat"])
        )
        assert in_order[0]["ts"] == round(result.arrival_s * 1e6)
        for one, following in pairwise(in_order):
            assert one["ts"] + one["dur"] == following["ts"]
        last = in_order[-1]
        assert last["ts"] + last["dur"] == round((result.arrival_s + result.e2e_s) * 1e6)
        assert processes[own["prefill"]["pid"], 0] == result.prefill_instance
        assert processes[last["pid"], 0] == result.decode_instance
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]][event["ph"]] = event
    assert arrows.keys() == {r.number for r in served if r.prefill_instance != r.decode_instance}
    for number, steps in arrows.items():
        for step, cat in (("s", "prefill"), ("t", "hand-off"), ("f", "decode")):
            arrow, piece = steps[step], slices[number][cat]
            assert (arrow["pid"], arrow["tid"]) == (piece["pid"], piece["tid"])
            assert piece["ts"] <= arrow["ts"] <= piece["ts"] + piece["dur"]


def test_slices_of_pairs_and_of_those_not_served() -> None:
    run = busy_pairs(400)
    events = events_of(run)
    check(run, events)
    unserved = [event["name"] for event in events if event["ph"] == "i"]
    assert len(unserved) == 40
    assert {name.split()[-1] for name in unserved} == {"rejected", "failed"}


def test_slices_of_simulated_clusters() -> None:
    for cluster in ("2", "2p2d"):
        spec = uniform(cluster, LLAMA_8B_H100)
        scheduler = make_scheduler(spec, make_policy("slo"), Objectives())
        requests = list(requests_of(generate("api", 150, 12.0, seed=0)))
        run = ClusterSimulation(scheduler, spec).run(requests)
        check(run, events_of(run))


def test_parts_that_are_not_told_apart_run_into_the_next() -> None:
    unknown = float("inf")
    run = simulated([finished(0, 1.0, prefilled_s=unknown, received_s=unknown, decode_instance="p0")])
    events = events_of(run)
    check(run, events)
    (prefill,) = (event for event in events if event.get("cat") == "prefill")
    assert (prefill["ts"], prefill["dur"]) == (1_100_000, 550_000)


def test_counters_are_those_of_the_timeline() -> None:
    run = simulated([finished(0, 0.0, e2e_s=5.0), lost(1, 1.0)])
    events = events_of(run)
    processes = {name: pid for (pid, _), name in names(events, "process_name").items()}
    running = [
        (e["ts"], e["args"]["requests"])
        for e in events
        if e["ph"] == "C" and e["name"] == "running" and e["pid"] == processes["p1"]
    ]
    assert running == [(second * 1_000_000, second + 1) for second in range(6)]
    assert Counter(e["name"] for e in events if e["ph"] == "C").keys() == {"running", "waiting", "KV memory"}


def test_outages_are_slices() -> None:
    events = events_of(simulated([finished(0, 0.0)]), Outage("d1", 0.5, 2.0))
    (outage,) = (event for event in events if event.get("cat") == "outage")
    assert (outage["ts"], outage["dur"]) == (500_000, 2_000_000)
    assert names(events, "process_name")[outage["pid"], 0] == "d1"


def test_files_are_compressed_by_their_name(tmp_path: Path) -> None:
    run = busy_pairs(30)
    for name in ("trace.json", "trace.json.gz", "again.json.gz"):
        write_chrome_trace(tmp_path / name, run)
    plain = (tmp_path / "trace.json").read_bytes()
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == plain
    assert (tmp_path / "again.json.gz").read_bytes() == (tmp_path / "trace.json.gz").read_bytes()
    assert json.loads(plain)["displayTimeUnit"] == "ms"
