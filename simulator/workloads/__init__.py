"""Workloads: traces of every common format as one record, generators, and what a trace's reuse could be."""

from simulator.workloads.generation import WORKLOAD_KINDS, generate
from simulator.workloads.mooncake import assumed_answer_s, mooncake_line, read_mooncake
from simulator.workloads.profile import (
    CAPACITIES_BLOCKS,
    CapacityReuse,
    TraceProfile,
    capacity_reuse,
    profile_trace,
)
from simulator.workloads.reading import TraceFormat, detect_format, read_trace
from simulator.workloads.records import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRecord, prompt_tokens
from simulator.workloads.reuse import (
    UnlimitedReuse,
    belady_hits,
    block_accesses,
    lru_hits,
    next_uses,
    unlimited_reuse,
)
from simulator.workloads.selection import Selection, at_rate, faster, in_blocks_of, select, trace_span_s

__all__ = [
    "CAPACITIES_BLOCKS",
    "MOONCAKE_BLOCK_TOKENS",
    "WORKLOAD_KINDS",
    "CapacityReuse",
    "Selection",
    "TraceError",
    "TraceFormat",
    "TraceProfile",
    "TraceRecord",
    "UnlimitedReuse",
    "assumed_answer_s",
    "at_rate",
    "belady_hits",
    "block_accesses",
    "capacity_reuse",
    "detect_format",
    "faster",
    "generate",
    "in_blocks_of",
    "lru_hits",
    "mooncake_line",
    "next_uses",
    "profile_trace",
    "prompt_tokens",
    "read_mooncake",
    "read_trace",
    "select",
    "trace_span_s",
    "unlimited_reuse",
]
