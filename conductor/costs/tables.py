"""The cluster as arrays: what the estimate kernels read, a row a rank and a row an instance class.

Rows of the load table are written through whenever a rank's books change (`rank_books`); nothing is gathered when a
request is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final, TypeVar

import numpy as np

from cache_index import Tier
from conductor.costs.instance_class import Floats, InstanceClass, Ints
from conductor.costs.topology import LOCATION_LEVELS, POOL_TIERS, PoolLink

_Table = TypeVar("_Table", Floats, Ints)

# ---- roles, as the kernels read them ----
PREFILL: Final = 1
DECODE: Final = 2
MIXED: Final = 4

# ---- columns of the load table (float64) ----
HEAD_SINCE_S: Final = 0  # when the first pending prefill began
HEAD_PREDICTED_S: Final = 1
HEAD_OBSERVED: Final = (
    2  # 1 when its end will be seen, so that it still runs when its predicted end has passed
)
REST_PREDICTED_S: Final = 3  # of the prefills behind it
PENDING_PREFILLS: Final = 4
PENDING_TOKENS: Final = 5
ACTIVE_DECODES: Final = 6
CONTEXT_TOKENS: Final = 7  # prompts and answers as predicted, of the active decodes
TRANSFERS_IN: Final = 8
TRANSFERS_OUT: Final = 9
PLACEMENTS: Final = 10
HARM: Final = 11  # requests aboard that would miss their TBT objective by a prefill of HARM_AT_S[0], [1], ...
HARM_AT_S: Final = (0.05, 0.2, 0.8, 3.2)  # each four times the one before it
REPORTED_RUNNING: Final = HARM + len(HARM_AT_S)  # by the engine; -1 unknown
REPORTED_WAITING: Final = REPORTED_RUNNING + 1
REPORTED_USAGE: Final = REPORTED_RUNNING + 2
STORED_TOKENS: Final = (
    REPORTED_RUNNING + 3
)  # that placements left in the device tier, fading by STORED_MEMORY_S
STORED_AT_S: Final = STORED_TOKENS + 1  # as of when
LOAD_COLUMNS: Final = REPORTED_RUNNING + 5

STORED_MEMORY_S: Final = 300.0  # about as long as people take to come back

# ---- columns of the rank table (int64) ----
CLASS: Final = 0
CAPACITY_TOKENS: Final = 1  # KV tokens of the device tier
CAPACITY_KNOWN: Final = 2  # the engine told it
FETCHES: Final = 3  # can fetch a prefix from a peer
STREAMS_LAYERS: Final = 4  # loads and fetches overlap with compute, layer by layer
POOL: Final = (
    5  # the number of the pool link that loads from the first of POOL_TIERS share, 0: none; and so on
)
LOCATION: Final = POOL + len(POOL_TIERS)  # LOCATION_LEVELS ids: node, rack, zone, site
RANK_COLUMNS: Final = LOCATION + LOCATION_LEVELS

# ---- columns of the class table (float64) ----
PREFILL_A: Final = 0
PREFILL_B: Final = 1
PREFILL_C: Final = 2
PREFILL_D: Final = 3
DECODE_BASE_S: Final = 4
DECODE_S_PER_SEQUENCE: Final = 5
DECODE_S_PER_CONTEXT: Final = 6
KV_BYTES: Final = 7
LAYERS: Final = 8
CHUNK_TOKENS: Final = 9
NIC_S_PER_BYTE: Final = 10
NIC_LATENCY_S: Final = 11
TIER_S_PER_BYTE: Final = 12  # of raw KV, decoded; one a tier, as the next two
TIER_LATENCY_S: Final = TIER_S_PER_BYTE + len(Tier)
TIER_RATIO: Final = TIER_LATENCY_S + len(Tier)  # bytes of raw KV by bytes stored
PREFILL_SCALE: Final = TIER_RATIO + len(Tier)  # learned
DECODE_SCALE: Final = PREFILL_SCALE + 1
CLASS_COLUMNS: Final = DECODE_SCALE + 1

# ---- columns of the table of pool links (float64) ----
POOL_S_PER_BYTE: Final = 0  # as it travels
POOL_BUSY_UNTIL_S: Final = 1  # with the loads that are planned, one after the other
POOL_COLUMNS: Final = 2

# ---- where the tables stand (int64 addresses) ----
LOADS_AT: Final = 0
RANKS_AT: Final = 1
CLASSES_AT: Final = 2

# Writes two columns that stand side by side in a third of two assignments' time.
_pack_pair: Final[Callable[..., None]] = Struct("2d").pack_into


class ClusterTables:
    """Load, rank and class tables; rows are added and reused, never moved.

    At ``address`` kernels find where the tables stand, also when they have grown.
    """

    def __init__(self, links: Floats, pool_links: Sequence[PoolLink] = ()) -> None:
        """``links`` are those of `Topology.link_table`."""
        self.links = links
        self.pools: Floats = np.zeros((len(pool_links), POOL_COLUMNS))
        self.pools[:, POOL_S_PER_BYTE] = [1.0 / pool.bytes_per_s for pool in pool_links]
        self.loads: Floats = np.zeros((16, LOAD_COLUMNS))
        self.ranks: Ints = np.zeros((16, RANK_COLUMNS), np.int64)
        self.classes: Floats = np.zeros((4, CLASS_COLUMNS))
        self._class_ids: dict[str, int] = {}
        self._addresses: Ints = np.zeros(CLASSES_AT + 1, np.int64)
        self.address = int(self._addresses.ctypes.data)
        self._locate()

    def _locate(self) -> None:
        """Where the tables stand until they grow; and as words, which Python writes faster."""
        self._class_words = self.classes.reshape(-1).data
        for at, table in ((LOADS_AT, self.loads), (RANKS_AT, self.ranks), (CLASSES_AT, self.classes)):
            self._addresses[at] = table.ctypes.data

    def make_row(self, row: int) -> None:
        """Make room for a row and empty it."""
        if row >= len(self.loads):
            self.loads = _grown(self.loads, row + 1)
            self.ranks = _grown(self.ranks, row + 1)
            self._locate()
        self.loads[row] = 0.0
        self.loads[row, REPORTED_RUNNING : REPORTED_USAGE + 1] = -1.0
        self.ranks[row] = 0

    def take_pool_links(self, row: int, moved: Iterable[tuple[Tier, int]], now_s: float) -> None:
        """So many tokens of each tier will come to a rank, or leave it, behind what pool links have to carry."""
        terms = self.classes[self.ranks.item(row, CLASS)]
        for tier, tokens in moved:
            number = self.ranks.item(row, POOL + tier - POOL_TIERS[0]) if tier >= POOL_TIERS[0] else 0
            if number:
                pool = self.pools[number - 1]
                bytes_per_token = terms.item(KV_BYTES) / terms.item(TIER_RATIO + tier)
                seconds = tokens * bytes_per_token * pool.item(POOL_S_PER_BYTE)
                pool[POOL_BUSY_UNTIL_S] = max(pool.item(POOL_BUSY_UNTIL_S), now_s) + seconds

    def empty(self, row: int) -> None:
        """What was in the device tier is lost."""
        self.loads[row, STORED_TOKENS] = 0.0

    def class_id(self, instance_class: InstanceClass) -> int:
        """The row of a class, by its name; added when it is new."""
        known = self._class_ids.get(instance_class.name)
        if known is not None:
            return known
        row = self._class_ids[instance_class.name] = len(self._class_ids)
        if row >= len(self.classes):
            self.classes = _grown(self.classes, row + 1)
            self._locate()
        self.classes[row] = _class_row(instance_class)
        return row

    def calibrate(self, instance_class: InstanceClass, prefill_scale: float, decode_scale: float) -> None:
        """Set the learned corrections of a class."""
        row = self._class_ids.get(instance_class.name)
        if row is None:
            row = self.class_id(instance_class)
        _pack_pair(self._class_words, 8 * (row * CLASS_COLUMNS + PREFILL_SCALE), prefill_scale, decode_scale)


def _class_row(c: InstanceClass) -> Floats:
    row = np.zeros(CLASS_COLUMNS)
    row[PREFILL_A] = c.prefill_s_per_token
    row[PREFILL_B] = c.prefill_s_per_token_squared
    row[PREFILL_C] = c.prefill_base_s
    row[PREFILL_D] = c.prefill_s_per_cached_token
    row[DECODE_BASE_S] = c.decode_base_s
    row[DECODE_S_PER_SEQUENCE] = c.decode_s_per_sequence
    row[DECODE_S_PER_CONTEXT] = c.decode_s_per_context_token
    row[KV_BYTES] = c.kv_bytes_per_token
    row[LAYERS] = c.layers
    row[CHUNK_TOKENS] = c.chunk_tokens
    row[NIC_S_PER_BYTE] = 1.0 / c.nic.bytes_per_s
    row[NIC_LATENCY_S] = c.nic.latency_s
    for tier in Tier:
        speed = c.tiers.get(tier)
        # What cannot be loaded is never cheaper than computing it.
        row[TIER_S_PER_BYTE + tier] = 1.0 / speed.load_bytes_per_s if speed is not None else np.inf
        row[TIER_LATENCY_S + tier] = speed.latency_s if speed is not None else np.inf
        row[TIER_RATIO + tier] = speed.ratio if speed is not None else 1.0
    row[TIER_S_PER_BYTE + Tier.DEVICE] = 0.0
    row[TIER_LATENCY_S + Tier.DEVICE] = 0.0
    row[PREFILL_SCALE] = row[DECODE_SCALE] = 1.0
    return row


def _grown(table: _Table, rows: int) -> _Table:
    larger = np.zeros((max(2 * len(table), rows), table.shape[1]), table.dtype)
    larger[: len(table)] = table
    return larger
