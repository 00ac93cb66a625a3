"""A quick proof, once per process, that the compiled kernels compute what they should."""

from __future__ import annotations

import threading

import msgspec
import numpy as np

from cache_index import kernels, wire_kernels
from cache_index.arrays import KernelArrays
from cache_index.wire_scratch import Scratch

# XXH3-64 of the little-endian words 0, 1, 2, … n - 1 with seed 1337, for every branch of the algorithm
KNOWN_HASHES = {
    1: 0xE44F30ED0F7BC171,
    2: 0x978612CDF2CC1530,
    3: 0xA19FC43F5C330609,
    16: 0xD47A8F41C833328A,
    24: 0xE4FDD260FC50A770,
    40: 0xF3970CADBDAF5574,
    61: 0x1AB54155BE0AE2DF,
    512: 0x8A51F724EA2E8424,
}


class KernelError(RuntimeError):
    """The compiled kernels return wrong results; the message names the cache to delete."""


_ready = False
_lock = threading.Lock()


def ensure_ready() -> None:
    """Compile the kernels (or load them from the cache) and check them; cheap after the first call.

    Raises KernelError when a kernel returns a wrong result.
    """
    global _ready
    if _ready:
        return
    with _lock:
        if not _ready:
            kernels.compile_all()
            wire_kernels.compile_all()
            _check_hashes()
            _check_index()
            _check_wire()
            _ready = True


def warm() -> None:
    """Compile everything now: about a minute on a new machine, under a second from the cache."""
    ensure_ready()


def _require(correct: bool, kernel: str) -> None:
    if not correct:
        raise KernelError(
            f"compiled kernel {kernel!r} returns wrong results; "
            f"delete {kernels.CACHE_DIRECTORY} and {wire_kernels.CACHE_DIRECTORY} and start again"
        )


def _check_hashes() -> None:
    seed, secrets = np.uint64(1337), kernels.secrets_for(1337)
    for length, expected in KNOWN_HASHES.items():
        computed = kernels.hash_words(np.arange(length, dtype=np.uint32), seed, secrets)
        _require(int(computed) == expected, "hash_words")
    tokens = np.arange(48, dtype=np.uint32)
    whole = np.zeros(3, np.uint64)
    rest = np.zeros(2, np.uint64)
    nothing = np.empty(0, np.uint64)
    kernels.hash_chain(tokens, 16, seed, secrets, np.uint64(0), nothing, whole)
    kernels.hash_chain(tokens[16:], 16, seed, secrets, whole[0], nothing, rest)
    _require(int(whole[0]) == KNOWN_HASHES[16] and whole[1:].tolist() == rest.tolist(), "hash_chain")


def _check_index() -> None:
    """Two holders of one chain; one of them loses a block in the middle."""
    arrays = KernelArrays()
    address = arrays.address
    for slot in range(2):
        arrays.slot_holder[slot] = slot
        arrays.holder_slots[slot, 0] = slot
    domain, no_parent = np.uint64(77), np.uint64(0)
    chain = np.arange(1, 31, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for slot in range(2):
        kernels.store(address, slot, chain, chain + np.uint64(5), domain, no_parent, 0)
    kernels.remove(address, 0, chain[10:11], domain, 0)
    levels = np.zeros((2, kernels.TIERS), np.int32)
    kernels.match(address, chain, domain, levels)
    _require(levels.tolist() == [[10] * kernels.TIERS, [30] * kernels.TIERS], "match")
    key = kernels.resolve(address, chain[3] + np.uint64(5))
    _require(int(key) == int(chain[3] ^ domain), "resolve")
    kernels.remove(address, 0, chain, domain, 0)
    kernels.remove_linked(address, 1, chain + np.uint64(5), 0)
    _require(arrays.used(kernels.NODES) == arrays.used(kernels.LINKS) == 0, "remove")


def _check_wire() -> None:
    """Three blocks of a batch are stored, and removed by the next one."""
    arrays, scratch = KernelArrays(), Scratch(1337)
    arrays.slot_holder[0] = 0
    arrays.holder_slots[0, 0] = 0
    stored = ["BlockStored", [7, b"8" * 32, -9], None, list(range(48)), 16, None, "GPU"]
    removed = {"type": "BlockRemoved", "block_hashes": [7, b"8" * 32, -9], "medium": "gpu"}
    namespaces = np.array([16, 0, 77], np.uint64)
    scratch.work[wire_kernels.NAMESPACES] = namespaces.ctypes.data
    scratch.work[wire_kernels.NAMESPACE_ROWS] = 1
    for event, nodes in (stored, 3), (removed, 0):
        scratch.load([msgspec.msgpack.encode([0.5, [event], 0])])
        scratch.begin(0)
        read = wire_kernels.read_payloads(scratch.address)
        scratch.work[wire_kernels.BUDGET] = 3
        scratch.slots[:] = 0
        answer = wire_kernels.run_program(arrays.address, scratch.address)
        _require(read == 1 and scratch.work[wire_kernels.BLOCKS] == 3, "read_payloads")
        _require(answer == wire_kernels.FINISHED, "run_program")
        _require(arrays.used(kernels.NODES) == arrays.used(kernels.LINKS) == nodes, "run_program")
        if event is stored:
            node = kernels.resolve(arrays.address, np.uint64(7))
            _require(int(node) == KNOWN_HASHES[16] ^ 77, "read_payloads")
