"""Trace formats: what becomes of a line, which format a file has, and what is wrong with a broken one."""

import json
from pathlib import Path

import pytest

from simulator.workloads import TraceError, TraceFormat, TraceRecord, detect_format, read_trace

REAL_TRACES = Path(__file__).parents[4] / "shared" / "traces"
MOONCAKE = {"timestamp": 27_500, "input_length": 600, "output_length": 9, "hash_ids": [0, 14]}
BAILIAN = {
    **{"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 7},
    **{"type": "text", "turn": 1, "hash_ids": [3, 4, 5]},
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def written(folder: Path, *lines: object, end: str = "\n", name: str = "trace") -> Path:
    path = folder / name
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + end)
    return path


def read(path: Path, trace_format: TraceFormat | None = None) -> list[TraceRecord]:
    """The records; nothing may be warned of."""
    return list(read_trace(path, pytest.fail, trace_format))


def test_mooncake_with_and_without_sessions(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE, {**MOONCAKE, "session_id": 7, "delay": 1500})
    assert detect_format(path) is TraceFormat.MOONCAKE
    assert read(path) == [
        TraceRecord(27.5, 600, 9, (0, 14)),
        TraceRecord(27.5, 600, 9, (0, 14), session_id="7", delay_s=1.5),
    ]


def test_aiperf_turns_contain_what_went_before(tmp_path: Path) -> None:
    """512 + 100 tokens, an answer of 20, then 512 more: the second turn's first block is the first's."""
    path = written(
        tmp_path,
        {
            **{"session_id": "a", "timestamp": 1000, "input_length": 612, "output_length": 20},
            "hash_ids": [4, 5],
        },
        {"session_id": "b", "timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [4]},
        {"session_id": "a", "delay": 2000, "input_length": 512, "output_length": 3, "hash_ids": [6]},
    )
    assert detect_format(path) is TraceFormat.AIPERF
    first, other, second = read(path)
    assert (first.input_tokens, other.input_tokens, second.input_tokens) == (612, 512, 612 + 20 + 512)
    assert len(second.hash_ids) == 3
    assert second.hash_ids[0] == first.hash_ids[0] == other.hash_ids[0]
    assert second.hash_ids[1] != first.hash_ids[1]  # there the answer goes on
    assert (first.delay_s, second.delay_s) == (None, 2.0)
    assert second.arrival_s == pytest.approx(1.0 + (1.0 + 0.03 * 20) + 2.0)


def test_aiperf_texts_share_what_they_begin_with(tmp_path: Path) -> None:
    start = "many words " * 400
    path = written(
        tmp_path,
        {"timestamp": 0, "text_input": start + "one", "output_length": 5},
        {"timestamp": 9, "text_input": start + "two", "output_length": 5},
    )
    one, two = read(path)
    assert one.input_tokens == two.input_tokens == -(-(len(start) + 3) // 4)
    shared = len(start) // (4 * 512)
    assert one.hash_ids[:shared] == two.hash_ids[:shared]
    assert one.hash_ids[shared] != two.hash_ids[shared]


def test_bailian_chats_become_sessions(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        BAILIAN,
        {**BAILIAN, "chat_id": 6, "parent_chat_id": 5},
        {**BAILIAN, "chat_id": 8, "parent_chat_id": 6, "input_length": 50},
        {**BAILIAN, "chat_id": 9, "parent_chat_id": 2},
    )
    assert detect_format(path) is TraceFormat.BAILIAN
    records = read(path)
    assert records[0] == TraceRecord(61.114, 40, 7, (3, 4, 5), session_id="5", block_tokens=16)
    assert [record.session_id for record in records] == ["5", "5", "5", "2"]
    assert records[2].hash_ids[:3] == (3, 4, 5)
    assert len(records[2].hash_ids) == 4  # the block that is not full is left out in the file


def test_azure_counts_from_the_first_arrival(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        AZURE,
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,1025,109\r",
        end="",
    )
    assert detect_format(path) is TraceFormat.AZURE
    first, second = read(path)
    assert first.arrival_s == 0.0
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert (second.input_tokens, second.output_tokens) == (1025, 109)
    assert len({*first.hash_ids, *second.hash_ids}) == 1 + 3


def test_azure_as_vidur_has_it(tmp_path: Path) -> None:
    path = written(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens", "0.5,374,44", "2.0,5,6")
    assert [(each.arrival_s, each.input_tokens) for each in read(path)] == [(0.0, 374), (1.5, 5)]


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    path = written(
        *(tmp_path, BURST, "5,ChatGPT,472,18,490,Conversation log"),
        *("9,ChatGPT,0,0,0,API log", "45,GPT-4,1087,230,1317,API log"),
    )
    assert detect_format(path) is TraceFormat.BURSTGPT
    warnings: list[str] = []
    records = list(read_trace(path, warnings.append))
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in records] == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("1 rows without input tokens")


@pytest.mark.parametrize("style", ["sharegpt", "messages"])
def test_conversations_give_a_request_an_answer(tmp_path: Path, style: str) -> None:
    said = [("human", "What is a KV cache? " * 10), ("gpt", "x" * 400), ("human", "Why?"), ("gpt", "y" * 40)]
    if style == "sharegpt":
        item = {"id": "c1", "conversations": [{"from": who, "value": text} for who, text in said]}
    else:
        roles = {"human": "user", "gpt": "assistant"}
        item = {"id": "c1", "messages": [{"role": roles[who], "content": text} for who, text in said]}
    path = written(tmp_path, [item])
    assert detect_format(path) is TraceFormat.SHAREGPT
    first, second = read(path)
    assert (first.output_tokens, second.output_tokens) == (100, 10)
    assert first.session_id == second.session_id == "c1"
    whole_blocks = first.input_tokens // 16
    assert whole_blocks > 2
    assert second.hash_ids[:whole_blocks] == first.hash_ids[:whole_blocks]
    assert second.input_tokens > first.input_tokens + 100


def test_inputs_with_output_lengths(tmp_path: Path) -> None:
    [record] = read(written(tmp_path, [{"input": "a" * 401, "output_length": 12}]))
    assert (record.input_tokens, record.output_tokens, len(record.hash_ids)) == (101, 12, 7)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([MOONCAKE, {**MOONCAKE, "output_length": "many"}], "trace, line 2: field 'output_length' is 'many'"),
        ([MOONCAKE, {**MOONCAKE, "session_id": [1]}], r"line 2: field 'session_id' is \[1\]"),
        ([MOONCAKE, {**MOONCAKE, "delay": -4}], "line 2: field 'delay' is -4, not a number of milliseconds"),
        ([BAILIAN, {**BAILIAN, "parent_chat_id": "x"}], "line 2: field 'parent_chat_id' is 'x'"),
        ([BAILIAN, {**BAILIAN, "hash_ids": [1]}], "line 2: field 'hash_ids' has 1 entries, .* needs 3"),
        ([AZURE, "2023-11-16 18:15:46,374,44", "yesterday,3,4"], "line 3: field 'TIMESTAMP' is 'yesterday'"),
        ([AZURE, "2023-11-16 18:15:46,3.5,44"], "line 2: field 'ContextTokens' is '3.5', not an integer"),
        ([AZURE, "2023-11-16 18:15:46,3"], "line 2: 2 columns, the first line has 3"),
        ([BURST, "soon,ChatGPT,1,2,3,API log"], "line 2: field 'Timestamp' is 'soon', not a number"),
        ([BURST, "1,ChatGPT,-1,2,3,API log"], "line 2: field 'Request tokens' is '-1', not a number from 0"),
        (
            [{"session_id": "a", "input_length": 5}, {"session_id": "a", "input_length": 5}],
            "line 2: a later turn of session 'a' needs 'delay' or 'timestamp'",
        ),
        ([{"session_id": "a", "messages": []}], "line 1: 'messages' and 'payload' are not read"),
        ([[{"input": "", "output_length": 1}]], "conversation 0: field 'input' is ''"),
        ([[{"conversations": [{"from": "gpt"}]}]], "conversation 0, turn 0: field 'value' is missing"),
        (["a,b,c", "1,2,3"], "no known format: the first line is 'a,b,c'.*--format"),
        ([{"colour": "red"}], "no known format: the first line has the fields colour"),
        ([""], "is empty"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, lines: list[object], message: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(TraceError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([MOONCAKE, json.dumps(MOONCAKE)[:-9]], 1),
        ([BAILIAN, BAILIAN, json.dumps(BAILIAN)[:30]], 2),
        ([AZURE, "2023-11-16 18:15:46.68,374,44", "2023-11-16 18:15:5"], 1),
    ],
)
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, lines: list[object], kept: int) -> None:
    path = written(tmp_path, *lines, end="")
    warnings: list[str] = []
    assert len(list(read_trace(path, warnings.append))) == kept
    assert len(warnings) == 1
    assert f"{path}, line {len(lines)}" in warnings[0]
    with pytest.raises(TraceError, match=f"line {len(lines)}"):
        read(written(tmp_path, *lines, end="\n"))


def test_a_named_format_overrides_the_content(tmp_path: Path) -> None:
    path = written(tmp_path, {**MOONCAKE, "session_id": "s"}, {**MOONCAKE, "session_id": "s"})
    as_found, as_named = read(path), read(path, TraceFormat.AIPERF)
    assert [each.input_tokens for each in as_found] == [600, 600]
    assert [each.input_tokens for each in as_named] == [600, 600 + 9 + 600]


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize(
    ("name", "trace_format", "requests", "mean_input", "mean_output"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", TraceFormat.AZURE, 19_366, 1155, 211),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", TraceFormat.AZURE, 8_819, 2048, 28),
        ("conversation_trace.jsonl", TraceFormat.MOONCAKE, 12_031, 12_035, 343),
        ("synthetic_trace.jsonl", TraceFormat.MOONCAKE, 3_993, 15_325, 149),
        ("sharegpt/run.json", TraceFormat.SHAREGPT, 252, 1244, 224),
    ],
)
def test_published_traces(
    name: str, trace_format: TraceFormat, requests: int, mean_input: int, mean_output: int
) -> None:
    path = REAL_TRACES / name
    assert detect_format(path) is trace_format
    records = read(path)
    assert len(records) == requests
    assert round(sum(each.input_tokens for each in records) / requests) == mean_input
    assert round(sum(each.output_tokens for each in records) / requests) == mean_output


def test_a_table_without_a_column(tmp_path: Path) -> None:
    path = written(tmp_path, "TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,374")
    with pytest.raises(
        TraceError, match="trace, line 1: there is no column 'GeneratedTokens'; needed: TIMESTAMP"
    ):
        read(path, TraceFormat.AZURE)
    with pytest.raises(TraceError, match="is empty"):
        read(written(tmp_path, ""), TraceFormat.BURSTGPT)
