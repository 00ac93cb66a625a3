"""Reading Mooncake traces, and turning their records into tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import TraceError, TraceRecord, prompt_tokens, read_mooncake

REAL_TRACES = Path(__file__).parents[3] / "shared" / "traces"
GOOD = {"timestamp": 27_500, "input_length": 600, "output_length": 9, "hash_ids": [0, 14]}


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_record_in_seconds_and_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD), "")
    record = TraceRecord(arrival_s=27.5, input_tokens=600, output_tokens=9, hash_ids=(0, 14))
    assert list(read_mooncake(path)) == [record, record]


def test_records_are_read_lazily(tmp_path: Path) -> None:
    records = read_mooncake(written(tmp_path, json.dumps(GOOD), "broken"))
    assert next(records).input_tokens == 600
    with pytest.raises(TraceError, match="line 2"):
        next(records)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(GOOD)[:-10], "line 2: not valid JSON, perhaps cut off"),
        ("[1, 2]", "line 2: not a JSON object"),
        (json.dumps({**GOOD, "timestamp": "now"}), "line 2: field 'timestamp' is 'now', not a number"),
        (json.dumps({**GOOD, "timestamp": -1}), "line 2: field 'timestamp' is -1"),
        (json.dumps({**GOOD, "input_length": 0}), "line 2: field 'input_length' is 0, not an integer from 1"),
        (json.dumps({**GOOD, "input_length": True}), "line 2: field 'input_length' is True"),
        (json.dumps({**GOOD, "output_length": 1.5}), "line 2: field 'output_length' is 1.5"),
        (json.dumps({**GOOD, "hash_ids": [0, "x"]}), "line 2: field 'hash_ids' is"),
        (json.dumps({**GOOD, "hash_ids": [0]}), "line 2: field 'hash_ids' has 1 entries, .* 600 needs 2"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}), "field 'hash_ids' is missing"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(TraceError, match=message) as error:
        list(read_mooncake(path))
    assert str(path) in str(error.value)


def test_ids_may_have_all_64_bits(tmp_path: Path) -> None:
    ids = (2**63, 2**64 - 1)
    (record,) = read_mooncake(written(tmp_path, json.dumps({**GOOD, "hash_ids": ids})))
    assert record.hash_ids == ids


IDS = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(IDS, IDS, st.integers(0, 511), st.integers(0, 511))
def test_equal_prefixes_of_hash_ids_are_equal_prefixes_of_tokens(
    first: list[int], second: list[int], first_cut: int, second_cut: int
) -> None:
    one, other = (
        prompt_tokens(TraceRecord(0.0, len(ids) * 512 - cut, 1, tuple(ids)))
        for ids, cut in ((first, first_cut), (second, second_cut))
    )
    assert len(one) == len(first) * 512 - first_cut
    same_blocks = 0
    while first[same_blocks : same_blocks + 1] == second[same_blocks : same_blocks + 1] != []:
        same_blocks += 1
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    shared = int(differing[0]) if len(differing) else shorter
    assert shared >= min(same_blocks * 512, shorter)
    assert shared <= same_blocks * 512 + 8 or shared == shorter


def test_tokens_stay_in_their_range_and_depend_on_the_seed() -> None:
    record = TraceRecord(0.0, 512, 1, (7,))
    tokens = prompt_tokens(record, first_token=10, last_token=12)
    assert tokens.dtype == np.uint32
    assert set(tokens.tolist()) == {10, 11, 12}
    assert not np.array_equal(prompt_tokens(record), prompt_tokens(record, seed=1))


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize(("name", "requests"), [("conversation", 12_031), ("synthetic", 3_993)])
def test_the_published_traces_are_read_whole(name: str, requests: int) -> None:
    records = list(read_mooncake(REAL_TRACES / f"{name}_trace.jsonl"))
    assert len(records) == requests
    assert records == sorted(records, key=lambda record: record.arrival_s)
    assert len(prompt_tokens(records[0])) == records[0].input_tokens
