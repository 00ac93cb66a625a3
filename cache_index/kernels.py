"""All compiled kernels of the cache index: XXH3 block hashing, hash tables, holder sets, matching.

They stand in one module on purpose: Numba's cache does not see edits in other files.

Memory is owned by NumPy arrays on the Python side (``arrays.py``); a kernel gets one ``int64`` array,
the *state*, that holds their addresses and counters, so that a call costs the same however many arrays
there are. Kernels never allocate: one that runs out of room stops early and returns how far it came;
the caller then makes room and continues.

Four open-addressing tables share one layout (linear probing, home position in the top bits, deletion
by backward shift; an entry is empty where its value word is 0):

========  ==============================  ==================================  ===================
table     key                             value                               third word
========  ==============================  ==================================  ===================
NODES     sequence hash ^ domain          holder set id | depth << 32         parent's key (0: root)
LINKS     engine hash ^ stream domain     key in NODES                        --
SETS      Zobrist hash of a holder set    holder set id                       --
COPIES    node key mixed with the slot    extra copies | slot << 32           --
========  ==============================  ==================================  ===================

A table grows by moving clusters of entries from the old arrays to the new ones a few at a time, so that
no single call pays for it. While that lasts, a key may be in either.

A *slot* is one incarnation of (holder, tier). A holder set id is either ``SINGLE | slot`` or the number
of an interned set: sorted slots while small, a bitset when large. Interned sets count their references.
"""

# mypy: disable-error-code="no-any-return, arg-type, operator, no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cache_index.kernel_cache import cache_directory, cached_njit

State = NDArray[np.int64]
U64Array = NDArray[np.uint64]
U32Array = NDArray[np.uint32]
I32Array = NDArray[np.int32]
u64 = np.uint64

TIERS = 5
SMALL_SET = 24  # slots kept as a sorted array; larger sets become bitsets
SMALL_AGAIN = 18  # a shrinking bitset becomes an array here, below SMALL_SET so that it does not flap
PREFETCH_AHEAD = 12
MAX_EXTRA_COPIES = 63  # counted copies of one residency beyond the first
UNKNOWN_DEPTH = np.uint64(0xFFFFFFFF)
SINGLE = 1 << 31

# --- layout of the state -----------------------------------------------------------------------------

ENTRIES, MASK, USED, OLD_ENTRIES, OLD_MASK, CURSOR, LEFT, ENTRY_BYTES = range(8)
NODES, LINKS, SETS, COPIES = 0, 8, 16, 24

ROWS, CAPACITY, LIVE, NEXT, FREE, ROW_BYTES = range(6)
SET_POOL, SMALL_POOL, BITS_POOL = 32, 40, 48

(
    SLOT_HOLDER,  # int32 per slot: holder row, -1 once retired
    SLOT_TIER,  # int32 per slot
    SLOT_BLOCKS,  # int64 per slot: residencies
    HOLDER_SLOTS,  # int32 per (holder row, tier): slot or -1
    DEAD_BITS,  # bitset of retired slots that the sweep takes out
    SCRATCH_BITS,  # bitset, all zero between calls
    NEED,  # int32 per holder row: scratch of match
    ALIVE,  # int32 per holder row: scratch of match
    BIT_WORDS,  # words of one bitset
    SWEEP_CURSOR,  # next position of NODES to sweep, -1 when no sweep runs
) = range(56, 66)
STATE_WORDS = 72

# a record of SET_POOL: four words
ZOBRIST, REFERENCES, MEMBERS, STORAGE = 0, 8, 16, 24  # STORAGE: row in SMALL_POOL, or -1 - row in BITS_POOL

# --- machine words -----------------------------------------------------------------------------------


def instruction(function: Callable[..., Any]) -> Any:
    """A function that becomes the machine code its ``generate`` emits."""
    return intrinsic(function)


@instruction
def load64(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=4)

    return types.uint64(types.int64), generate


@instruction
def load32(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()), align=4)
        return builder.sext(word, ir.IntType(64))

    return types.int64(types.int64), generate


@instruction
def save64(_context: Any, address: Any, value: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=4)
        return target.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@instruction
def save32(_context: Any, address: Any, value: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = builder.trunc(arguments[1], ir.IntType(32))
        builder.store(word, builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()), align=4)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def prefetch(_context: Any, address: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, high_locality, data = ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, high_locality, data])
        return target.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def leading_zeros(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@instruction
def trailing_zeros(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@instruction
def swap_bytes(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


@instruction
def multiply_fold(_context: Any, a: Any, b: Any) -> Any:
    """Low half xor high half of the 128-bit product."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return builder.xor(builder.trunc(product, word), high)

    return types.uint64(types.uint64, types.uint64), generate


@instruction
def words_at(_context: Any, address: Any) -> Any:
    """A pointer that can be indexed. Unlike an array it is passed on without counting references."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@instruction
def secret_at(_context: Any, address: Any) -> Any:
    """Like words_at, unsigned."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(types.int64), generate


# --- registration ------------------------------------------------------------------------------------

CACHE_DIRECTORY = cache_directory(Path(__file__))
_KERNELS: list[tuple[Any, tuple[Any, ...]]] = []

_STATE = types.int64  # address of the state
_IN_U64 = types.Array(types.uint64, 1, "C", readonly=True)
_IN_U32 = types.Array(types.uint32, 1, "C", readonly=True)
_OUT_U64 = types.Array(types.uint64, 1, "C")
_OUT_I32 = types.Array(types.int32, 2, "C")
_INT = types.int64
_WORD = types.uint64


def kernel(*signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function that Python calls. It has one signature, so that no argument can cause a compilation."""

    def register(function: Callable[..., Any]) -> Any:
        dispatcher = cached_njit(function, CACHE_DIRECTORY)
        _KERNELS.append((dispatcher, signature))
        return dispatcher

    return register


def inlined(function: Callable[..., Any]) -> Any:
    """A function that only kernels call; it is compiled into them."""
    return njit(forceinline=True, error_model="numpy")(function)


def compile_all() -> None:
    """Compile every kernel, or load it from the cache, and close the set of signatures."""
    for dispatcher, signature in _KERNELS:
        if not dispatcher.signatures:
            dispatcher.compile(signature)
            dispatcher.disable_compile()


# --- XXH3-64 -----------------------------------------------------------------------------------------

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _secret_at(offset: int) -> int:
    return int.from_bytes(_SECRET_BYTES[offset : offset + 8], "little")


@functools.cache
def secrets_for(seed: int) -> U64Array:
    """The secret, and from word SEEDED on its variant for inputs above 240 bytes."""
    secret = np.frombuffer(_SECRET_BYTES, dtype="<u8")
    offsets = np.array([seed, (1 << 64) - seed & (1 << 64) - 1] * 12, np.uint64)
    return np.concatenate([secret, secret + offsets])


SEEDED = 24
FLIP_0 = np.uint64(_secret_at(56) ^ _secret_at(64))
FLIP_8 = np.uint64(_secret_at(8) ^ _secret_at(16))
FLIP_16_LOW = np.uint64(_secret_at(24) ^ _secret_at(32))
FLIP_16_HIGH = np.uint64(_secret_at(40) ^ _secret_at(48))
PRIME32_1 = np.uint64(0x9E3779B1)
PRIME32_2 = np.uint64(0x85EBCA77)
PRIME32_3 = np.uint64(0xC2B2AE3D)
PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME64_3 = np.uint64(0x165667B19E3779F9)
PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
PRIME_MIX_1 = np.uint64(0x165667919E3779F9)
PRIME_MIX_2 = np.uint64(0x9FB21C651E98DF25)
LOW_32 = np.uint64(0xFFFFFFFF)
ZERO, ONE = np.uint64(0), np.uint64(1)


@inlined
def avalanche(word):  # type: ignore[no-untyped-def]
    word ^= word >> u64(37)
    word *= PRIME_MIX_1
    return word ^ (word >> u64(32))


@inlined
def avalanche_xxh64(word):  # type: ignore[no-untyped-def]
    word ^= word >> u64(33)
    word *= PRIME64_2
    word ^= word >> u64(29)
    word *= PRIME64_3
    return word ^ (word >> u64(32))


@inlined
def rotate_left(word, bits):  # type: ignore[no-untyped-def]
    return (word << u64(bits)) | (word >> u64(64 - bits))


@inlined
def secret_word(secret, offset):  # type: ignore[no-untyped-def]
    """Eight bytes of a secret (words) from byte ``offset``."""
    word = offset >> 3
    shift = u64((offset & 7) * 8)
    if shift == ZERO:
        return secret[word]
    return (secret[word] >> shift) | (secret[word + 1] << (u64(64) - shift))


@inlined
def mix_16(address, secret, offset, seed):  # type: ignore[no-untyped-def]
    low = load64(address) ^ (secret_word(secret, offset) + seed)
    high = load64(address + 8) ^ (secret_word(secret, offset + 8) - seed)
    return multiply_fold(low, high)


@inlined
def hash_pair(a, b, seed):  # type: ignore[no-untyped-def]
    """XXH3-64 of the sixteen bytes a || b."""
    low = a ^ (FLIP_16_LOW + seed)
    high = b ^ (FLIP_16_HIGH - seed)
    return avalanche(u64(16) + swap_bytes(low) + high + multiply_fold(low, high))


@inlined
def hash_up_to_16(address, length, seed):  # type: ignore[no-untyped-def]
    if length > 8:
        low = load64(address) ^ (FLIP_16_LOW + seed)
        high = load64(address + length - 8) ^ (FLIP_16_HIGH - seed)
        return avalanche(u64(length) + swap_bytes(low) + high + multiply_fold(low, high))
    if length == 0:
        return avalanche_xxh64(seed ^ FLIP_0)
    seed ^= (swap_bytes(seed & LOW_32) >> u64(32)) << u64(32)
    first = u64(load32(address)) & LOW_32
    last = u64(load32(address + length - 4)) & LOW_32
    word = (last + (first << u64(32))) ^ (FLIP_8 - seed)
    word ^= rotate_left(word, 49) ^ rotate_left(word, 24)
    word *= PRIME_MIX_2
    word ^= (word >> u64(35)) + u64(length)
    word *= PRIME_MIX_2
    return word ^ (word >> u64(28))


@inlined
def hash_17_to_128(address, length, seed, secret):  # type: ignore[no-untyped-def]
    total = u64(length) * PRIME64_1
    end = address + length
    for pair in range((length - 1) // 32, -1, -1):
        total += mix_16(address + 16 * pair, secret, 32 * pair, seed)
        total += mix_16(end - 16 * (pair + 1), secret, 32 * pair + 16, seed)
    return avalanche(total)


@inlined
def hash_129_to_240(address, length, seed, secret):  # type: ignore[no-untyped-def]
    total = u64(length) * PRIME64_1
    for i in range(8):
        total += mix_16(address + 16 * i, secret, 16 * i, seed)
    total = avalanche(total)
    for i in range(8, length // 16):
        total += mix_16(address + 16 * i, secret, 16 * (i - 8) + 3, seed)
    return avalanche(total + mix_16(address + length - 16, secret, 119, seed))


@inlined
def accumulate(lanes, address, secret, offset):  # type: ignore[no-untyped-def]
    for i in range(8):
        data = load64(address + 8 * i)
        key = data ^ secret_word(secret, offset + 8 * i)
        lanes[i ^ 1] += data
        lanes[i] += (key & LOW_32) * (key >> u64(32))


@inlined
def hash_long(address, length, secret, lanes):  # type: ignore[no-untyped-def]
    """Inputs above 240 bytes, with the seeded secret; ``lanes`` are eight words of scratch."""
    lanes[0], lanes[1], lanes[2], lanes[3] = PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3
    lanes[4], lanes[5], lanes[6], lanes[7] = PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1
    stripes = (length - 1) // 64
    for stripe in range(stripes):
        accumulate(lanes, address + 64 * stripe, secret, 8 * (stripe & 15))
        if stripe & 15 == 15:
            for i in range(8):
                lane = lanes[i]
                lanes[i] = (lane ^ (lane >> u64(47)) ^ secret[16 + i]) * PRIME32_1
    accumulate(lanes, address + length - 64, secret, 121)
    total = u64(length) * PRIME64_1
    for i in range(4):
        low = lanes[2 * i] ^ secret_word(secret, 11 + 16 * i)
        high = lanes[2 * i + 1] ^ secret_word(secret, 19 + 16 * i)
        total += multiply_fold(low, high)
    return avalanche(total)


@inlined
def hash_bytes(address, length, seed, secrets, lanes):  # type: ignore[no-untyped-def]
    if length <= 16:
        return hash_up_to_16(address, length, seed)
    if length <= 128:
        return hash_17_to_128(address, length, seed, secret_at(secrets))
    if length <= 240:
        return hash_129_to_240(address, length, seed, secret_at(secrets))
    return hash_long(address, length, secret_at(secrets + 8 * SEEDED), lanes)


@kernel(_IN_U32, _WORD, _IN_U64)
def hash_words(words, seed, secrets):  # type: ignore[no-untyped-def]
    """XXH3-64 of the little-endian bytes of ``words``; ``secrets`` are ``secrets_for(seed)``."""
    lanes = np.empty(8, np.uint64)
    return hash_bytes(words.ctypes.data, words.shape[0] * 4, seed, secrets.ctypes.data, lanes)


@kernel(_IN_U32, _INT, _WORD, _IN_U64, _WORD, _IN_U64, _OUT_U64)
def hash_chain(tokens, block_size, seed, secrets, parent, folds, hashes):  # type: ignore[no-untyped-def]
    """Rolling hashes of consecutive blocks into ``hashes``.

    ``parent`` is the hash before the first block (0: none); ``folds`` holds one word per block to be
    folded into its local hash (0: nothing), or is empty.
    """
    lanes = np.empty(8, np.uint64)
    secret = secret_at(secrets.ctypes.data)
    address = tokens.ctypes.data
    length = block_size * 4
    previous = parent
    for block in range(hashes.shape[0]):
        if length == 64:
            local = hash_17_to_128(address, 64, seed, secret)
        else:
            local = hash_bytes(address, length, seed, secrets.ctypes.data, lanes)
        if block < folds.shape[0] and folds[block] != ZERO:
            local = hash_pair(local, folds[block], seed)
        if block > 0 or parent != ZERO:
            local = hash_pair(previous, local, seed)
        hashes[block] = local
        previous = local
        address += length


NODE_BYTES = 24
SET_ID_BITS = np.uint64(0xFFFFFFFF)

# --- hash tables -------------------------------------------------------------------------------------

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@inlined
def home(key, mask):  # type: ignore[no-untyped-def]
    return np.int64((key * GOLDEN) >> leading_zeros(u64(mask)))


@inlined
def probe(entries, mask, entry_bytes, key):  # type: ignore[no-untyped-def]
    """Address of the key's entry, or of the empty one where it belongs."""
    position = home(key, mask)
    address = entries + position * entry_bytes
    while load64(address + 8) != ZERO and load64(address) != key:
        position = (position + 1) & mask
        address = entries + position * entry_bytes
    return address


@inlined
def find(state, table, key, entry_bytes):  # type: ignore[no-untyped-def]
    """Like probe, over both halves of a table that is being moved; an empty entry is in the new one."""
    address = probe(state[table + ENTRIES], state[table + MASK], entry_bytes, key)
    if load64(address + 8) == ZERO and state[table + OLD_ENTRIES] != 0:
        old = probe(state[table + OLD_ENTRIES], state[table + OLD_MASK], entry_bytes, key)
        if load64(old + 8) != ZERO:
            return old
    return address


@inlined
def prefetch_entry(state, table, key, entry_bytes):  # type: ignore[no-untyped-def]
    prefetch(state[table + ENTRIES] + home(key, state[table + MASK]) * entry_bytes)


@inlined
def copy_entry(source, target, entry_bytes):  # type: ignore[no-untyped-def]
    for offset in range(0, entry_bytes, 8):
        save64(target + offset, load64(source + offset))


@inlined
def erase(state, table, address, entry_bytes):  # type: ignore[no-untyped-def]
    """Remove the entry at ``address`` and close the gap it leaves in its cluster."""
    entries, mask = state[table + ENTRIES], state[table + MASK]
    if address < entries or address >= entries + (mask + 1) * entry_bytes:
        entries, mask = state[table + OLD_ENTRIES], state[table + OLD_MASK]
    hole = (address - entries) // entry_bytes
    position = (hole + 1) & mask
    while load64(entries + position * entry_bytes + 8) != ZERO:
        wanted = home(load64(entries + position * entry_bytes), mask)
        if ((position - wanted) & mask) >= ((position - hole) & mask):
            copy_entry(entries + position * entry_bytes, entries + hole * entry_bytes, entry_bytes)
            if table == NODES and hole < state[SWEEP_CURSOR] <= position:
                state[SWEEP_CURSOR] = hole  # an entry that was not swept yet moved below the cursor
            hole = position
        position = (position + 1) & mask
    save64(entries + hole * entry_bytes + 8, ZERO)
    state[table + USED] -= 1


@inlined
def table_room(state, table):  # type: ignore[no-untyped-def]
    """Entries that may still be added before the table must grow (load 0.7)."""
    return (state[table + MASK] + 1) * 7 // 10 - state[table + USED]


@kernel(_STATE, _INT, _INT)
def migrate(address, table, positions):  # type: ignore[no-untyped-def]
    """Move the clusters of about ``positions`` positions to the new arrays; return what is left.

    Whole clusters move, so that probing stays correct in both halves. Links whose node is gone are
    left behind.
    """
    state = words_at(address)
    entry_bytes = state[table + ENTRY_BYTES]
    entries, mask = state[table + OLD_ENTRIES], state[table + OLD_MASK]
    cursor, left = state[table + CURSOR], state[table + LEFT]
    while left > 0:
        address = entries + cursor * entry_bytes
        if load64(address + 8) == ZERO:
            if positions <= 0:
                break
        else:
            if table == LINKS and load64(find(state, NODES, load64(address + 8), NODE_BYTES) + 8) == ZERO:
                state[table + USED] -= 1  # its node is gone
            else:
                new = probe(state[table + ENTRIES], state[table + MASK], entry_bytes, load64(address))
                copy_entry(address, new, entry_bytes)
            save64(address + 8, ZERO)
        cursor = (cursor + 1) & mask
        left -= 1
        positions -= 1
    state[table + CURSOR] = cursor
    state[table + LEFT] = left
    if left == 0:
        state[table + OLD_ENTRIES] = 0
    return left


# --- holder sets -------------------------------------------------------------------------------------


@inlined
def mix(word):  # type: ignore[no-untyped-def]
    word ^= word >> u64(32)
    word *= u64(0xD6E8FEB86659FD93)
    word ^= word >> u64(32)
    word *= u64(0xD6E8FEB86659FD93)
    return word ^ (word >> u64(32))


@inlined
def zobrist(slot):  # type: ignore[no-untyped-def]
    return mix(u64(slot) * GOLDEN + u64(0x1234567))


@inlined
def allocate(state, pool):  # type: ignore[no-untyped-def]
    state[pool + LIVE] += 1
    row = state[pool + FREE]
    if row >= 0:
        state[pool + FREE] = np.int64(load64(state[pool + ROWS] + row * state[pool + ROW_BYTES]))
        return row
    row = state[pool + NEXT]
    state[pool + NEXT] = row + 1
    return row


@inlined
def free(state, pool, row):  # type: ignore[no-untyped-def]
    save64(state[pool + ROWS] + row * state[pool + ROW_BYTES], u64(state[pool + FREE]))
    state[pool + FREE] = row
    state[pool + LIVE] -= 1


@inlined
def record_of(state, set_id):  # type: ignore[no-untyped-def]
    return state[SET_POOL + ROWS] + set_id * 32


@inlined
def members_of(state, set_id):  # type: ignore[no-untyped-def]
    if set_id >= SINGLE:
        return np.int64(1)
    return np.int64(load64(record_of(state, set_id) + MEMBERS))


@inlined
def zobrist_of(state, set_id):  # type: ignore[no-untyped-def]
    if set_id >= SINGLE:
        return zobrist(set_id - SINGLE)
    return load64(record_of(state, set_id) + ZOBRIST)


@inlined
def small_row(state, row):  # type: ignore[no-untyped-def]
    return state[SMALL_POOL + ROWS] + row * (SMALL_SET * 4)


@inlined
def bits_row(state, row):  # type: ignore[no-untyped-def]
    return state[BITS_POOL + ROWS] + row * state[BITS_POOL + ROW_BYTES]


@inlined
def set_bit(bits, slot):  # type: ignore[no-untyped-def]
    address = bits + (slot >> 6) * 8
    save64(address, load64(address) | (ONE << u64(slot & 63)))


@inlined
def clear_bit(bits, slot):  # type: ignore[no-untyped-def]
    address = bits + (slot >> 6) * 8
    save64(address, load64(address) & ~(ONE << u64(slot & 63)))


@inlined
def has_bit(bits, slot):  # type: ignore[no-untyped-def]
    return (load64(bits + (slot >> 6) * 8) >> u64(slot & 63)) & ONE != ZERO


@inlined
def contains(state, set_id, slot):  # type: ignore[no-untyped-def]
    if set_id >= SINGLE:
        return set_id == SINGLE + slot
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage < 0:
        return has_bit(bits_row(state, -1 - storage), slot)
    row = small_row(state, storage)
    for i in range(np.int64(load64(record + MEMBERS))):
        member = load32(row + 4 * i)
        if member >= slot:
            return member == slot
    return False


@inlined
def retain(state, set_id):  # type: ignore[no-untyped-def]
    if 0 < set_id < SINGLE:
        address = record_of(state, set_id) + REFERENCES
        save64(address, load64(address) + ONE)


@inlined
def release(state, set_id):  # type: ignore[no-untyped-def]
    if set_id == 0 or set_id >= SINGLE:
        return
    record = record_of(state, set_id)
    references = load64(record + REFERENCES) - ONE
    save64(record + REFERENCES, references)
    if references != ZERO:
        return
    erase(state, SETS, find(state, SETS, load64(record + ZOBRIST), 16), 16)
    storage = np.int64(load64(record + STORAGE))
    if storage < 0:
        free(state, BITS_POOL, -1 - storage)
    else:
        free(state, SMALL_POOL, storage)
    free(state, SET_POOL, set_id)


@inlined
def new_set(state, hash_of_set, members, storage):  # type: ignore[no-untyped-def]
    set_id = allocate(state, SET_POOL)
    record = record_of(state, set_id)
    save64(record + ZOBRIST, hash_of_set)
    save64(record + REFERENCES, ZERO)
    save64(record + MEMBERS, u64(members))
    save64(record + STORAGE, u64(storage))
    entry = find(state, SETS, hash_of_set, 16)
    save64(entry, hash_of_set)
    save64(entry + 8, u64(set_id))
    state[SETS + USED] += 1
    return set_id


@inlined
def copy_bits(state, source, target):  # type: ignore[no-untyped-def]
    for word in range(state[BIT_WORDS]):
        save64(target + 8 * word, load64(source + 8 * word))


@inlined
def zero_bits(state, bits):  # type: ignore[no-untyped-def]
    for word in range(state[BIT_WORDS]):
        save64(bits + 8 * word, ZERO)


@inlined
def with_slot(state, set_id, slot):  # type: ignore[no-untyped-def]
    """The interned set that has one slot more; it may be new and without references."""
    hash_of_set = zobrist_of(state, set_id) ^ zobrist(slot)
    known = np.int64(load64(find(state, SETS, hash_of_set, 16) + 8))
    if known != 0:
        return known
    members = members_of(state, set_id)
    if set_id >= SINGLE:
        row = allocate(state, SMALL_POOL)
        target = small_row(state, row)
        save32(target, min(set_id - SINGLE, slot))
        save32(target + 4, max(set_id - SINGLE, slot))
        return new_set(state, hash_of_set, 2, row)
    storage = np.int64(load64(record_of(state, set_id) + STORAGE))
    if storage < 0:
        row = allocate(state, BITS_POOL)
        target = bits_row(state, row)
        copy_bits(state, bits_row(state, -1 - storage), target)
        set_bit(target, slot)
        return new_set(state, hash_of_set, members + 1, -1 - row)
    source = small_row(state, storage)
    if members == SMALL_SET:
        row = allocate(state, BITS_POOL)
        target = bits_row(state, row)
        zero_bits(state, target)
        for i in range(members):
            set_bit(target, load32(source + 4 * i))
        set_bit(target, slot)
        return new_set(state, hash_of_set, members + 1, -1 - row)
    row = allocate(state, SMALL_POOL)
    target = small_row(state, row)
    i = 0
    while i < members and load32(source + 4 * i) < slot:
        save32(target + 4 * i, load32(source + 4 * i))
        i += 1
    save32(target + 4 * i, slot)
    while i < members:
        save32(target + 4 * i + 4, load32(source + 4 * i))
        i += 1
    return new_set(state, hash_of_set, members + 1, row)


@inlined
def without_slot(state, set_id, slot):  # type: ignore[no-untyped-def]
    """The interned set that has one member less, 0 when nothing is left; see with_slot."""
    if set_id >= SINGLE:
        return np.int64(0)
    record = record_of(state, set_id)
    members = np.int64(load64(record + MEMBERS)) - 1
    storage = np.int64(load64(record + STORAGE))
    if members == 1:  # two members are always stored as an array
        row = small_row(state, storage)
        first = load32(row)
        return SINGLE + (load32(row + 4) if first == slot else first)
    hash_of_set = load64(record + ZOBRIST) ^ zobrist(slot)
    known = np.int64(load64(find(state, SETS, hash_of_set, 16) + 8))
    if known != 0:
        return known
    if storage < 0 and members > SMALL_AGAIN:
        row = allocate(state, BITS_POOL)
        target = bits_row(state, row)
        copy_bits(state, bits_row(state, -1 - storage), target)
        clear_bit(target, slot)
        return new_set(state, hash_of_set, members, -1 - row)
    row = allocate(state, SMALL_POOL)
    target = small_row(state, row)
    if storage >= 0:
        source = small_row(state, storage)
        for i in range(members + 1):
            member = load32(source + 4 * i)
            if member != slot:
                save32(target, member)
                target += 4
        return new_set(state, hash_of_set, members, row)
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index)
        while word != ZERO:
            member = word_index * 64 + trailing_zeros(word)
            word &= word - ONE
            if member != slot:
                save32(target, member)
                target += 4
    return new_set(state, hash_of_set, members, row)


# --- nodes -------------------------------------------------------------------------------------------


@inlined
def set_of(entry):  # type: ignore[no-untyped-def]
    return np.int64(load64(entry + 8) & SET_ID_BITS)


@inlined
def write_set(entry, set_id):  # type: ignore[no-untyped-def]
    save64(entry + 8, (load64(entry + 8) & ~SET_ID_BITS) | u64(set_id))


@inlined
def room(state):  # type: ignore[no-untyped-def]
    """Blocks that can surely be applied before something must grow; each needs one of everything."""
    least = min(table_room(state, NODES), table_room(state, SETS))
    least = min(least, min(table_room(state, LINKS), table_room(state, COPIES)))
    for pool in (SET_POOL, SMALL_POOL, BITS_POOL):
        least = min(least, state[pool + CAPACITY] - state[pool + LIVE] - 2)
    return least


@inlined
def copy_key(key, slot):  # type: ignore[no-untyped-def]
    return mix(key + zobrist(slot))


@inlined
def add_copy(state, key, slot):  # type: ignore[no-untyped-def]
    mixed = copy_key(key, slot)
    entry = find(state, COPIES, mixed, 16)
    value = load64(entry + 8)
    if value == ZERO:
        save64(entry, mixed)
        save64(entry + 8, (u64(slot) << u64(32)) | ONE)
        state[COPIES + USED] += 1
    elif (value & LOW_32) < u64(MAX_EXTRA_COPIES):
        save64(entry + 8, value + ONE)


@inlined
def drop_copy(state, key, slot):  # type: ignore[no-untyped-def]
    """Whether one of several copies went, so that the residency stays."""
    if state[COPIES + USED] == 0:
        return False
    entry = find(state, COPIES, copy_key(key, slot), 16)
    value = load64(entry + 8)
    if value == ZERO:
        return False
    if value & LOW_32 == ONE:
        erase(state, COPIES, entry, 16)
    else:
        save64(entry + 8, value - ONE)
    return True


@inlined
def link(state, engine_key, key):  # type: ignore[no-untyped-def]
    if key == ZERO:  # indistinguishable from an empty entry
        return
    entry = find(state, LINKS, engine_key, 16)
    if load64(entry + 8) == ZERO:
        save64(entry, engine_key)
        state[LINKS + USED] += 1
    save64(entry + 8, key)


@inlined
def known_depth(state, key):  # type: ignore[no-untyped-def]
    value = load64(find(state, NODES, key, NODE_BYTES) + 8)
    if value == ZERO:
        return UNKNOWN_DEPTH
    return value >> u64(32)


@kernel(_STATE, _INT, _IN_U64, _IN_U64, _WORD, _WORD, _INT)
def store(address, slot, hashes, engine_keys, domain, parent, start):  # type: ignore[no-untyped-def]
    """Give ``slot`` the blocks of one chain from position ``start`` on; return the position reached.

    ``engine_keys``, one per block or none, are linked to the blocks. A block that the slot already has
    gains a copy.
    """
    state = words_at(address)
    stop = min(hashes.shape[0], start + room(state))
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_entry(state, NODES, hashes[i] ^ domain, NODE_BYTES)
    if start > 0:
        parent = hashes[start - 1]
    parent_key = ZERO
    depth = ZERO
    if parent != ZERO:
        parent_key = parent ^ domain
        depth = known_depth(state, parent_key)
        if depth != UNKNOWN_DEPTH:
            depth += ONE
    before = np.int64(0)  # the last transition: set `before` with the slot is set `after`
    after = np.int64(0)
    added = 0
    for i in range(start, stop):
        if i + PREFETCH_AHEAD < stop:
            prefetch_entry(state, NODES, hashes[i + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        key = hashes[i] ^ domain
        entry = find(state, NODES, key, NODE_BYTES)
        value = load64(entry + 8)
        set_id = np.int64(value & SET_ID_BITS)
        if value == ZERO:
            save64(entry, key)
            save64(entry + 8, (depth << u64(32)) | u64(SINGLE + slot))
            save64(entry + 16, parent_key)
            state[NODES + USED] += 1
            added += 1
        elif set_id != before and contains(state, set_id, slot):
            add_copy(state, key, slot)
        else:
            if set_id != before:
                target = with_slot(state, set_id, slot)
                retain(state, target)
                retain(state, set_id)
                release(state, before)
                release(state, after)
                before = set_id
                after = target
            write_set(entry, after)
            retain(state, after)
            release(state, set_id)
            added += 1
        if value != ZERO and value >> u64(32) == UNKNOWN_DEPTH:
            save64(entry + 8, (load64(entry + 8) & SET_ID_BITS) | (depth << u64(32)))
            save64(entry + 16, parent_key)
        if engine_keys.shape[0] > 0:
            link(state, engine_keys[i], key)
        parent_key = key
        if depth != UNKNOWN_DEPTH:
            depth += ONE
    release(state, before)
    release(state, after)
    blocks = state[SLOT_BLOCKS] + slot * 8
    save64(blocks, load64(blocks) + u64(added))
    return max(start, stop)


@inlined
def take(state, slot, key):  # type: ignore[no-untyped-def]
    """Take one copy of a block from a slot. 0: it had none, 1: it had, 2: and the node is gone."""
    entry = find(state, NODES, key, NODE_BYTES)
    if load64(entry + 8) == ZERO:
        return 2
    set_id = set_of(entry)
    if not contains(state, set_id, slot):
        return 0
    if drop_copy(state, key, slot):
        return 1
    blocks = state[SLOT_BLOCKS] + slot * 8
    save64(blocks, load64(blocks) - ONE)
    target = without_slot(state, set_id, slot)
    if target == 0:
        erase(state, NODES, entry, NODE_BYTES)
        return 2
    retain(state, target)
    write_set(entry, target)
    release(state, set_id)
    return 1


@kernel(_STATE, _INT, _IN_U64, _WORD, _INT)
def remove(address, slot, hashes, domain, start):  # type: ignore[no-untyped-def]
    """Take one copy of each block from ``slot``; return the position reached."""
    state = words_at(address)
    stop = min(hashes.shape[0], start + room(state))
    for i in range(start, stop):
        if i + PREFETCH_AHEAD < stop:
            prefetch_entry(state, NODES, hashes[i + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        take(state, slot, hashes[i] ^ domain)
    return max(start, stop)


@kernel(_STATE, _INT, _IN_U64, _INT)
def remove_linked(address, slot, engine_keys, start):  # type: ignore[no-untyped-def]
    """Like remove, by engine keys; links of nodes that are gone are dropped.

    Returns the position reached and how many engine keys were unknown.
    """
    state = words_at(address)
    stop = min(engine_keys.shape[0], start + room(state))
    unknown = 0
    for i in range(start, stop):
        if i + PREFETCH_AHEAD < stop:
            prefetch_entry(state, LINKS, engine_keys[i + PREFETCH_AHEAD], 16)
        entry = find(state, LINKS, engine_keys[i], 16)
        key = load64(entry + 8)
        if key == ZERO:
            unknown += 1
        elif take(state, slot, key) == 2:
            erase(state, LINKS, entry, 16)
    return max(start, stop), unknown


@kernel(_STATE, _WORD)
def resolve(address, engine_key):  # type: ignore[no-untyped-def]
    """The node key linked to an engine key, 0 when there is none."""
    state = words_at(address)
    return load64(find(state, LINKS, engine_key, 16) + 8)


# --- matching ----------------------------------------------------------------------------------------
#
# NEED holds, per holder row, the lowest tier level that covers every block so far: the maximum over the
# blocks of the lowest tier that has the block. Level TIERS means that the holder is out.


@inlined
def start_slot(state, slot, alive):  # type: ignore[no-untyped-def]
    """Enter a slot of the first block's set; returns the number of holders alive."""
    row = load32(state[SLOT_HOLDER] + 4 * slot)
    if row < 0:
        return alive
    tier = load32(state[SLOT_TIER] + 4 * slot)
    need = state[NEED] + 4 * row
    if load32(need) == TIERS:
        save32(state[ALIVE] + 4 * alive, row)
        alive += 1
        save32(need, tier)
    elif tier < load32(need):
        save32(need, tier)
    return alive


@inlined
def start_set(state, set_id):  # type: ignore[no-untyped-def]
    if set_id >= SINGLE:
        return start_slot(state, set_id - SINGLE, np.int64(0))
    alive = np.int64(0)
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            alive = start_slot(state, load32(row + 4 * i), alive)
        return alive
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index)
        while word != ZERO:
            alive = start_slot(state, word_index * 64 + trailing_zeros(word), alive)
            word &= word - ONE
    return alive


@inlined
def leave_slot(state, slot, set_id, depth, levels):  # type: ignore[no-untyped-def]
    """A slot is not in the next block's set; returns 1 when its holder drops out."""
    row = load32(state[SLOT_HOLDER] + 4 * slot)
    if row < 0:
        return 0
    level = load32(state[NEED] + 4 * row)
    if level == TIERS:
        return 0
    tier = np.int64(0)
    while tier < TIERS:
        other = load32(state[HOLDER_SLOTS] + 4 * (row * TIERS + tier))
        if other >= 0 and contains(state, set_id, other):
            break
        tier += 1
    if tier <= level:
        return 0
    for lost in range(level, tier):
        save32(levels + 4 * (row * TIERS + lost), depth)
    save32(state[NEED] + 4 * row, tier)
    return 1 if tier == TIERS else 0


@inlined
def mark_members(state, set_id, bits, present):  # type: ignore[no-untyped-def]
    """Set or clear in ``bits`` the members of a set that is not stored as a bitset."""
    if set_id >= SINGLE:
        if present:
            set_bit(bits, set_id - SINGLE)
        else:
            clear_bit(bits, set_id - SINGLE)
        return
    record = record_of(state, set_id)
    row = small_row(state, np.int64(load64(record + STORAGE)))
    for i in range(np.int64(load64(record + MEMBERS))):
        if present:
            set_bit(bits, load32(row + 4 * i))
        else:
            clear_bit(bits, load32(row + 4 * i))


@inlined
def bits_of(state, set_id):  # type: ignore[no-untyped-def]
    """Address of the set's bitset, 0 when it is stored otherwise."""
    if set_id >= SINGLE:
        return np.int64(0)
    storage = np.int64(load64(record_of(state, set_id) + STORAGE))
    if storage < 0:
        return bits_row(state, -1 - storage)
    return np.int64(0)


@inlined
def change_set(state, previous, current, depth, levels):  # type: ignore[no-untyped-def]
    """Handle every slot of ``previous`` that ``current`` lacks; returns how many holders drop out."""
    out = 0
    if previous >= SINGLE:
        if not contains(state, current, previous - SINGLE):
            out = leave_slot(state, previous - SINGLE, current, depth, levels)
        return out
    before = bits_of(state, previous)
    if before == 0:
        record = record_of(state, previous)
        row = small_row(state, np.int64(load64(record + STORAGE)))
        for i in range(np.int64(load64(record + MEMBERS))):
            slot = load32(row + 4 * i)
            if not contains(state, current, slot):
                out += leave_slot(state, slot, current, depth, levels)
        return out
    after = bits_of(state, current)
    marked = after == 0
    if marked:
        after = state[SCRATCH_BITS]
        mark_members(state, current, after, True)
    for word_index in range(state[BIT_WORDS]):
        word = load64(before + 8 * word_index) & ~load64(after + 8 * word_index)
        while word != ZERO:
            slot = word_index * 64 + trailing_zeros(word)
            word &= word - ONE
            out += leave_slot(state, slot, current, depth, levels)
    if marked:
        mark_members(state, current, after, False)
    return out


@kernel(_STATE, _IN_U64, _WORD, _OUT_I32)
def match(address, hashes, domain, levels):  # type: ignore[no-untyped-def]
    """Contiguous prefix in blocks per (holder row, tier level) into ``levels``, which must be zero.

    Every position is looked up, so holes count; blocks whose set is that of the block before cost one
    probe. Returns the number of positions verified.
    """
    state = words_at(address)
    total = hashes.shape[0]
    if total == 0:
        return 0
    previous = set_of(find(state, NODES, hashes[0] ^ domain, NODE_BYTES))
    if previous == 0:
        return 0
    for i in range(1, min(total, PREFETCH_AHEAD + 1)):
        prefetch_entry(state, NODES, hashes[i] ^ domain, NODE_BYTES)
    listed = start_set(state, previous)
    alive = listed
    depth = 1
    while depth < total and alive > 0:
        if depth + PREFETCH_AHEAD < total:
            prefetch_entry(state, NODES, hashes[depth + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        current = set_of(find(state, NODES, hashes[depth] ^ domain, NODE_BYTES))
        if current != previous:
            if current == 0:
                break
            alive -= change_set(state, previous, current, depth, levels.ctypes.data)
            previous = current
        depth += 1
    for i in range(listed):
        row = load32(state[ALIVE] + 4 * i)
        for level in range(load32(state[NEED] + 4 * row), TIERS):
            levels[row, level] = depth
        save32(state[NEED] + 4 * row, TIERS)
    return depth


# --- maintenance -------------------------------------------------------------------------------------


@inlined
def dead_member(state, set_id):  # type: ignore[no-untyped-def]
    """A retired slot of the set, -1 when it has none."""
    dead = state[DEAD_BITS]
    if set_id >= SINGLE:
        return set_id - SINGLE if has_bit(dead, set_id - SINGLE) else np.int64(-1)
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            slot = load32(row + 4 * i)
            if has_bit(dead, slot):
                return slot
        return np.int64(-1)
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index) & load64(dead + 8 * word_index)
        if word != ZERO:
            return word_index * 64 + trailing_zeros(word)
    return np.int64(-1)


@inlined
def without_dead(state, set_id):  # type: ignore[no-untyped-def]
    """The set without retired slots, 0 when nothing is left; it comes with one reference."""
    retain(state, set_id)
    slot = dead_member(state, set_id)
    while slot >= 0:
        smaller = without_slot(state, set_id, slot)
        retain(state, smaller)
        release(state, set_id)
        set_id = smaller
        slot = dead_member(state, set_id) if set_id != 0 else np.int64(-1)
    return set_id


@kernel(_STATE, _INT)
def sweep(address, positions):  # type: ignore[no-untyped-def]
    """Take retired slots out of the next positions of NODES; return how many positions are left."""
    state = words_at(address)
    cursor = state[SWEEP_CURSOR]
    capacity = state[NODES + MASK] + 1
    while cursor < capacity and positions > 0 and room(state) > 2:
        entry = state[NODES + ENTRIES] + cursor * NODE_BYTES
        positions -= 1
        if load64(entry + 8) != ZERO:
            set_id = set_of(entry)
            if dead_member(state, set_id) >= 0:
                target = without_dead(state, set_id)
                release(state, set_id)
                if target == 0:
                    state[SWEEP_CURSOR] = cursor
                    erase(state, NODES, entry, NODE_BYTES)
                    continue  # another entry may have moved here
                write_set(entry, target)
        cursor += 1
    state[SWEEP_CURSOR] = cursor
    return capacity - cursor


@kernel(_STATE)
def sweep_copies(address):  # type: ignore[no-untyped-def]
    """Drop the copies of retired slots. COPIES must not be moving."""
    state = words_at(address)
    position = 0
    while position <= state[COPIES + MASK]:
        entry = state[COPIES + ENTRIES] + position * 16
        value = load64(entry + 8)
        if value != ZERO and has_bit(state[DEAD_BITS], np.int64(value >> u64(32))):
            erase(state, COPIES, entry, 16)
        else:
            position += 1


@kernel(_STATE, _INT, _INT)
def sweep_links(address, cursor, positions):  # type: ignore[no-untyped-def]
    """Drop links whose node is gone from position ``cursor`` on; return the position reached.

    One that slips below the cursor meanwhile is found by the next pass. LINKS must not be moving.
    """
    state = words_at(address)
    stop = min(cursor + positions, state[LINKS + MASK] + 1)
    while cursor < stop:
        entry = state[LINKS + ENTRIES] + cursor * 16
        key = load64(entry + 8)
        if key != ZERO and load64(find(state, NODES, key, NODE_BYTES) + 8) == ZERO:
            erase(state, LINKS, entry, 16)
        else:
            cursor += 1
    return cursor


@kernel(_STATE, _INT, _OUT_U64)
def keys_of_slot(address, slot, keys):  # type: ignore[no-untyped-def]
    """Write the keys of the slot's blocks to ``keys``; return their number. NODES must not be moving."""
    state = words_at(address)
    count = 0
    for position in range(state[NODES + MASK] + 1):
        entry = state[NODES + ENTRIES] + position * NODE_BYTES
        if load64(entry + 8) != ZERO and contains(state, set_of(entry), slot):
            keys[count] = load64(entry)
            count += 1
    return count


@inlined
def has_live_member(state, set_id):  # type: ignore[no-untyped-def]
    if set_id >= SINGLE:
        return load32(state[SLOT_HOLDER] + 4 * (set_id - SINGLE)) >= 0
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            if load32(state[SLOT_HOLDER] + 4 * load32(row + 4 * i)) >= 0:
                return True
        return False
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index)
        while word != ZERO:
            if load32(state[SLOT_HOLDER] + 4 * (word_index * 64 + trailing_zeros(word))) >= 0:
                return True
            word &= word - ONE
    return False


@kernel(_STATE, _INT, _OUT_U64)
def count_by_depth(address, positions, counts):  # type: ignore[no-untyped-def]
    """Count the nodes in the first ``positions`` of NODES per depth; the last count takes all deeper."""
    state = words_at(address)
    for position in range(min(positions, state[NODES + MASK] + 1)):
        value = load64(state[NODES + ENTRIES] + position * NODE_BYTES + 8)
        if value != ZERO and has_live_member(state, np.int64(value & SET_ID_BITS)):
            counts[min(np.int64(value >> u64(32)), counts.shape[0] - 1)] += ONE


@kernel(_STATE, _INT, _INT, _INT, _OUT_U64)
def nodes_by_depth(address, positions, low, high, nodes):  # type: ignore[no-untyped-def]
    """Collect nodes with low <= depth < high as (key, depth, parent key) triples in ``nodes``.

    Looks at the first ``positions`` of NODES and stops when ``nodes`` is full; returns their number.
    """
    state = words_at(address)
    count = 0
    for position in range(min(positions, state[NODES + MASK] + 1)):
        if 3 * count + 3 > nodes.shape[0]:
            break
        entry = state[NODES + ENTRIES] + position * NODE_BYTES
        value = load64(entry + 8)
        depth = np.int64(value >> u64(32))
        if value != ZERO and low <= depth < high and has_live_member(state, set_of(entry)):
            nodes[3 * count] = load64(entry)
            nodes[3 * count + 1] = u64(depth)
            nodes[3 * count + 2] = load64(entry + 16)
            count += 1
    return count


@kernel(_STATE, _WORD, _OUT_U64)
def slots_of_node(address, key, slots):  # type: ignore[no-untyped-def]
    """Write the slots that have the node, retired ones included, to ``slots``; return their number."""
    state = words_at(address)
    set_id = set_of(find(state, NODES, key, NODE_BYTES))
    if set_id == 0:
        return 0
    count = 0
    for slot in range(slots.shape[0]):
        if contains(state, set_id, slot):
            slots[count] = u64(slot)
            count += 1
    return count
