"""What a request teaches, and what is said of blocks."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_cache import cached_njit
from cache_index.kernel_set import inlined
from conductor.reuse.kernels.ages import age_bin
from conductor.reuse.kernels.blocks import NONE, enter_accesses, last_access, new_access, new_record
from conductor.reuse.kernels.circumstances import (
    BEGINNING,
    BESIDE,
    NEW,
    PARTLY,
    RETURN,
    WHOLE,
    part_of,
    write_cells,
)
from conductor.reuse.kernels.compilation import DIRECTORY
from conductor.reuse.kernels.hazards import count_chance, count_reuse, probability, value
from conductor.reuse.kernels.layout import (
    AGE_BINS,
    AGE_EDGES_S,
    C_NEXT_RECORD,
    C_OLDEST_RECORD,
    R_BEFORE,
    R_BEHIND,
    R_MATCHED,
    R_PROMPT,
    R_TURN,
    R_UNUSED,
    Floats,
    History,
    Ints,
    Learned,
    Words,
)

# What was used more often, and then goes on differently, is what many prompts begin with.
_CONVERSATION_USES = 8


@inlined
def grow_old(history, learned, now_s, window):
    """Count what got to a higher age since the last call."""
    records = history.records.shape[0] - 1  # mask
    for at in range(1, AGE_BINS):
        number = max(history.passed[at], history.counters[C_OLDEST_RECORD])
        while number < history.counters[C_NEXT_RECORD]:
            place = number & records
            if now_s - history.record_s[place] < AGE_EDGES_S[at]:
                break
            if history.records[place, R_UNUSED] > 0:
                blocks = history.records[place, R_UNUSED]
                count_chance(learned, history.records[place], at, blocks, window)
            number += 1
        history.passed[at] = number


@inlined
def record_of(history, block_hash):
    """The number of the record of a block's last use, NONE of a block that is not known."""
    access = last_access(history, block_hash)
    return (
        np.int64(NONE)
        if access == NONE
        else history.access_record[access & (history.access_record.shape[0] - 1)]
    )


@inlined
def known_blocks(history, hashes):
    count = 0
    while count < hashes.shape[0] and last_access(history, hashes[count]) != NONE:
        count += 1
    return count


@inlined
def open_record(history, now_s, first):
    """A record of the request whose records begin with number ``first``, itself if that is NONE."""
    number = new_record(history)
    place = number & (history.records.shape[0] - 1)
    history.record_s[place] = now_s
    history.records[place] = 0
    if first != NONE:
        history.records[place, R_BEFORE] = number - first
    return number


def observe(
    history: History,
    learned: Learned,
    hashes: Words,
    block_tokens: int,
    kind: int,
    now_s: float,
    window: float,
) -> tuple[int, int, float]:
    """Learn from a request's arrival; its turn, the blocks of it that were known, the seconds since their last use.

    The gap is inf where nothing was known.
    """
    records = history.records.shape[0] - 1  # mask
    grow_old(history, learned, now_s, window)
    blocks = hashes.shape[0]
    matched = known_blocks(history, hashes)
    turn, progress, gap_s = 1, NEW, np.inf
    if matched > 0:
        access = last_access(history, hashes[matched - 1]) & (history.access_uses.shape[0] - 1)
        last = history.access_record[access]
        gap_s = now_s - history.record_s[last & records]
        before = last - history.records[last & records, R_BEFORE]
        if before >= history.counters[C_OLDEST_RECORD]:
            request = history.records[before & records]
            if matched > request[R_MATCHED]:
                turn = request[R_TURN] + 1
                progress = WHOLE if request[R_PROMPT] - matched <= 2 else PARTLY
                if request[R_UNUSED] > 0:
                    request[R_UNUSED] = 0
                    count_reuse(learned, request, age_bin(gap_s))
            elif request[R_TURN] > 1 and history.access_uses[access] <= _CONVERSATION_USES:
                turn, progress = request[R_TURN], BESIDE
    fresh_tokens = (blocks - matched) * block_tokens
    first = open_record(history, now_s, NONE)
    request = history.records[first & records]
    request[R_UNUSED] = 1
    request[R_TURN], request[R_MATCHED], request[R_PROMPT] = turn, matched, blocks
    write_cells(request, kind, RETURN, turn, progress, fresh_tokens)
    number, part = first, BEGINNING
    for position in range(blocks):
        access, uses = last_access(history, hashes[position]), 0
        if access != NONE:
            before = history.access_record[access & (history.access_record.shape[0] - 1)]
            if before >= first:
                continue  # twice in one prompt
            record = history.records[before & records]
            record[R_UNUSED] -= 1
            count_reuse(learned, record, age_bin(now_s - history.record_s[before & records]))
            uses = history.access_uses[access & (history.access_uses.shape[0] - 1)]
        # Never back to a part nearer to the beginning: there are few records a request.
        wanted = min(part, part_of(position, matched, blocks, uses))
        if wanted != part:
            number, part = open_record(history, now_s, first), wanted
            write_cells(history.records[number & records], kind, part, turn, progress, fresh_tokens)
        new_access(history, hashes[position], number)
        history.records[number & records, R_UNUSED] += 1
    for each in range(first, number + 1):
        record = history.records[each & records]
        record[R_BEHIND] = number - each
        count_chance(learned, record, 0, record[R_UNUSED], window)
    return turn, matched, gap_s


observe = cached_njit(observe, DIRECTORY)


def observe_all(
    history: History,
    learned: Learned,
    hashes: Words,
    stops: Ints,
    block_tokens: int,
    kinds: Ints,
    times_s: Floats,
    window: float,
) -> None:
    """Learn from several requests in the order of their arrival; ``stops`` are where their hashes end."""
    start = 0
    for i in range(stops.shape[0]):
        prompt = hashes[start : stops[i]]
        observe(history, learned, prompt, block_tokens, kinds[i], times_s[i], window)
        start = stops[i]


observe_all = cached_njit(observe_all, DIRECTORY)


def enter_all(history: History) -> int:
    """Fill an empty table with the accesses that a history has; returns the blocks that they are of."""
    return int(enter_accesses(history))


enter_all = cached_njit(enter_all, DIRECTORY)


def retention_values(
    history: History, learned: Learned, hashes: Words, now_s: float, refresh_s: float, values: Floats
) -> None:
    """Write hits a block-second of every block, 0 of those not known.

    A block is worth no less than what the same request had behind it, which is of no use without it.
    """
    records = history.records.shape[0] - 1  # mask
    same, same_value = np.int64(NONE), 0.0
    for i in range(hashes.shape[0]):
        number = record_of(history, hashes[i])
        if number == NONE:
            values[i] = 0.0
            continue
        if number != same:
            age_s = max(now_s - history.record_s[number & records], 0.0)
            same, same_value = number, 0.0
            for each in range(number, number + history.records[number & records, R_BEHIND] + 1):
                record = history.records[each & records]
                if record[R_UNUSED] > 0:
                    same_value = max(same_value, value(learned, record, age_s, now_s, refresh_s))
        values[i] = same_value


retention_values = cached_njit(retention_values, DIRECTORY)


def reuse_probabilities(
    history: History, learned: Learned, hashes: Words, now_s: float, before_s: float, probabilities: Floats
) -> None:
    """Write the chance of every block to be used between two times, 0 of those not known."""
    records = history.records.shape[0] - 1  # mask
    same, same_probability = np.int64(NONE), 0.0
    for i in range(hashes.shape[0]):
        number = record_of(history, hashes[i])
        if number == NONE:
            probabilities[i] = 0.0
            continue
        if number != same:
            used_s = history.record_s[number & records]
            same, same_probability = number, 0.0
            for each in range(number, number + history.records[number & records, R_BEHIND] + 1):
                record = history.records[each & records]
                if record[R_UNUSED] > 0:
                    chance = probability(learned, record, max(now_s - used_s, 0.0), before_s - used_s)
                    same_probability = max(same_probability, chance)
        probabilities[i] = same_probability


reuse_probabilities = cached_njit(reuse_probabilities, DIRECTORY)


def return_probabilities(
    history: History, learned: Learned, hashes: Words, now_s: float, until_s: Floats, probabilities: Floats
) -> float:
    """Write the chance that the conversation whose last prompt is given goes on within each of ``until_s``.

    Returns the record's time, NaN where that prompt is not known or went on already.
    """
    records = history.records.shape[0] - 1  # mask
    probabilities[:] = 0.0
    matched = known_blocks(history, hashes)
    if matched == 0:
        return np.nan
    last = record_of(history, hashes[matched - 1])
    number = last - history.records[last & records, R_BEFORE]
    if number < history.counters[C_OLDEST_RECORD]:
        return np.nan
    record = history.records[number & records]
    if record[R_UNUSED] == 0 or record[R_PROMPT] != hashes.shape[0] or matched < hashes.shape[0]:
        return np.nan
    used_s = history.record_s[number & records]
    age_s = max(now_s - used_s, 0.0)
    for i in range(until_s.shape[0]):
        probabilities[i] = probability(learned, record, age_s, age_s + until_s[i])
    return float(used_s)


return_probabilities = cached_njit(return_probabilities, DIRECTORY)
