"""From payloads to programs."""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment"

from __future__ import annotations

import numpy as np
from numba import types

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.machine_words import ZERO, secret_at, u64, words_at
from cache_index.kernels.xxh3 import hash_17_to_128, hash_bytes, hash_pair
from cache_index.wire_kernels.compilation import kernel
from cache_index.wire_kernels.extra_keys import add_text, canonical_hash, fold_extra_keys, fold_list
from cache_index.wire_kernels.fields import (
    NO_EVENT,
    NO_KIND,
    PARTIAL,
    UNKNOWN_EVENT,
    WHOLE,
    field_named,
    group_at,
    is_nil,
    kind_at,
    read_hashes,
    read_tokens,
    spec_kind_at,
    tier_at,
)
from cache_index.wire_kernels.layout import (
    BARE,
    BLOCK_HASHES,
    BLOCK_SIZE,
    BLOCKS,
    BUFFER,
    CACHE_SALT,
    CLEAR,
    COUNT,
    DOMAIN,
    DOUBTFUL_TIERS,
    ENDS,
    EVENT_HASHES,
    EVENT_TOKENS,
    EVENTS,
    EVERY_TIER,
    EXTRA_KEYS,
    FIELDS,
    FIRST_OPERATION,
    FORGET,
    GROUP,
    HAS_PARENT,
    HASHES,
    KEYS_USED,
    KIND,
    KNOWN_FIELDS,
    LANES,
    LAST_POSITION,
    LEFT_OUT,
    LORA_ID,
    LORA_NAME,
    MAIN_GROUP,
    MAX_BLOCK_SIZE,
    MEDIUM,
    NAMES_KEYS,
    NAMESPACE_ROWS,
    NAMESPACES,
    NEXT_PAYLOAD,
    NO_GROUP,
    NOT_BARE,
    OPERATIONS,
    OTHER_GROUP_EVENTS,
    PARENT,
    PARENT_NAME,
    PAYLOADS,
    PROGRAM,
    PROVISIONAL,
    PUBLISHED,
    REFUSED_EVENTS,
    REMOVE,
    REMOVED_FIELDS,
    ROW_WORDS,
    SECRETS,
    SEED,
    SIZE,
    SPEC_KIND,
    START,
    STORE,
    STREAM_DOMAIN,
    TAKEN_AS_PLAIN,
    TIER,
    TOKEN_IDS,
    TOKENS,
    TYPE,
    UNKNOWN_EVENTS,
)
from cache_index.wire_kernels.msgpack import (
    array_at,
    byte_at,
    hash_at,
    integer_at,
    is_ascii,
    map_at,
    skip,
    text_at,
)


@outlined
def read_field(work, field, at, end):
    """Note a field's value, and read hashes and tokens at once."""
    if work[FIELDS + field] != 0:
        return np.int64(-1)  # twice
    work[FIELDS + field] = at
    if field == BLOCK_HASHES:
        return read_hashes(work, at, end)
    if field == TOKEN_IDS:
        return read_tokens(work, at, end)
    return skip(work, at, end)


@inlined
def append(work, kind, tier, blocks):
    """A new row of the program; returns it."""
    row = words_at(work[PROGRAM] + 8 * ROW_WORDS * work[OPERATIONS])
    work[OPERATIONS] += 1
    row[KIND] = kind
    row[TIER] = tier
    row[START] = work[BLOCKS]
    row[COUNT] = blocks
    work[BLOCKS] += blocks
    return row


@outlined
def follows(work, group, kind, stored):
    """Whether an event of this group counts: cache_groups.MainGroup.gives_way_to, then .follows."""
    if group == NO_GROUP:
        return kind != PARTIAL
    if kind == WHOLE and work[PROVISIONAL] != 0 and group != work[MAIN_GROUP]:
        work[MAIN_GROUP] = group
        append(work, FORGET, EVERY_TIER, 0)
    if work[MAIN_GROUP] == NO_GROUP:
        if kind == NO_KIND and (group != 0 or not stored):
            return group == 0
        work[MAIN_GROUP] = group
        work[PROVISIONAL] = 0 if kind == WHOLE else 1
    elif group == work[MAIN_GROUP] and kind != NO_KIND:
        work[PROVISIONAL] = 1 if kind == PARTIAL else 0
    return group == work[MAIN_GROUP]


@outlined
def may_be_followed(work, group):
    """Whether `follows` may be true for an event of this group, which is a partial one."""
    return group != NO_GROUP and (work[MAIN_GROUP] == group or work[MAIN_GROUP] == NO_GROUP)


@outlined
def is_foreign(work, block_size):
    return work[BLOCK_SIZE] != 0 and block_size != work[BLOCK_SIZE]


@outlined
def add_removal(work, group, kind, end):
    """Engines send one event per block: removals from one tier in a row become one operation."""
    if work[FIELDS + BLOCK_HASHES] == 0:
        return False
    tier = tier_at(work, work[FIELDS + MEDIUM], end)
    if tier == -2:
        return False
    if not follows(work, group, kind, False):
        work[OTHER_GROUP_EVENTS] += 1
        return True
    tier = max(tier, np.int64(0))
    last = work[OPERATIONS] - 1
    if last >= work[FIRST_OPERATION]:
        row = words_at(work[PROGRAM] + 8 * ROW_WORDS * last)
        if row[KIND] == REMOVE and row[TIER] == tier:
            row[COUNT] += work[EVENT_HASHES]
            work[BLOCKS] += work[EVENT_HASHES]
            return True
    append(work, REMOVE, tier, work[EVENT_HASHES])
    return True


@outlined
def domain_of(work, block_size, adapter):
    """(domain, whether this namespace is known here)."""
    namespaces = secret_at(work[NAMESPACES])
    for row in range(work[NAMESPACE_ROWS]):
        if namespaces[3 * row] == u64(block_size) and namespaces[3 * row + 1] == adapter:
            return namespaces[3 * row + 2], True
    return ZERO, False


@outlined
def hash_blocks(work, blocks, block_size):
    """Local hashes of the event's blocks."""
    hashes = secret_at(work[HASHES] + 8 * work[BLOCKS])
    seed = u64(work[SEED])
    secret = secret_at(work[SECRETS])
    address, length = work[TOKENS], 4 * block_size
    if block_size == 16:
        for block in range(blocks):
            hashes[block] = hash_17_to_128(address + 64 * block, 64, seed, secret)
        return
    lanes = secret_at(work[LANES])
    for block in range(blocks):
        hashes[block] = hash_bytes(address + length * block, length, seed, work[SECRETS], lanes)


@outlined
def add_store(work, group, kind, end):
    blocks = work[EVENT_HASHES]
    if work[FIELDS + BLOCK_HASHES] == 0 or work[FIELDS + TOKEN_IDS] == 0 or work[FIELDS + SIZE] == 0:
        return False
    size, negative, behind = integer_at(work[FIELDS + SIZE], end)
    if behind < 0 or negative or size == ZERO or size > u64(MAX_BLOCK_SIZE) or blocks == 0:
        return False
    block_size = np.int64(size)
    if work[EVENT_TOKENS] != blocks * block_size:
        return False
    parent = ZERO
    has_parent = not is_nil(work[FIELDS + PARENT])
    if has_parent:
        parent, behind = hash_at(work[FIELDS + PARENT], end)
        if behind < 0:
            return False
        parent ^= u64(work[STREAM_DOMAIN])
    tier = tier_at(work, work[FIELDS + MEDIUM], end)
    if tier == -2:
        return False

    adapter_word, adapter, adapter_length = ZERO, np.int64(-1), np.int64(0)
    if not is_nil(work[FIELDS + LORA_NAME]):
        adapter_length, adapter = text_at(work[FIELDS + LORA_NAME], end)
        work[KEYS_USED] = 0
        if adapter < 0 or not add_text(work, adapter, adapter_length):
            return False
        adapter_word = canonical_hash(work)
    elif not is_nil(work[FIELDS + LORA_ID]):
        return False

    hash_blocks(work, blocks, block_size)
    first_has_keys = np.int64(0)
    work[NAMES_KEYS] = 0
    if not is_nil(work[FIELDS + EXTRA_KEYS]):
        keys = work[FIELDS + EXTRA_KEYS]
        first_has_keys = fold_extra_keys(work, keys, end, blocks, adapter, adapter_length)
        if first_has_keys < 0:
            return False
    bare = tier > 0 and work[NAMES_KEYS] == 0
    if not is_nil(work[FIELDS + CACHE_SALT]):
        length, begin = text_at(work[FIELDS + CACHE_SALT], end)
        if begin < 0 or first_has_keys != 0:
            return False
        if length > 0 and not has_parent:
            bare = False
            work[KEYS_USED] = 8
            if not add_text(work, begin, length):
                return False
            hashes = secret_at(work[HASHES] + 8 * work[BLOCKS])
            hashes[0] = hash_pair(hashes[0], fold_list(work, 1), u64(work[SEED]))

    foreign = is_foreign(work, block_size)
    if foreign and kind == PARTIAL:
        if group != NO_GROUP and group == work[MAIN_GROUP]:
            work[PROVISIONAL] = 1
        work[OTHER_GROUP_EVENTS] += 1
        return True
    if not follows(work, group, kind, True):
        work[OTHER_GROUP_EVENTS] += 1
        return True
    if foreign:
        work[REFUSED_EVENTS] += 1
        return True
    domain, known = domain_of(work, block_size, adapter_word)
    if not known:
        return False
    if work[NAMES_KEYS] != 0 and work[PUBLISHED] == 0:
        work[PUBLISHED] = 1
        append(work, FORGET, DOUBTFUL_TIERS, 0)
    row = append(work, STORE, max(tier, np.int64(0)), blocks)
    row[HAS_PARENT] = 1 if has_parent else 0
    row[PARENT_NAME] = np.int64(parent)
    row[DOMAIN] = np.int64(domain)
    row[BARE] = NOT_BARE
    if bare:
        row[BARE] = LEFT_OUT if work[PUBLISHED] != 0 else TAKEN_AS_PLAIN
    return True


@outlined
def add_event(work, kind, end):
    """Put the event whose fields are noted into the program."""
    if kind == UNKNOWN_EVENT:
        work[UNKNOWN_EVENTS] += 1
        return True
    work[EVENTS] += 1
    if kind in (STORE, REMOVE):
        group = group_at(work[FIELDS + GROUP], end)
        group_kind = spec_kind_at(work, work[FIELDS + SPEC_KIND], end)
        if group == -2 or group_kind == -2:
            return False
        if kind == STORE and group_kind == PARTIAL and not may_be_followed(work, group):
            work[OTHER_GROUP_EVENTS] += 1
            return True
        if kind == STORE:
            return add_store(work, group, group_kind, end)
        return add_removal(work, group, group_kind, end)
    tier = tier_at(work, work[FIELDS + MEDIUM], end)
    if tier == -2:
        return False
    append(work, CLEAR, tier, 0)
    return True


@outlined
def read_event(work, at, end):
    for field in range(KNOWN_FIELDS):
        work[FIELDS + field] = 0
    count, begin = map_at(at, end)
    if begin >= 0:
        at = begin
        for _ in range(count):
            length, begin = text_at(at, end)
            if begin < 0:
                return np.int64(-1)
            at = begin + length
            field = field_named(begin, length)
            if field < KNOWN_FIELDS:
                at = read_field(work, field, at, end)
            elif is_ascii(begin, length):
                at = skip(work, at, end)
            else:
                return np.int64(-1)
            if at < 0:
                return at
        if work[FIELDS + TYPE] == 0:
            return np.int64(-1)
        kind = kind_at(work[FIELDS + TYPE], end)
    else:
        count, at = array_at(at, end)
        if at < 0 or count == 0:
            return np.int64(-1)
        kind = kind_at(at, end)
        at = skip(work, at, end)
        for position in range(1, count):
            if at < 0:
                return at
            field = np.int64(KNOWN_FIELDS)
            if kind == STORE and position <= LAST_POSITION:
                field = position
            elif kind == REMOVE and position <= 3:
                field = REMOVED_FIELDS[position - 1]
            elif kind == CLEAR and position == 1:
                field = MEDIUM
            at = read_field(work, field, at, end) if field < KNOWN_FIELDS else skip(work, at, end)
    if at < 0 or kind == NO_EVENT or not add_event(work, kind, end):
        return np.int64(-1)
    return at


@outlined
def read_payload(work, at, end):
    """Put a batch into the program; whether it could be read to its end."""
    count, at = array_at(at, end)
    if at < 0 or count < 2:
        return False
    tag = byte_at(at)  # a number: of any kind of integer, or a float
    if not (tag < 0x80 or tag >= 0xE0 or 0xCA <= tag <= 0xD3):
        return False
    at = skip(work, at, end)
    if at < 0:
        return False
    events, at = array_at(at, end)
    if at < 0:
        return False
    for _ in range(events):
        at = read_event(work, at, end)
        if at < 0:
            return False
    if count > 2:
        if byte_at(at) != 0xC0:
            _, _, behind = integer_at(at, end)
            if behind < 0:
                return False
        for _ in range(2, count):
            at = skip(work, at, end)
            if at < 0:
                return False
    return at == end


@kernel(types.int64)
def read_payloads(work_address):
    """Put payloads into the program, from NEXT_PAYLOAD on up to the first that cannot be read here."""
    work = words_at(work_address)
    ends = words_at(work[ENDS])
    payload = work[NEXT_PAYLOAD]
    while payload < work[PAYLOADS]:
        operations, blocks = work[OPERATIONS], work[BLOCKS]
        events, unknown, refused = work[EVENTS], work[UNKNOWN_EVENTS], work[REFUSED_EVENTS]
        main_group, provisional = work[MAIN_GROUP], work[PROVISIONAL]
        other_groups, published = work[OTHER_GROUP_EVENTS], work[PUBLISHED]
        work[FIRST_OPERATION] = operations
        begin = ends[payload - 1] if payload > 0 else 0
        if not read_payload(work, work[BUFFER] + begin, work[BUFFER] + ends[payload]):
            work[OPERATIONS], work[BLOCKS] = operations, blocks
            work[EVENTS], work[UNKNOWN_EVENTS], work[REFUSED_EVENTS] = events, unknown, refused
            work[MAIN_GROUP], work[PROVISIONAL] = main_group, provisional
            work[OTHER_GROUP_EVENTS], work[PUBLISHED] = other_groups, published
            break
        payload += 1
    work[NEXT_PAYLOAD] = payload
    return payload
