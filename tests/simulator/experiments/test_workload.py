"""What is simulated: traces and generated workloads, in part and at a load."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_points import small_trace

from simulator.experiments.workload import (
    Generated,
    Load,
    Workload,
    read_records,
    recorded_rate,
    requests_at,
)
from simulator.workloads import Selection, TraceError, TraceRecord, generate


def test_a_generated_workload_is_that_of_the_generator() -> None:
    records = read_records(Workload(Generated("rag", 50, 4.0, seed=7)))
    assert records == generate("rag", 50, 4.0, 7)


def test_a_file_is_read_in_part_with_answers_of_one_length(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    records = read_records(Workload(path, selection=Selection(limit=5), output_tokens=1))
    assert [record.output_tokens for record in records] == [1] * 5
    assert Workload(path).name == "small"


def test_records_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(
        '{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5}\n'
        '{"session_id": "a", "delay": 9000, "input_length": 600, "output_length": 5}\n'
        '{"session_id": "b", "timestamp": 2000, "input_length": 600, "output_length": 5}\n'
    )
    arrivals = [record.arrival_s for record in read_records(Workload(path))]
    assert arrivals == sorted(arrivals) and len(arrivals) == 3


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="loosen the filters"):
        read_records(Workload(small_trace(tmp_path), selection=Selection(min_input_tokens=10**7)))


def test_loads_scale_arrivals() -> None:
    records = [TraceRecord(10.0 + 2.0 * i, 600, 5, (1, 2)) for i in range(11)]
    assert [r.arrival_s for r in requests_at(records, Load()).requests][-1] == 20.0
    assert [r.arrival_s for r in requests_at(records, Load(speed=4.0)).requests][-1] == 5.0
    assert requests_at(records, Load(rate=1.1)).requests[-1].arrival_s == pytest.approx(10.0)
    assert recorded_rate(records) == 11 / 20
    assert [str(load) for load in (Load(), Load(speed=2.0), Load(rate=2.5))] == ["x1", "x2", "2.5/s"]


def test_a_trace_without_times_gets_arrivals_from_the_seed() -> None:
    records = [TraceRecord(0.0, 600, 5, (1, 2))] * 20
    first, again, other = (
        [request.arrival_s for request in requests_at(records, Load(rate=2.0, seed=seed)).requests]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert recorded_rate(records) == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [({"speed": 2.0, "rate": 1.0}, "give one of them"), ({"rate": 0.0}, "rate must be positive, not 0.0")],
)
def test_impossible_loads_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Load(**given)
