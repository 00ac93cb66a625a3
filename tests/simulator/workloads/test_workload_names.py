"""The names that other packages may rely on."""

import simulator.workloads

NAMES = {
    *(
        "CAPACITIES_BLOCKS",
        "CapacityReuse",
        "MOONCAKE_BLOCK_TOKENS",
        "WORKLOAD_KINDS",
        "Selection",
        "TraceError",
        "TraceFormat",
    ),
    *("TraceProfile", "TraceRecord", "UnlimitedReuse", "assumed_answer_s", "at_rate", "belady_hits"),
    *(
        "block_accesses",
        "capacity_reuse",
        "detect_format",
        "faster",
        "generate",
        "in_blocks_of",
        "lru_hits",
        "mooncake_line",
    ),
    *("next_uses", "profile_trace", "prompt_tokens", "read_mooncake", "read_trace", "select"),
    *("trace_span_s", "unlimited_reuse"),
}


def test_exported_names() -> None:
    assert set(simulator.workloads.__all__) == NAMES
    assert all(hasattr(simulator.workloads, name) for name in NAMES)
