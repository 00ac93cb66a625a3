"""The compiled kernels of the cache index: XXH3 block hashing, hash tables, holder sets, matching.

They stand in one module on purpose: Numba's cache does not see edits in other files.

Memory is owned by NumPy arrays on the Python side (``arrays.py``); a kernel gets one ``int64`` array,
the *state*, that holds their addresses and counters, so that a call costs the same however many arrays
there are. Kernels never allocate: one that runs out of room stops early and returns how far it came;
the caller then makes room and continues.

Seven open-addressing tables share one layout (linear probing, home position in proportion to the top bits
of the mixed key, spare positions behind the last home instead of wrapping around, deletion by backward
shift; an entry is empty where its second word is 0):

========  ===============================  ===================================  =======================
table     key                              value                                third word
========  ===============================  ===================================  =======================
NODES     sequence hash ^ domain           holder set | depth | parent (low)    parent (high) | age
LINKS     engine hash ^ stream domain      key in NODES                         --
SETS      Zobrist hash of a holder set     holder set                           --
COPIES    node key mixed with the slot        extra copies | slot << 32            --
FANOUT    place mixed with the slot        held children | held | slot << 32    place
GAPS      place                            children without it | depth << 32    anchor, or 0
ANCHORS   place                            gaps in its stretch                  --
========  ===============================  ===================================  =======================

A table grows by moving its entries in order into larger arrays, a few at a time, so that no single call
pays for it: below the *cursor* keys live in the new arrays, from it on in the old ones.

A *slot* is one incarnation of (holder, tier). A holder set is either ``SINGLE | slot`` or the number
of an interned set: sorted slots while small, a bitset when large. Interned sets count their references.

Why matching may jump
---------------------
A node records its depth and 46 bits of its parent's mixed key; a *place* is such a name with its depth.
Slots mostly have a block only with its parent. Where one does not (a removal in mid-chain, a block in a
slower tier, a store below something unknown), its parent's place is a *gap*, and GAPS counts the
(slot, child) pairs that lack it. Between two positions of a prompt without a gap, each set of live slots
is contained in the one before, provided that the later node's depth fits its position: who has the later
block has its parent's place, which is no gap, hence the parent, and so on. So where both ends have the
same set, all between have it, and where they differ, halving finds each change. Positions at gaps are
looked up one by one. They are found without looking at each position: a gap is registered with its
*anchor*, the place at the last depth divisible by 64 on the way to it, or by its depth if it has none.

To keep GAPS exact, FANOUT counts per slot and place the children the slot has; one child for a block that
it has and none for another are not written down, which leaves a few entries per chain.

All this trusts that hashes name whole prefixes, which is what they are for, and that 46 bits tell a
slot's blocks of one depth apart: with a million blocks in a slot, a pair that they do not tell apart exists
with a chance of about one in ten thousand, and harms only if one of the two is also lost in mid-chain.
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
MAX_AGE = 3
SINGLE = 1 << 27

# --- layout of the state -----------------------------------------------------------------------------

ENTRIES, CAPACITY, USED, OLD_ENTRIES, OLD_CAPACITY, CURSOR, END, OLD_END, CROWDED, SWEPT = range(10)
NODES, LINKS, SETS, COPIES, FANOUT, GAPS, ANCHORS = range(0, 70, 10)
NODE_BYTES = 20
PAIR_BYTES = 16
TRIPLE_BYTES = 24
ENTRY_BYTES = {
    NODES: NODE_BYTES,
    LINKS: PAIR_BYTES,
    SETS: PAIR_BYTES,
    COPIES: PAIR_BYTES,
    FANOUT: TRIPLE_BYTES,
    GAPS: TRIPLE_BYTES,
    ANCHORS: PAIR_BYTES,
}
USUAL_PERCENT = 82  # of its homes a table may have in use before it must grow
LINKS_PERCENT = 72
CROWDED_ENTRIES = 1024  # a table whose last so many positions are touched must grow

ROWS, POOL_CAPACITY, LIVE, NEXT, FREE, ROW_BYTES = range(6)
SET_POOL, SMALL_POOL, BITS_POOL = 70, 76, 82

(
    SLOT_HOLDER,  # int32 per slot: holder row, -1 once retired
    SLOT_TIER,  # int32 per slot
    SLOT_BLOCKS,  # int64 per slot: residencies
    SLOT_GAPS,  # int64 per slot: its FANOUT entries of places that it does not have
    HOLDER_SLOTS,  # int32 per (holder row, tier): slot or -1
    DEAD_BITS,  # bitset of retired slots that the sweep takes out
    SCRATCH_BITS,  # bitset, all zero between calls
    NEED,  # int32 per holder row: scratch of match
    ALIVE,  # int32 per holder row: scratch of match
    BIT_WORDS,  # words of one bitset
    GAP_DEPTHS,  # int32 per depth: gaps there without an anchor
    GAP_BITS,  # bitset over depths: whether there are such gaps
    HEAT,  # (node key, count) pairs: where recent matches ended
    MATCHES,  # since the counts in HEAT were last halved
    MAX_BLOCKS,  # nodes the index may have
    DROPPED,  # residencies dropped for want of room, and stored blocks that were not taken
    HAND,  # position of the eviction
    WANTED,  # room that the next step needs, beyond the usual
    MOVING,  # tables that are being moved
    LEAF_WAITS,  # 1: the place below is a leaf of the slot at hand, and not yet in FANOUT
    LEAF_PLACE,
    ANCHORED_PLACE,  # the place that was anchored last, and its anchor
    LAST_ANCHOR,
) = range(90, 113)
STATE_WORDS = 120

# a record of SET_POOL: four words
ZOBRIST, REFERENCES, MEMBERS, STORAGE = 0, 8, 16, 24  # STORAGE: row in SMALL_POOL, or -1 - row in BITS_POOL

# a node's second word: holder set 28 bits, depth 20 bits, parent 16 bits; then parent 30 bits, age 2 bits
SET_ID_BITS = np.uint64((1 << 28) - 1)
DEPTH_SHIFT, PARENT_SHIFT = np.uint64(28), np.uint64(48)
DEPTH_BITS = np.uint64((1 << 20) - 1)
UNKNOWN = (1 << 20) - 1
UNKNOWN_DEPTH = np.uint64(UNKNOWN)
STRETCH = 64  # depths that share an anchor, and a word of GAP_BITS
GAP_DEPTH_BITS = (1 << 17) - 1  # gaps are counted per depth modulo this + 1
NAME_SHIFT = np.uint64(18)  # a name is the top 46 bits of a mixed key
PLACE_DEPTH_BITS = np.uint64((1 << 18) - 1)
HELD = np.uint64(1 << 31)
COUNT_BITS = np.uint64((1 << 31) - 1)

HEAT_ROW_BITS = 10
HEAT_WAYS = 4
HEAT_HALVING = 1 << 14  # matches after which the counts are halved
CAREFUL = 32
MOVING_ROOM = 1024  # blocks applied at most between two steps of a table that moves

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


def kernel(*signature: Any, nogil: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """A function that Python calls. It has one signature, so that no argument can cause a compilation."""

    def register(function: Callable[..., Any]) -> Any:
        dispatcher = cached_njit(function, CACHE_DIRECTORY, nogil=nogil)
        _KERNELS.append((dispatcher, signature))
        return dispatcher

    return register


def inlined(function: Callable[..., Any]) -> Any:
    """A function that only kernels call; it is compiled into them."""
    return njit(forceinline=True, error_model="numpy")(function)


def outlined(function: Callable[..., Any]) -> Any:
    """Like inlined, for what is long and rare: compiled once per kernel, however often it is called."""
    return njit(error_model="numpy")(function)


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


# --- hash tables -------------------------------------------------------------------------------------

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@inlined
def home_of_mixed(mixed, capacity):  # type: ignore[no-untyped-def]
    return np.int64(((mixed >> u64(32)) * u64(capacity)) >> u64(32))


@inlined
def home_address(state, table, mixed, entry_bytes):  # type: ignore[no-untyped-def]
    """Where the search for a mixed key begins, in the half of a moving table that is in charge."""
    if state[table + OLD_ENTRIES] != 0:
        position = home_of_mixed(mixed, state[table + OLD_CAPACITY])
        if position >= state[table + CURSOR]:
            return state[table + OLD_ENTRIES] + position * entry_bytes
    return state[table + ENTRIES] + home_of_mixed(mixed, state[table + CAPACITY]) * entry_bytes


@inlined
def find(state, table, key, entry_bytes):  # type: ignore[no-untyped-def]
    """Address of the key's entry, or of the empty one where it belongs."""
    address = home_address(state, table, key * GOLDEN, entry_bytes)
    while load64(address + 8) != ZERO and load64(address) != key:
        address += entry_bytes
    return address


@inlined
def prefetch_entry(state, table, key, entry_bytes):  # type: ignore[no-untyped-def]
    prefetch(home_address(state, table, key * GOLDEN, entry_bytes))


@inlined
def prefetch_run(state, table, key, entry_bytes):  # type: ignore[no-untyped-def]
    """For what looks beyond the key's entry: until the next empty one."""
    address = home_address(state, table, key * GOLDEN, entry_bytes)
    prefetch(address)
    prefetch(address + 64)
    prefetch(address + 128)


@inlined
def claim(state, table, address, entry_bytes):  # type: ignore[no-untyped-def]
    """Count the entry just written at ``address``, which was empty."""
    state[table + USED] += 1
    crowded = CROWDED_ENTRIES * entry_bytes
    in_new = state[table + END] - crowded <= address < state[table + END]
    if in_new or state[table + OLD_END] - crowded <= address < state[table + OLD_END]:
        state[table + CROWDED] = 1


@inlined
def copy_entry(source, target, entry_bytes):  # type: ignore[no-untyped-def]
    save64(target, load64(source))
    save64(target + 8, load64(source + 8))
    if entry_bytes == NODE_BYTES:
        save32(target + 16, load32(source + 16))
    elif entry_bytes == TRIPLE_BYTES:
        save64(target + 16, load64(source + 16))


@inlined
def erase(state, table, address, entry_bytes):  # type: ignore[no-untyped-def]
    """Remove the entry at ``address`` and close the gap it leaves in its cluster."""
    entries, capacity = state[table + ENTRIES], state[table + CAPACITY]
    swept = entries + state[table + SWEPT] * entry_bytes
    if address < entries or address >= state[table + END]:
        entries, capacity = state[table + OLD_ENTRIES], state[table + OLD_CAPACITY]
    hole = address
    address += entry_bytes
    while load64(address + 8) != ZERO:
        if entries + home_of_mixed(load64(address) * GOLDEN, capacity) * entry_bytes <= hole:
            copy_entry(address, hole, entry_bytes)
            if hole < swept <= address:  # it was not swept yet and slipped below the cursor
                state[table + SWEPT] = (hole - entries) // entry_bytes
                swept = hole
            hole = address
        address += entry_bytes
    save64(hole + 8, ZERO)
    state[table + USED] -= 1


@inlined
def table_room(state, table):  # type: ignore[no-untyped-def]
    """Entries that may still be added before the table must grow."""
    if state[table + CROWDED] != 0:
        return np.int64(0)
    percent = LINKS_PERCENT if table == LINKS else USUAL_PERCENT
    return state[table + CAPACITY] * percent // 100 - state[table + USED]


@inlined
def place_entry(entries, capacity, source, entry_bytes):  # type: ignore[no-untyped-def]
    """Copy an entry from elsewhere to where it belongs; returns its new address."""
    target = entries + home_of_mixed(load64(source) * GOLDEN, capacity) * entry_bytes
    while load64(target + 8) != ZERO:
        target += entry_bytes
    copy_entry(source, target, entry_bytes)
    return target


@inlined
def note_highest(state, table, address, entry_bytes):  # type: ignore[no-untyped-def]
    if address >= state[table + END] - CROWDED_ENTRIES * entry_bytes:
        state[table + CROWDED] = 1


@inlined
def move_entries(state, table, positions, entry_bytes):  # type: ignore[no-untyped-def]
    """See migrate. It pauses only at an empty position, so that no cluster is torn apart."""
    old, cursor = state[table + OLD_ENTRIES], state[table + CURSOR]
    entries, capacity = state[table + ENTRIES], state[table + CAPACITY]
    last = (state[table + OLD_END] - old) // entry_bytes
    highest = np.int64(0)
    while cursor < last:
        source = old + cursor * entry_bytes
        if load64(source + 8) != ZERO:
            highest = max(highest, place_entry(entries, capacity, source, entry_bytes))
        elif positions <= 0:
            break
        cursor += 1
        positions -= 1
    note_highest(state, table, highest, entry_bytes)
    state[table + CURSOR] = cursor
    return last - cursor


@kernel(_STATE, _INT, _INT)
def migrate(address, table, positions):  # type: ignore[no-untyped-def]
    """Move about ``positions`` positions to the new arrays; return how many are left."""
    state = words_at(address)
    if table == NODES:
        left = move_entries(state, NODES, positions, NODE_BYTES)
    elif table in (FANOUT, GAPS):
        left = move_entries(state, table, positions, TRIPLE_BYTES)
    else:
        left = move_entries(state, table, positions, PAIR_BYTES)
    if left == 0:
        state[table + OLD_ENTRIES] = state[table + OLD_END] = 0
        state[MOVING] -= 1
    return left


@kernel(_STATE, _INT, _INT)
def unused_from(address, table, alignment):  # type: ignore[no-untyped-def]
    """A multiple of ``alignment`` into a moving table's new arrays, from which on they are still untouched.

    Returns its address. Nothing lies behind an empty entry that all keys moved so far are homed before.
    """
    state = words_at(address)
    entries, entry_bytes = state[table + ENTRIES], np.int64(PAIR_BYTES)
    if table == NODES:
        entry_bytes = np.int64(NODE_BYTES)
    elif table in (FANOUT, GAPS):
        entry_bytes = np.int64(TRIPLE_BYTES)
    highest_home = (state[table + CURSOR] * state[table + CAPACITY]) // state[table + OLD_CAPACITY] + 2
    offset = (highest_home * entry_bytes // alignment + 1) * alignment
    while entries + offset < state[table + END]:
        before = entries + (offset - 1) // entry_bytes * entry_bytes  # may reach beyond the boundary
        if load64(before + 8) == ZERO:
            break
        offset += alignment
    return entries + offset


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
    erase(state, SETS, find(state, SETS, load64(record + ZOBRIST), PAIR_BYTES), PAIR_BYTES)
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
    entry = find(state, SETS, hash_of_set, PAIR_BYTES)
    save64(entry, hash_of_set)
    save64(entry + 8, u64(set_id))
    claim(state, SETS, entry, PAIR_BYTES)
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
    known = np.int64(load64(find(state, SETS, hash_of_set, PAIR_BYTES) + 8))
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
    known = np.int64(load64(find(state, SETS, hash_of_set, PAIR_BYTES) + 8))
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


# --- nodes and places --------------------------------------------------------------------------------


@inlined
def set_of(entry):  # type: ignore[no-untyped-def]
    return np.int64(load64(entry + 8) & SET_ID_BITS)


@inlined
def write_set(entry, set_id):  # type: ignore[no-untyped-def]
    save64(entry + 8, (load64(entry + 8) & ~SET_ID_BITS) | u64(set_id))


@inlined
def depth_of(entry):  # type: ignore[no-untyped-def]
    return (load64(entry + 8) >> DEPTH_SHIFT) & DEPTH_BITS


@inlined
def name_of(key):  # type: ignore[no-untyped-def]
    return (key * GOLDEN) >> NAME_SHIFT


@inlined
def parent_of(entry):  # type: ignore[no-untyped-def]
    """Name of a node's parent, 0 for a root."""
    high = (u64(load32(entry + 16)) & LOW_32) >> u64(2)
    return (load64(entry + 8) >> PARENT_SHIFT) | (high << u64(16))


@inlined
def age_of(entry):  # type: ignore[no-untyped-def]
    return load32(entry + 16) & 3


@inlined
def write_age(entry, age):  # type: ignore[no-untyped-def]
    save32(entry + 16, (load32(entry + 16) & ~3) | age)


@inlined
def write_node(entry, set_id, depth, parent):  # type: ignore[no-untyped-def]
    save64(entry + 8, u64(set_id) | (depth << DEPTH_SHIFT) | (parent << PARENT_SHIFT))
    save32(entry + 16, np.int64((parent >> u64(16)) << u64(2)))


@inlined
def place_of(name, depth):  # type: ignore[no-untyped-def]
    return (name << NAME_SHIFT) | (depth & PLACE_DEPTH_BITS)


@inlined
def node_at(state, place):  # type: ignore[no-untyped-def]
    """Address of the node at a place, 0 when there is none."""
    address = home_address(state, NODES, (place >> NAME_SHIFT) << NAME_SHIFT, NODE_BYTES)
    while load64(address + 8) != ZERO:
        depth = depth_of(address)
        if depth != UNKNOWN_DEPTH and place_of(name_of(load64(address)), depth) == place:
            return address
        address += NODE_BYTES
    return np.int64(0)


@inlined
def room(state):  # type: ignore[no-untyped-def]
    """Blocks that can surely be stored before something must grow."""
    least = min(table_room(state, NODES), table_room(state, LINKS))
    least = min(least, min(table_room(state, COPIES), state[MAX_BLOCKS] - state[NODES + USED]))
    return max(min(least, removal_room(state)), 0)


@inlined
def removal_room(state):  # type: ignore[no-untyped-def]
    """Blocks that can surely be removed before something must grow."""
    least = min(table_room(state, FANOUT), table_room(state, GAPS), table_room(state, ANCHORS)) // 3
    least = min(least, table_room(state, SETS))
    for pool in (SET_POOL, SMALL_POOL, BITS_POOL):
        least = min(least, state[pool + POOL_CAPACITY] - state[pool + LIVE] - 2)
    if state[MOVING] != 0:
        least = min(least, MOVING_ROOM)
    return max(least, 0)


@inlined
def copy_key(key, slot):  # type: ignore[no-untyped-def]
    return mix(key + zobrist(slot))


@inlined
def add_copy(state, key, slot):  # type: ignore[no-untyped-def]
    mixed = copy_key(key, slot)
    entry = find(state, COPIES, mixed, PAIR_BYTES)
    value = load64(entry + 8)
    if value == ZERO:
        save64(entry, mixed)
        save64(entry + 8, (u64(slot) << u64(32)) | ONE)
        claim(state, COPIES, entry, PAIR_BYTES)
    elif (value & LOW_32) < u64(MAX_EXTRA_COPIES):
        save64(entry + 8, value + ONE)


@inlined
def drop_copy(state, key, slot):  # type: ignore[no-untyped-def]
    """Whether one of several copies went, so that the residency stays."""
    if state[COPIES + USED] == 0:
        return False
    entry = find(state, COPIES, copy_key(key, slot), PAIR_BYTES)
    value = load64(entry + 8)
    if value == ZERO:
        return False
    if value & LOW_32 == ONE:
        erase(state, COPIES, entry, PAIR_BYTES)
    else:
        save64(entry + 8, value - ONE)
    return True


@inlined
def drop_copies(state, key, slot):  # type: ignore[no-untyped-def]
    """Forget how many copies there are, so that the next removal takes the block away."""
    if state[COPIES + USED] != 0:
        entry = find(state, COPIES, copy_key(key, slot), PAIR_BYTES)
        if load64(entry + 8) != ZERO:
            erase(state, COPIES, entry, PAIR_BYTES)


@inlined
def link(state, engine_key, key):  # type: ignore[no-untyped-def]
    if key == ZERO:  # indistinguishable from an empty entry
        return
    entry = find(state, LINKS, engine_key, PAIR_BYTES)
    empty = load64(entry + 8) == ZERO
    save64(entry + 8, key)
    if empty:
        save64(entry, engine_key)
        claim(state, LINKS, entry, PAIR_BYTES)


# --- gaps --------------------------------------------------------------------------------------------
#
# Children of a place that a slot has: FANOUT has the number, unless it is 1 and the slot has the block at
# the place, or 0 and it does not.


@inlined
def fanout_entry(state, place, slot):  # type: ignore[no-untyped-def]
    return find(state, FANOUT, mix(place + zobrist(slot)), TRIPLE_BYTES)


@inlined
def count_gaps_of_slot(state, slot, change):  # type: ignore[no-untyped-def]
    address = state[SLOT_GAPS] + 8 * slot
    save64(address, u64(np.int64(load64(address)) + change))


@inlined
def write_fanout(state, entry, place, slot, held, count):  # type: ignore[no-untyped-def]
    """``held``: whether the slot has the block at the place."""
    value = load64(entry + 8)
    if value != ZERO and (value & HELD) == ZERO:
        count_gaps_of_slot(state, slot, -1)
    if count == (1 if held else 0):
        if value != ZERO:
            erase(state, FANOUT, entry, TRIPLE_BYTES)
        return
    save64(entry + 8, (u64(slot) << u64(32)) | u64(count) | (HELD if held else ZERO))
    if not held:
        count_gaps_of_slot(state, slot, 1)
    if value == ZERO:
        save64(entry, mix(place + zobrist(slot)))
        save64(entry + 16, place)
        claim(state, FANOUT, entry, TRIPLE_BYTES)


@inlined
def count_in(state, table, key, change):  # type: ignore[no-untyped-def]
    """Change the count kept for a key in ANCHORS; one that is 0 is not written down."""
    entry = find(state, table, key, PAIR_BYTES)
    count = np.int64(load64(entry + 8)) + change
    if count <= 0:
        if load64(entry + 8) != ZERO:
            erase(state, table, entry, PAIR_BYTES)
        return
    empty = load64(entry + 8) == ZERO
    save64(entry + 8, u64(count))
    if empty:
        save64(entry, key)
        claim(state, table, entry, PAIR_BYTES)


@outlined
def anchor_of(state, place, depth):  # type: ignore[no-untyped-def]
    """The place that begins the stretch of a place, on the way to the root; 0 when the way is not known."""
    first = place
    anchor = ZERO
    while True:
        if u64(state[ANCHORED_PLACE]) == place and state[LAST_ANCHOR] != 0 and depth % u64(STRETCH) != ZERO:
            anchor = u64(state[LAST_ANCHOR])
            break
        if depth % u64(STRETCH) == ZERO:
            anchor = place
            break
        entry = node_at(state, place)
        if entry == 0:
            return ZERO
        depth -= ONE
        place = place_of(parent_of(entry), depth)
    state[ANCHORED_PLACE] = np.int64(first)
    state[LAST_ANCHOR] = np.int64(anchor)
    return anchor


@inlined
def register_gap(state, anchor, depth, change):  # type: ignore[no-untyped-def]
    """Let next_gap see a gap, or not any more."""
    if anchor != ZERO:
        count_in(state, ANCHORS, anchor, change)
        return
    depth &= u64(GAP_DEPTH_BITS)
    gaps = state[GAP_DEPTHS] + 4 * np.int64(depth)
    save32(gaps, load32(gaps) + change)
    if load32(gaps) > 0:
        set_bit(state[GAP_BITS], np.int64(depth))
    else:
        clear_bit(state[GAP_BITS], np.int64(depth))


@outlined
def change_gap(state, place, depth, change):  # type: ignore[no-untyped-def]
    """Count (slot, child) pairs more or less that lack the place."""
    entry = find(state, GAPS, place, TRIPLE_BYTES)
    value = load64(entry + 8)
    count = np.int64(value & LOW_32) + change
    if count <= 0:
        if value != ZERO:
            register_gap(state, load64(entry + 16), value >> u64(32), -1)
            erase(state, GAPS, entry, TRIPLE_BYTES)
    elif value != ZERO:
        save64(entry + 8, (value & ~LOW_32) | u64(count))
    else:
        anchor = anchor_of(state, place, depth)
        save64(entry, place)
        save64(entry + 8, (depth << u64(32)) | u64(count))
        save64(entry + 16, anchor)
        claim(state, GAPS, entry, TRIPLE_BYTES)
        register_gap(state, anchor, depth, 1)


@outlined
def gain_child(state, slot, place, depth, held):  # type: ignore[no-untyped-def]
    """The slot got a child of the place; ``depth`` is that of the place."""
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    count = np.int64(1) if held else np.int64(0)
    if value != ZERO:
        count = np.int64(value & COUNT_BITS)
    if not held:
        change_gap(state, place, depth, 1)
    write_fanout(state, entry, place, slot, held, count + 1)


@inlined
def settle_leaf(state, slot):  # type: ignore[no-untyped-def]
    """Write down the leaf that waits, if any."""
    if state[LEAF_WAITS] != 0:
        state[LEAF_WAITS] = 0
        place = u64(state[LEAF_PLACE])
        write_fanout(state, fanout_entry(state, place, slot), place, slot, True, 0)


@inlined
def leaf_waits_at(state, place):  # type: ignore[no-untyped-def]
    return state[LEAF_WAITS] != 0 and u64(state[LEAF_PLACE]) == place


@outlined
def lose_child(state, slot, place, depth):  # type: ignore[no-untyped-def]
    """The slot lost a child of the place."""
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    if value == ZERO:  # it has the place, which is a leaf now: chains are mostly removed from their end
        settle_leaf(state, slot)
        state[LEAF_WAITS] = 1
        state[LEAF_PLACE] = np.int64(place)
        return
    held = (value & HELD) != ZERO
    if not held:
        change_gap(state, place, depth, -1)
    count = np.int64(value & COUNT_BITS)
    if count > 0:
        write_fanout(state, entry, place, slot, held, count - 1)


@outlined
def gain_place(state, slot, place, depth):  # type: ignore[no-untyped-def]
    """The slot got the block at the place; returns how many children of it it has."""
    if load64(state[SLOT_GAPS] + 8 * slot) == ZERO:
        return np.int64(0)
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    if value == ZERO:
        return np.int64(0)
    count = np.int64(value & COUNT_BITS)
    change_gap(state, place, depth, -count)
    write_fanout(state, entry, place, slot, True, count)
    return count


@outlined
def lose_place(state, slot, place, depth):  # type: ignore[no-untyped-def]
    """The slot lost the block at the place."""
    if leaf_waits_at(state, place):
        state[LEAF_WAITS] = 0
        return
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    count = np.int64(1) if value == ZERO else np.int64(value & COUNT_BITS)
    if count > 0:
        change_gap(state, place, depth, count)
    write_fanout(state, entry, place, slot, False, count)


@inlined
def lose_block(state, slot, entry):  # type: ignore[no-untyped-def]
    """Account for a node that leaves the slot, as far as its depth is known."""
    depth = depth_of(entry)
    if depth == UNKNOWN_DEPTH:
        return
    lose_place(state, slot, place_of(name_of(load64(entry)), depth), depth)
    if depth > ZERO:
        lose_child(state, slot, place_of(parent_of(entry), depth - ONE), depth - ONE)


@inlined
def has_place(state, place, slot):  # type: ignore[no-untyped-def]
    entry = node_at(state, place)
    return entry != 0 and contains(state, set_of(entry), slot)


@inlined
def next_member(state, set_id, slot):  # type: ignore[no-untyped-def]
    """The set's first member from ``slot`` on, -1 when there is none."""
    if set_id >= SINGLE:
        return set_id - SINGLE if set_id - SINGLE >= slot else np.int64(-1)
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            if load32(row + 4 * i) >= slot:
                return load32(row + 4 * i)
        return np.int64(-1)
    bits = bits_row(state, -1 - storage)
    word_index = slot >> 6
    if word_index >= state[BIT_WORDS]:
        return np.int64(-1)
    word = load64(bits + 8 * word_index) & (~ZERO << u64(slot & 63))
    while word == ZERO:
        word_index += 1
        if word_index >= state[BIT_WORDS]:
            return np.int64(-1)
        word = load64(bits + 8 * word_index)
    return word_index * 64 + trailing_zeros(word)


@inlined
def is_live(state, slot):  # type: ignore[no-untyped-def]
    return load32(state[SLOT_HOLDER] + 4 * slot) >= 0


@outlined
def rewrite_place(state, entry, depth, parent, above):  # type: ignore[no-untyped-def]
    """Correct a node's depth and parent; ``above`` is the parent's set. All its holders are accounted anew."""
    set_id = set_of(entry)
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0:
        if is_live(state, slot):
            lose_block(state, slot, entry)
            settle_leaf(state, slot)
        slot = next_member(state, set_id, slot + 1)
    age = age_of(entry)
    write_node(entry, set_id, depth, parent)
    write_age(entry, age)
    place = place_of(name_of(load64(entry)), depth)
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0:
        if is_live(state, slot):
            if gain_place(state, slot, place, depth) == 0:
                write_fanout(state, fanout_entry(state, place, slot), place, slot, True, 0)
            if depth > ZERO:
                held = above != 0 and contains(state, above, slot)
                gain_child(state, slot, place_of(parent, depth - ONE), depth - ONE, held)
        slot = next_member(state, set_id, slot + 1)


@inlined
def has_room_to_rewrite(state, set_id):  # type: ignore[no-untyped-def]
    state[WANTED] = 0
    wanted = 4 * members_of(state, set_id) + 16
    if min(table_room(state, FANOUT), table_room(state, GAPS), table_room(state, ANCHORS)) >= wanted:
        return True
    state[WANTED] = wanted
    return False


# --- store and remove --------------------------------------------------------------------------------


@kernel(_STATE, _INT, _IN_U64, _IN_U64, _WORD, _WORD, _INT)
def store(address, slot, hashes, engine_keys, domain, parent, start):  # type: ignore[no-untyped-def]
    """Give ``slot`` the blocks of one chain from position ``start`` on; return the position reached.

    ``engine_keys``, one per block or none, are linked to the blocks. A block that the slot already has
    gains a copy. Of a node that two callers place differently the deeper place counts. Blocks whose
    beginning had to be dropped meanwhile for want of room are dropped as well.
    """
    state = words_at(address)
    stop = min(hashes.shape[0], start + room(state))
    linked = engine_keys.shape[0] > 0
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_run(state, NODES, hashes[i] ^ domain, NODE_BYTES)
        if linked:
            prefetch_run(state, LINKS, engine_keys[i], PAIR_BYTES)
    if start > 0:
        parent = hashes[start - 1]
    depth, above, above_name, above_place = ZERO, np.int64(0), ZERO, ZERO  # above: the set before the block
    above_held = False
    if parent != ZERO:
        depth = UNKNOWN_DEPTH
        above_name = name_of(parent ^ domain)
        entry = find(state, NODES, parent ^ domain, NODE_BYTES)
        if load64(entry + 8) != ZERO:
            above = set_of(entry)
            above_held = contains(state, above, slot)
            depth = depth_of(entry)
            above_place = place_of(above_name, depth)
            if depth != UNKNOWN_DEPTH:
                depth += ONE
        elif start > 0:
            state[DROPPED] += hashes.shape[0] - start
            return hashes.shape[0]
    before = np.int64(0)  # the last transition: set `before` with the slot is set `after`
    after = np.int64(0)
    added = 0
    last = np.int64(0)
    state[LEAF_WAITS] = 0
    position = start
    while position < stop:
        if position + PREFETCH_AHEAD < stop:
            prefetch_run(state, NODES, hashes[position + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
            if linked:
                prefetch_run(state, LINKS, engine_keys[position + PREFETCH_AHEAD], PAIR_BYTES)
        key = hashes[position] ^ domain
        entry = find(state, NODES, key, NODE_BYTES)
        value = load64(entry + 8)
        set_id = np.int64(value & SET_ID_BITS)
        fits = True
        if value == ZERO:
            save64(entry, key)
            write_node(entry, SINGLE + slot, depth, above_name)
            claim(state, NODES, entry, NODE_BYTES)
            gained = True
        else:
            fits = depth_of(entry) == depth and parent_of(entry) == above_name
            if not fits and depth != UNKNOWN_DEPTH:
                recorded = depth_of(entry)
                if recorded == UNKNOWN_DEPTH or recorded < depth:
                    if not has_room_to_rewrite(state, set_id):
                        break
                    settle_leaf(state, slot)
                    rewrite_place(state, entry, depth, above_name, above)
                    fits = True
            gained = set_id == before or not contains(state, set_id, slot)
            if not gained:
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
        depth = depth_of(entry)
        name = name_of(key)
        place = place_of(name, depth)
        if gained:
            added += 1
            if depth != UNKNOWN_DEPTH:
                if depth > ZERO:
                    if not fits:
                        settle_leaf(state, slot)
                        above_place = place_of(parent_of(entry), depth - ONE)
                        above_held = has_place(state, above_place, slot)
                    if state[LEAF_WAITS] != 0 and above_held:
                        state[LEAF_WAITS] = 0
                    else:
                        gain_child(state, slot, above_place, depth - ONE, above_held)
                settle_leaf(state, slot)
                if gain_place(state, slot, place, depth) == 0:
                    state[LEAF_WAITS] = 1
                    state[LEAF_PLACE] = np.int64(place)
        settle = not gained or depth == UNKNOWN_DEPTH
        if settle:
            settle_leaf(state, slot)
        if linked:
            link(state, engine_keys[position], key)
        above, above_name, above_place, above_held = set_of(entry), name, place, True
        if depth != UNKNOWN_DEPTH:
            depth += ONE
        last = entry
        position += 1
    if last != 0:
        write_age(last, 1)
    settle_leaf(state, slot)
    release(state, before)
    release(state, after)
    blocks = state[SLOT_BLOCKS] + slot * 8
    save64(blocks, load64(blocks) + u64(added))
    return max(start, position)


@inlined
def leave_node(state, slot, entry):  # type: ignore[no-untyped-def]
    """Take a node from a slot that has it; whether the node is gone."""
    lose_block(state, slot, entry)
    blocks = state[SLOT_BLOCKS] + slot * 8
    save64(blocks, load64(blocks) - ONE)
    set_id = set_of(entry)
    target = without_slot(state, set_id, slot)
    if target == 0:
        erase(state, NODES, entry, NODE_BYTES)
        return True
    retain(state, target)
    write_set(entry, target)
    release(state, set_id)
    return False


@inlined
def take(state, slot, key):  # type: ignore[no-untyped-def]
    """Take one copy of a block from a slot. 0: it had none, 1: it had, 2: and the node is gone."""
    entry = find(state, NODES, key, NODE_BYTES)
    if load64(entry + 8) == ZERO:
        return 2
    if not contains(state, set_of(entry), slot):
        return 0
    if drop_copy(state, key, slot):
        return 1
    return 2 if leave_node(state, slot, entry) else 1


@kernel(_STATE, _INT, _IN_U64, _WORD, _INT)
def remove(address, slot, hashes, domain, start):  # type: ignore[no-untyped-def]
    """Take one copy of each block from ``slot``; return the position reached."""
    state = words_at(address)
    state[LEAF_WAITS] = 0
    stop = min(hashes.shape[0], start + removal_room(state))
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_run(state, NODES, hashes[i] ^ domain, NODE_BYTES)
    for i in range(start, stop):
        if i + PREFETCH_AHEAD < stop:
            prefetch_run(state, NODES, hashes[i + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        take(state, slot, hashes[i] ^ domain)
    settle_leaf(state, slot)
    return max(start, stop)


@inlined
def prefetch_linked(state, engine_key):  # type: ignore[no-untyped-def]
    key = load64(find(state, LINKS, engine_key, PAIR_BYTES) + 8)
    prefetch_run(state, NODES, key, NODE_BYTES)


@kernel(_STATE, _INT, _IN_U64, _INT)
def remove_linked(address, slot, engine_keys, start):  # type: ignore[no-untyped-def]
    """Like remove, by engine keys; links of nodes that are gone are dropped.

    Returns the position reached and how many engine keys were unknown.
    """
    state = words_at(address)
    state[LEAF_WAITS] = 0
    stop = min(engine_keys.shape[0], start + removal_room(state))
    unknown = 0
    for i in range(start, min(stop, start + 2 * PREFETCH_AHEAD)):
        prefetch_run(state, LINKS, engine_keys[i], PAIR_BYTES)
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_linked(state, engine_keys[i])
    for i in range(start, stop):
        if i + 2 * PREFETCH_AHEAD < stop:
            prefetch_run(state, LINKS, engine_keys[i + 2 * PREFETCH_AHEAD], PAIR_BYTES)
        if i + PREFETCH_AHEAD < stop:
            prefetch_linked(state, engine_keys[i + PREFETCH_AHEAD])
        entry = find(state, LINKS, engine_keys[i], PAIR_BYTES)
        key = load64(entry + 8)
        if key == ZERO:
            unknown += 1
        elif take(state, slot, key) == 2:
            erase(state, LINKS, entry, PAIR_BYTES)
    settle_leaf(state, slot)
    return max(start, stop), unknown


@kernel(_STATE, _WORD)
def resolve(address, engine_key):  # type: ignore[no-untyped-def]
    """The node key linked to an engine key, 0 when there is none."""
    state = words_at(address)
    return load64(find(state, LINKS, engine_key, PAIR_BYTES) + 8)


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


@inlined
def gap_in_stretch(state, hashes, domain, first, position, stop, word):  # type: ignore[no-untyped-def]
    """The first position from ``position`` on that is in ``word`` and at a gap, else ``stop``."""
    while position < stop and word != ZERO:
        skipped = trailing_zeros(word)
        position += skipped
        if position >= stop:
            break
        place = place_of(name_of(hashes[position] ^ domain), u64(first + position))
        if load64(find(state, GAPS, place, TRIPLE_BYTES) + 8) != ZERO:
            return position
        position += 1
        word = (word >> u64(skipped)) >> ONE
    return stop


@inlined
def next_gap(state, hashes, domain, first, position, stop):  # type: ignore[no-untyped-def]
    """The first position from ``position`` on, below ``stop``, that is at a gap; else ``stop``.

    ``first`` is the depth at position 0. A stretch of depths is passed at once if no gap has its anchor
    and none without an anchor has one of its depths.
    """
    if state[GAPS + USED] == 0:
        return stop
    while position < stop:
        depth = first + position
        stretch = depth // STRETCH * STRETCH
        word = load64(state[GAP_BITS] + 8 * ((depth & GAP_DEPTH_BITS) >> 6))
        anchor = stretch - first
        if anchor < 0:
            word = ~ZERO
        else:
            if anchor + 4 * STRETCH < stop:
                ahead = name_of(hashes[anchor + 4 * STRETCH] ^ domain)
                prefetch_entry(state, ANCHORS, place_of(ahead, u64(stretch + 4 * STRETCH)), PAIR_BYTES)
            place = place_of(name_of(hashes[anchor] ^ domain), u64(stretch))
            if load64(find(state, ANCHORS, place, PAIR_BYTES) + 8) != ZERO:
                word = ~ZERO
        end = min(stretch + STRETCH - first, stop)
        word >>= u64(depth - stretch)
        if word != ZERO:
            found = gap_in_stretch(state, hashes, domain, first, position, end, word)
            if found < end:
                return found
        position = end
    return stop


@inlined
def entry_at(state, hashes, domain, position):  # type: ignore[no-untyped-def]
    return find(state, NODES, hashes[position] ^ domain, NODE_BYTES)


@inlined
def fits_at(entry, depth):  # type: ignore[no-untyped-def]
    """Whether the node is known to lie at ``depth``."""
    recorded = depth_of(entry)
    return recorded == u64(depth) and recorded != UNKNOWN_DEPTH


@inlined
def step_through(state, hashes, domain, low, low_set, high, levels, alive):  # type: ignore[no-untyped-def]
    """Like halve, looking at each position."""
    while low < high and alive > 0:
        if low + PREFETCH_AHEAD < high:
            prefetch_entry(state, NODES, hashes[low + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        following = set_of(entry_at(state, hashes, domain, low + 1))
        if following == 0:
            return np.int64(0), low
        if following != low_set:
            alive -= change_set(state, low_set, following, low + 1, levels)
            if alive == 0:
                return alive, low
        low_set = following
        low += 1
    return alive, low


@outlined
def halve(state, hashes, domain, first, spans, levels, alive):  # type: ignore[no-untyped-def]
    """Handle in order all changes of the set within the span in ``spans[0:4]``.

    A span is (first position, its set, last position, its set), with sets that only shrink in between;
    ``first`` is the depth at position 0. Returns the holders still alive (0 also where nothing follows)
    and the last position that holders had.
    """
    top = 4
    position = spans[0]
    while top > 0 and alive > 0:
        top -= 4
        low, low_set, high, high_set = spans[top], spans[top + 1], spans[top + 2], spans[top + 3]
        position = low
        if low_set == high_set:
            position = high
            continue
        if high - low == 1:
            if high_set == 0:
                return np.int64(0), low
            alive -= change_set(state, low_set, high_set, high, levels)
            if alive > 0:
                position = high
            continue
        middle = (low + high) >> 1
        prefetch_entry(state, NODES, hashes[(low + middle) >> 1] ^ domain, NODE_BYTES)
        prefetch_entry(state, NODES, hashes[(middle + high) >> 1] ^ domain, NODE_BYTES)
        entry = entry_at(state, hashes, domain, middle)
        middle_set = set_of(entry)
        if middle_set != 0 and not fits_at(entry, first + middle):
            alive, position = step_through(state, hashes, domain, low, low_set, high, levels, alive)
            continue
        if middle_set != 0:  # otherwise nothing lives behind it
            spans[top], spans[top + 1], spans[top + 2], spans[top + 3] = middle, middle_set, high, high_set
            top += 4
        spans[top], spans[top + 1], spans[top + 2], spans[top + 3] = low, low_set, middle, middle_set
        top += 4
    return alive, position


@inlined
def warm_up(state, entry):  # type: ignore[no-untyped-def]
    """Count a match that ended at the node: for the eviction and for hot_prefixes."""
    write_age(entry, MAX_AGE)
    key = load64(entry)
    row = state[HEAT] + np.int64((key * GOLDEN) >> u64(64 - HEAT_ROW_BITS)) * (16 * HEAT_WAYS)
    least = row
    for way in range(HEAT_WAYS):
        address = row + 16 * way
        if load64(address) == key:
            save64(address + 8, load64(address + 8) + ONE)
            return
        if load64(address + 8) < load64(least + 8):
            least = address
    count = load64(least + 8)
    if count > ZERO:  # a rare key wears an established one down before it takes the place
        save64(least + 8, count - ONE)
    else:
        save64(least, key)
        save64(least + 8, ONE)


@inlined
def cool_down(state):  # type: ignore[no-untyped-def]
    state[MATCHES] += 1
    if state[MATCHES] >= HEAT_HALVING:
        state[MATCHES] = 0
        for i in range(HEAT_WAYS << HEAT_ROW_BITS):
            address = state[HEAT] + 16 * i + 8
            save64(address, load64(address) >> ONE)


@inlined
def follow(state, hashes, domain, entry, alive, levels, spans):  # type: ignore[no-untyped-def]
    """Walk along the prompt from the first block's ``entry`` while holders are alive.

    Jumps double as long as they meet no gap. A position at a gap, and CAREFUL positions before a node that
    is recorded at another depth, are passed one by one. Returns the last position that holders had.
    """
    last = hashes.shape[0] - 1
    position, jump = np.int64(0), np.int64(1)
    position_set, depth = set_of(entry), np.int64(depth_of(entry))
    first = depth  # at position 0, if each block lies one deeper than the one before
    clear_to = np.int64(0)  # no gap from the present position up to here
    careful_to = np.int64(0)
    while position < last and alive > 0:
        target = min(position + jump, last)
        if position < careful_to or depth == UNKNOWN:
            target = position + 1
            ahead = min(position + PREFETCH_AHEAD, last)
            prefetch_entry(state, NODES, hashes[ahead] ^ domain, NODE_BYTES)
        elif target > max(clear_to, position + 1):
            clear_to = next_gap(state, hashes, domain, first, max(position, clear_to), target)
            target = max(clear_to, position + 1)
        entry = entry_at(state, hashes, domain, target)
        target_set = set_of(entry)
        if target > position + 1 and target_set != 0 and not fits_at(entry, first + target):
            careful_to = position + CAREFUL
            continue
        if target_set == position_set:
            position = target
        else:
            spans[0], spans[1], spans[2], spans[3] = position, position_set, target, target_set
            alive, position = halve(state, hashes, domain, first, spans, levels, alive)
        position_set, depth = target_set, np.int64(depth_of(entry))
        if depth != first + position:
            first, clear_to, jump = depth - position, position, np.int64(1)
        jump = min(2 * jump, last)
    return position


@inlined
def write_survivors(state, listed, depth, levels):  # type: ignore[no-untyped-def]
    """Give ``depth`` to the levels that are still alive, and leave NEED as it was."""
    both = (u64(depth) << u64(32)) | u64(depth)
    for i in range(listed):
        row = load32(state[ALIVE] + 4 * i)
        need = state[NEED] + 4 * row
        level = load32(need)
        target = levels + 4 * TIERS * row
        if level == 0:
            save64(target, both)
            save64(target + 8, both)
            save32(target + 16, depth)
        else:
            for each in range(level, TIERS):
                save32(target + 4 * each, depth)
        save32(need, TIERS)


@kernel(_STATE, _IN_U64, _WORD, _OUT_I32, nogil=False)
def match(address, hashes, domain, levels):  # type: ignore[no-untyped-def]
    """Contiguous prefix in blocks per (holder row, tier level) into ``levels``, which must be zero.

    Returns the number of blocks that some holder has. Keeps the GIL: waiting for it afterwards would take
    longer than the kernel.
    """
    state = words_at(address)
    total = hashes.shape[0]
    if total == 0:
        return 0
    entry = entry_at(state, hashes, domain, 0)
    if load64(entry + 8) == ZERO:
        return 0
    ahead = 1
    while ahead < total:
        prefetch_entry(state, NODES, hashes[ahead] ^ domain, NODE_BYTES)
        ahead = 2 * ahead + 1
    prefetch_entry(state, NODES, hashes[total - 1] ^ domain, NODE_BYTES)
    listed = start_set(state, set_of(entry))
    if listed == 0:
        return 0
    spans = np.empty(4 * 64, np.int64)
    position = follow(state, hashes, domain, entry, listed, levels.ctypes.data, words_at(spans.ctypes.data))
    depth = position + 1
    write_survivors(state, listed, depth, levels.ctypes.data)
    warm_up(state, entry_at(state, hashes, domain, position))
    cool_down(state)
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
    """Take retired slots out of the next positions of NODES; return how many positions are left.

    NODES must not be moving, here and below.
    """
    state = words_at(address)
    positions_of_table = (state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES
    while state[NODES + SWEPT] < positions_of_table and positions > 0 and removal_room(state) > 2:
        entry = state[NODES + ENTRIES] + state[NODES + SWEPT] * NODE_BYTES
        positions -= 1
        if load64(entry + 8) != ZERO:
            set_id = set_of(entry)
            if dead_member(state, set_id) >= 0:
                target = without_dead(state, set_id)
                release(state, set_id)
                if target == 0:
                    erase(state, NODES, entry, NODE_BYTES)
                    continue  # another entry may have moved here
                write_set(entry, target)
        state[NODES + SWEPT] += 1
    return positions_of_table - state[NODES + SWEPT]


@inlined
def sweep_marks(state, table, positions, entry_bytes):  # type: ignore[no-untyped-def]
    positions_of_table = (state[table + END] - state[table + ENTRIES]) // entry_bytes
    while state[table + SWEPT] < positions_of_table and positions > 0:
        entry = state[table + ENTRIES] + state[table + SWEPT] * entry_bytes
        positions -= 1
        value = load64(entry + 8)
        if value != ZERO and has_bit(state[DEAD_BITS], np.int64(value >> u64(32))):
            if table == FANOUT and (value & HELD) == ZERO:
                change_gap(state, load64(entry + 16), ZERO, -np.int64(value & COUNT_BITS))
            erase(state, table, entry, entry_bytes)
        else:
            state[table + SWEPT] += 1
    return positions_of_table - state[table + SWEPT]


@kernel(_STATE, _INT)
def sweep_fanout(address, positions):  # type: ignore[no-untyped-def]
    """Drop what FANOUT and GAPS know of retired slots; see sweep."""
    return sweep_marks(words_at(address), FANOUT, positions, TRIPLE_BYTES)


@kernel(_STATE, _INT)
def sweep_copies(address, positions):  # type: ignore[no-untyped-def]
    """Drop the copies of retired slots; see sweep."""
    return sweep_marks(words_at(address), COPIES, positions, PAIR_BYTES)


@kernel(_STATE, _INT)
def sweep_links(address, positions):  # type: ignore[no-untyped-def]
    """Drop links whose node is gone; see sweep."""
    state = words_at(address)
    positions_of_table = (state[LINKS + END] - state[LINKS + ENTRIES]) // PAIR_BYTES
    while state[LINKS + SWEPT] < positions_of_table and positions > 0:
        entry = state[LINKS + ENTRIES] + state[LINKS + SWEPT] * PAIR_BYTES
        ahead = state[LINKS + SWEPT] + PREFETCH_AHEAD
        if ahead < positions_of_table:
            key_ahead = load64(state[LINKS + ENTRIES] + ahead * PAIR_BYTES + 8)
            prefetch_entry(state, NODES, key_ahead, NODE_BYTES)
        positions -= 1
        key = load64(entry + 8)
        if key != ZERO and load64(find(state, NODES, key, NODE_BYTES) + 8) == ZERO:
            erase(state, LINKS, entry, PAIR_BYTES)
        else:
            state[LINKS + SWEPT] += 1
    return positions_of_table - state[LINKS + SWEPT]


# --- eviction ----------------------------------------------------------------------------------------


@inlined
def drop_tail(state, slot, entry, wanted):  # type: ignore[no-untyped-def]
    """Drop a leaf that only ``slot`` has, and what lies above it as long as that is unshared and cold."""
    dropped = 0
    state[LEAF_WAITS] = 0
    while dropped < wanted and removal_room(state) > 2:
        drop_copies(state, load64(entry), slot)
        depth = depth_of(entry)
        above = place_of(parent_of(entry), depth - ONE)
        leave_node(state, slot, entry)
        dropped += 1
        if depth == ZERO or not leaf_waits_at(state, above):
            break
        entry = node_at(state, above)
        if entry == 0 or set_of(entry) != SINGLE + slot or age_of(entry) > 0:
            break
    settle_leaf(state, slot)
    state[DROPPED] += dropped
    return dropped


@inlined
def is_shared_leaf(state, entry, place):  # type: ignore[no-untyped-def]
    """Whether no live holder of the node has a child of it, and there is room to take it from all."""
    set_id = set_of(entry)
    if removal_room(state) <= 2 * members_of(state, set_id) + 2:
        return False
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0:
        if is_live(state, slot):
            value = load64(fanout_entry(state, place, slot) + 8)
            if value == ZERO or (value & COUNT_BITS) != ZERO:
                return False
        slot = next_member(state, set_id, slot + 1)
    return True


@outlined
def drop_node(state, entry):  # type: ignore[no-untyped-def]
    """Take a node from all its holders."""
    set_id = set_of(entry)
    retain(state, set_id)
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0 and load64(entry + 8) != ZERO:
        if is_live(state, slot):
            state[LEAF_WAITS] = 0
            drop_copies(state, load64(entry), slot)
            leave_node(state, slot, entry)
            settle_leaf(state, slot)
            state[DROPPED] += 1
        else:
            target = without_slot(state, set_of(entry), slot)
            retain(state, target)
            release(state, set_of(entry))
            if target == 0:
                erase(state, NODES, entry, NODE_BYTES)
            else:
                write_set(entry, target)
        last = next_member(state, set_id, slot + 1)
        if last < 0:
            break
        slot = last
    release(state, set_id)


@kernel(_STATE, _INT, _INT)
def drop_leaves(address, wanted, shared):  # type: ignore[no-untyped-def]
    """One round over the ends of chains: drop cold ones until ``wanted`` nodes are gone, cool the others.

    ``shared``: not only those with a single holder. Returns how many nodes went. FANOUT must not be
    moving.
    """
    state = words_at(address)
    entries = state[FANOUT + ENTRIES]
    positions_of_table = (state[FANOUT + END] - entries) // TRIPLE_BYTES
    dropped = 0
    left = positions_of_table
    while left > 0 and dropped < wanted and removal_room(state) > 2:
        if state[HAND] >= positions_of_table:
            state[HAND] = 0
        entry = entries + state[HAND] * TRIPLE_BYTES
        value = load64(entry + 8)
        left -= 1
        slot = np.int64(value >> u64(32))
        if (value & LOW_32) == HELD and is_live(state, slot):
            place = load64(entry + 16)
            node = node_at(state, place)
            if node != 0 and age_of(node) > 0:
                write_age(node, age_of(node) - 1)
            elif node != 0 and set_of(node) == SINGLE + slot:
                dropped += drop_tail(state, slot, node, wanted - dropped)
                continue
            elif node != 0 and shared != 0 and is_shared_leaf(state, node, place):
                drop_node(state, node)
                dropped += 1
                continue
        state[HAND] += 1
    return dropped


@kernel(_STATE, _INT, _INT)
def drop_any(address, wanted, start):  # type: ignore[no-untyped-def]
    """Drop up to ``wanted`` nodes whatever they are, from a position of NODES on; return the position.

    NODES must not be moving.
    """
    state = words_at(address)
    positions_of_table = (state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES
    while start < positions_of_table and wanted > 0:
        entry = state[NODES + ENTRIES] + start * NODE_BYTES
        if load64(entry + 8) == ZERO:
            start += 1
            continue
        if removal_room(state) <= 2 * members_of(state, set_of(entry)) + 2:
            break
        drop_node(state, entry)
        wanted -= 1
    return start


# --- views and snapshots -----------------------------------------------------------------------------


@kernel(_STATE, _INT, _OUT_U64)
def keys_of_slot(address, slot, keys):  # type: ignore[no-untyped-def]
    """Write the keys of the slot's blocks to ``keys``; return their number. NODES must not be moving."""
    state = words_at(address)
    count = 0
    for position in range((state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES):
        entry = state[NODES + ENTRIES] + position * NODE_BYTES
        if count == keys.shape[0]:
            break
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
    for position in range(min(positions, state[NODES + CAPACITY])):
        value = load64(state[NODES + ENTRIES] + position * NODE_BYTES + 8)
        if value != ZERO and has_live_member(state, np.int64(value & SET_ID_BITS)):
            depth = np.int64((value >> DEPTH_SHIFT) & DEPTH_BITS)
            counts[min(depth, counts.shape[0] - 1)] += ONE


@inlined
def parent_key(state, entry):  # type: ignore[no-untyped-def]
    """Key of a node's parent, 0 for a root and where the parent is not known."""
    depth = depth_of(entry)
    if depth in (ZERO, UNKNOWN_DEPTH):
        return ZERO
    above = node_at(state, place_of(parent_of(entry), depth - ONE))
    return load64(above) if above != 0 else ZERO


@kernel(_STATE, _INT, _INT, _INT, _OUT_U64)
def nodes_by_depth(address, positions, low, high, nodes):  # type: ignore[no-untyped-def]
    """Collect nodes with low <= depth < high as (key, depth, parent key) triples in ``nodes``.

    Looks at the first ``positions`` of NODES and stops when ``nodes`` is full; returns their number.
    """
    state = words_at(address)
    count = 0
    for position in range(min(positions, state[NODES + CAPACITY])):
        if 3 * count + 3 > nodes.shape[0]:
            break
        entry = state[NODES + ENTRIES] + position * NODE_BYTES
        value = load64(entry + 8)
        depth = np.int64(depth_of(entry))
        if value != ZERO and low <= depth < high and has_live_member(state, set_of(entry)):
            nodes[3 * count] = load64(entry)
            nodes[3 * count + 1] = u64(depth)
            nodes[3 * count + 2] = parent_key(state, entry)
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


@kernel(_STATE, _WORD, _OUT_U64)
def describe_node(address, key, found):  # type: ignore[no-untyped-def]
    """Write depth, parent's key and holder slots of a node to ``found``; return whether there is one."""
    state = words_at(address)
    entry = find(state, NODES, key, NODE_BYTES)
    if load64(entry + 8) == ZERO:
        return 0
    found[0] = depth_of(entry)
    found[1] = parent_key(state, entry)
    found[2] = u64(members_of(state, set_of(entry)))
    return 1


@inlined
def place_all(state, table, source, count, entry_bytes):  # type: ignore[no-untyped-def]
    entries, capacity = state[table + ENTRIES], state[table + CAPACITY]
    for i in range(count):
        address = place_entry(entries, capacity, source + i * entry_bytes, entry_bytes)
        note_highest(state, table, address, entry_bytes)
    state[table + USED] += count


@kernel(_STATE, _INT, _INT, _INT)
def refill(address, table, source, count):  # type: ignore[no-untyped-def]
    """Put ``count`` entries that lie one behind the other at ``source`` into an empty table."""
    state = words_at(address)
    if table == NODES:
        place_all(state, NODES, source, count, NODE_BYTES)
    elif table in (FANOUT, GAPS):
        place_all(state, table, source, count, TRIPLE_BYTES)
    else:
        place_all(state, table, source, count, PAIR_BYTES)
    return state[table + CROWDED]
