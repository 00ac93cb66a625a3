"""Request traces: when requests arrive, how long they are, and which prefixes they share.

What it names lives in `simulator.workloads`, with the other formats, generators and statistics.
"""

from __future__ import annotations

from simulator.workloads.mooncake import read_mooncake
from simulator.workloads.records import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRecord, prompt_tokens

__all__ = ["MOONCAKE_BLOCK_TOKENS", "TraceError", "TraceRecord", "prompt_tokens", "read_mooncake"]
