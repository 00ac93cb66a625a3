"""Synthetic workloads: reuse as intended, sessions that grow, times that hold, files that read back."""

from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest

from simulator.workloads import (
    WORKLOAD_KINDS,
    TraceRecord,
    assumed_answer_s,
    generate,
    mooncake_line,
    profile_trace,
    read_mooncake,
    trace_span_s,
    unlimited_reuse,
)

MULTI_TURN = ("chat", "coding", "agent")
REUSE = {
    "api": (0.30, 0.50),
    "burst": (0.30, 0.50),
    "coding": (0.85, 0.95),
    "rag": (0.80, 0.90),
    "long": (0, 0),
}


@pytest.mark.parametrize("kind", REUSE)
@pytest.mark.parametrize("requests", [200, 1000, 3000])
@pytest.mark.parametrize("seed", [0, 1])
def test_reuse_without_a_limit(kind: str, requests: int, seed: int) -> None:
    least, most = REUSE[kind]
    found = unlimited_reuse(generate(kind, requests, 2.0, seed))
    assert least <= found.token_hit_rate <= most


@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
def test_as_many_as_asked_for_in_order_and_the_same_again(kind: str) -> None:
    records = generate(kind, 301, 5.0, 7)
    assert len(records) == 301
    assert records == generate(kind, 301, 5.0, 7) != generate(kind, 301, 5.0, 8)
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(records))
    for record in records:
        assert len(record.hash_ids) == -(-record.input_tokens // 512)


@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
def test_the_rate_where_the_trace_is_long_enough(kind: str) -> None:
    records = generate(kind, 3000, 0.5, 1)
    assert len(records) / trace_span_s(records) == pytest.approx(0.5, rel=0.05)


def sessions_of(records: list[TraceRecord]) -> list[list[TraceRecord]]:
    def name(record: TraceRecord) -> str:
        return record.session_id or ""

    return [list(turns) for _, turns in groupby(sorted(records, key=name), name)]


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_turns_go_on_where_the_one_before_ended(kind: str) -> None:
    sessions = sessions_of(generate(kind, 600, 3.0, 2))
    assert np.mean([len(turns) for turns in sessions]) > 3
    for turns in sessions:
        assert turns[0].delay_s is None
        for before, after in pairwise(turns):
            whole = before.input_tokens // 512
            assert after.hash_ids[:whole] == before.hash_ids[:whole]
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.delay_s is not None
            answer_end_s = before.arrival_s + assumed_answer_s(before.output_tokens)
            assert after.arrival_s == pytest.approx(answer_end_s + after.delay_s, abs=0.01)


def test_a_coding_session_begins_with_its_files() -> None:
    """The survey's figures: 8K system, 40K files, 0.5K, then 3.5K a turn."""
    sessions = sessions_of(generate("coding", 3000, 3.0, 0))
    assert np.mean([turns[0].input_tokens for turns in sessions]) == pytest.approx(48_500, rel=0.1)
    grown = [b.input_tokens - a.input_tokens for turns in sessions for a, b in pairwise(turns)]
    assert np.mean(grown) == pytest.approx(3_500, rel=0.25)


def test_single_requests_arrive_as_poisson_and_bursts_do_not() -> None:
    steady = profile_trace(generate("api", 3000, 5.0, 0), (1000,)).arrivals
    bursty = profile_trace(generate("burst", 3000, 5.0, 0), (1000,)).arrivals
    assert steady.gap_cv == pytest.approx(1.0, abs=0.1)
    assert bursty.gap_cv > 2.0


def test_long_contexts_reach_a_million_tokens() -> None:
    lengths = [record.input_tokens for record in generate("long", 300, 0.1, 0)]
    assert min(lengths) >= 131_072
    assert 1_000_000 < max(lengths) <= 1_048_576


@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
def test_written_traces_read_back(kind: str, tmp_path: Path) -> None:
    records = generate(kind, 60, 2.0, 4)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(map(mooncake_line, records)))
    assert list(read_mooncake(path)) == records


def test_lines_are_of_mooncake_s_blocks() -> None:
    with pytest.raises(ValueError, match="blocks have 512 tokens, this trace's 16"):
        mooncake_line(TraceRecord(0.0, 16, 1, (1,), block_tokens=16))


@pytest.mark.parametrize(
    ("kind", "requests", "rate", "message"),
    [("poem", 1, 1.0, "known: chat, coding"), ("api", 0, 1.0, "positive"), ("api", 1, 0.0, "positive")],
)
def test_what_cannot_be_generated(kind: str, requests: int, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(kind, requests, rate, 0)
