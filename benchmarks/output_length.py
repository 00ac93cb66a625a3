"""How well answer lengths are predicted, and how long a prediction takes.

Replays traces against `OutputLengths`: a request is predicted when it arrives, and its answer is learned when it
would have ended (at 30 ms a token), so nothing is known early. Reports the mean absolute error in tokens beside
that of assuming 256 and of always saying the trace's mean (which only hindsight knows), and how often an answer
stayed within the predicted 90th percentile. Mooncake's JSONL traces give a prefix key, the first blocks of the
prompt; Azure's CSV traces give none. Several files together are one cluster, the file's name being the route.
Without files: generated sessions, each with answers of its own length.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `simulator` is the package, not the script here

from conductor.admission import OutputLengths
from conductor.placement import PlacementRequest
from conductor.rehearsal import rehearse
from simulator.workloads import read_mooncake

S_PER_TOKEN = 0.03
ASSUMED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    arrived_s: float
    tokens: int
    route: str
    prefix_key: int | None


def read_answers(path: Path, prefix_blocks: int) -> list[Answer]:
    """A trace of either format, in order of arrival."""
    if path.suffix == ".csv":
        with path.open() as lines:
            rows = list(csv.DictReader(lines))
        # Seven digits of a second are one more than datetime reads.
        arrivals = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        return [
            Answer(at_s - arrivals[0], int(row["GeneratedTokens"]), path.stem, None)
            for at_s, row in zip(arrivals, rows, strict=True)
        ]
    return [
        Answer(r.arrival_s, r.output_tokens, path.stem, hash(r.hash_ids[:prefix_blocks]))
        for r in read_mooncake(path)
    ]


def generated_sessions(answers: int, seed: int = 0) -> list[Answer]:
    """Turns of sessions whose typical answer length is drawn once a session, lognormal in both."""
    generator = np.random.default_rng(seed)
    sessions = generator.lognormal(5.0, 1.0, answers // 8)
    drawn = generator.integers(0, len(sessions), answers)
    lengths = sessions[drawn] * generator.lognormal(0.0, 0.4, answers)
    return [
        Answer(0.1 * i, int(length) + 1, "generated", int(session))
        for i, (length, session) in enumerate(zip(lengths, drawn, strict=True))
    ]


def evaluate(name: str, answers: list[Answer]) -> dict[str, Any]:
    lengths = OutputLengths()
    unknown = PlacementRequest("r", "m", np.empty(0, np.uint32), 0)
    requests = {answer.route: replace(unknown, route=answer.route) for answer in answers}
    under_way: list[tuple[float, int]] = []
    predicted, within = np.empty(len(answers)), 0
    predict_ns = observe_ns = 0
    for i, answer in enumerate(answers):
        while under_way and under_way[0][0] <= answer.arrived_s:
            ended = answers[heapq.heappop(under_way)[1]]
            started_ns = time.perf_counter_ns()
            lengths.observe(requests[ended.route], ended.prefix_key, ended.tokens)
            observe_ns += time.perf_counter_ns() - started_ns
        started_ns = time.perf_counter_ns()
        prediction = lengths.predict(requests[answer.route], answer.prefix_key)
        predict_ns += time.perf_counter_ns() - started_ns
        predicted[i] = prediction.mean_tokens
        within += answer.tokens <= prediction.p90_tokens
        heapq.heappush(under_way, (answer.arrived_s + S_PER_TOKEN * answer.tokens, i))
    actual = np.array([answer.tokens for answer in answers], np.float64)
    learned = len(answers) - len(under_way)
    return {
        "trace": name,
        "answers": len(answers),
        "mean_tokens": round(float(actual.mean()), 1),
        "error_assumed": round(float(np.abs(actual - ASSUMED_TOKENS).mean()), 1),
        "error_mean": round(float(np.abs(actual - actual.mean()).mean()), 1),
        "error_learned": round(float(np.abs(actual - predicted).mean()), 1),
        "bias_learned": round(float((predicted - actual).mean()), 1),
        "within_p90": round(within / len(answers), 3),
        "predict_us": round(predict_ns / len(answers) / 1e3, 1),
        "observe_us": round(observe_ns / max(learned, 1) / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="Mooncake JSONL or Azure CSV")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="the first 2,000 answers of each trace")
    parser.add_argument("--prefix-blocks", type=int, default=2, help="of 512 tokens, in the prefix key")
    options = parser.parse_args()
    limit = 2_000 if options.quick else None
    traces = {path.stem: read_answers(path, options.prefix_blocks)[:limit] for path in options.traces}
    if not traces:
        traces["generated"] = generated_sessions(limit or 20_000)
    rehearse()  # kernels are compiled or loaded before anything is timed
    results = [evaluate(name, answers) for name, answers in traces.items()]
    if len(traces) > 1:
        together = sorted((a for answers in traces.values() for a in answers), key=lambda a: a.arrived_s)
        results.append(evaluate("all together", together))
    if options.json:
        print(json.dumps({"benchmark": "output_length", "results": results}))
        return
    print(f"{'':>32}{'mean absolute error, tokens':^34}")
    print(
        f"{'trace':>32}{'256':>9}{'mean':>9}{'learned':>9}{'bias':>7}{'<= p90':>8}"
        f"{'predict us':>12}{'observe us':>12}"
    )
    for r in results:
        print(
            f"{r['trace']:>32}{r['error_assumed']:>9.1f}{r['error_mean']:>9.1f}{r['error_learned']:>9.1f}"
            f"{r['bias_learned']:>7.1f}{r['within_p90']:>8.1%}{r['predict_us']:>12.1f}{r['observe_us']:>12.1f}"
        )


if __name__ == "__main__":
    main()
