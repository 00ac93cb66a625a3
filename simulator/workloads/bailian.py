"""Alibaba Bailian's JSONL (qwen-bailian-usagetraces-anon): seconds, 16-token blocks, chats that name parents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from simulator.workloads.fields import count_field, fault, hash_ids_field, json_object, time_field
from simulator.workloads.lines import Line, Warn, parsed_lines
from simulator.workloads.records import TraceError, TraceRecord, blocks_of

BAILIAN_BLOCK_TOKENS: Final = 16
_UNSHARED_FROM = 1 << 62  # published ids are small


def bailian_records(lines: Iterable[Line], warn: Warn) -> Iterator[TraceRecord]:
    """Every line has its whole context; ``session_id`` is the ``chat_id`` of the session's first turn.

    A parent that the trace does not contain starts a session under the parent's number. Published traces leave
    a last block that is not full out or in; both are read, and a missing last block is one that nothing shares.
    """
    first_chats: dict[int, int] = {}
    unshared = _UNSHARED_FROM

    def parse(line: Line) -> TraceRecord:
        nonlocal unshared
        place = line.place
        fields = json_object(line.content, place)
        chat = count_field(place, fields, "chat_id", minimum=0)
        parent = fields.get("parent_chat_id", -1)
        if type(parent) is not int:
            raise fault(place, fields, "parent_chat_id", "an integer, -1 for a first turn")
        arrival_s = time_field(place, fields, "timestamp", "seconds")
        input_tokens = count_field(place, fields, "input_length", minimum=1)
        output_tokens = count_field(place, fields, "output_length", minimum=0)
        hash_ids = hash_ids_field(place, fields)
        blocks = blocks_of(input_tokens, BAILIAN_BLOCK_TOKENS)
        if len(hash_ids) == blocks - 1:
            hash_ids = (*hash_ids, unshared)
            unshared += 1
        elif len(hash_ids) != blocks:
            raise TraceError(
                f"{place}: field 'hash_ids' has {len(hash_ids)} entries, input_length {input_tokens} needs "
                f"{blocks} of {BAILIAN_BLOCK_TOKENS} tokens"
            )
        first = first_chats[chat] = chat if parent < 0 else first_chats.get(parent, parent)
        return TraceRecord(
            *(arrival_s, input_tokens, output_tokens, hash_ids, str(first)), block_tokens=BAILIAN_BLOCK_TOKENS
        )

    return parsed_lines(lines, parse, warn)
