"""The compiled kernels of the cache index: XXH3 block hashing, hash tables, holder sets, matching.

Numba's cache does not see edits in other files, so compiled code is kept under a digest of all files here
together (``compilation``). What Python calls is exported here, with the words of the state that it reads.
"""

from cache_index.kernels.assumed import assume, lose_last, move_book
from cache_index.kernels.changes import apply, exchange
from cache_index.kernels.compilation import CACHE_DIRECTORY, compile_all
from cache_index.kernels.eviction import drop_any, drop_leaves
from cache_index.kernels.growth import migrate, refill, unused_from
from cache_index.kernels.layout import *  # noqa: F403
from cache_index.kernels.machine_words import ONE, ZERO, u64
from cache_index.kernels.matching import match, match_tokens
from cache_index.kernels.residencies import remove, remove_linked, resolve, store
from cache_index.kernels.sweeping import sweep, sweep_copies, sweep_fanout, sweep_links
from cache_index.kernels.views import (
    count_by_depth,
    describe_node,
    held_run,
    keys_of_slot,
    nodes_by_depth,
    slots_of_node,
)
from cache_index.kernels.xxh3 import hash_chain, hash_words, secrets_for

__all__ = [
    "CACHE_DIRECTORY",
    "ONE",
    "ZERO",
    "apply",
    "assume",
    "compile_all",
    "count_by_depth",
    "describe_node",
    "drop_any",
    "drop_leaves",
    "exchange",
    "hash_chain",
    "hash_words",
    "held_run",
    "keys_of_slot",
    "lose_last",
    "match",
    "match_tokens",
    "migrate",
    "move_book",
    "nodes_by_depth",
    "refill",
    "remove",
    "remove_linked",
    "resolve",
    "secrets_for",
    "slots_of_node",
    "store",
    "sweep",
    "sweep_copies",
    "sweep_fanout",
    "sweep_links",
    "u64",
    "unused_from",
]
