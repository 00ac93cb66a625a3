"""Prompts that a trace gives as text, without a tokenizer: four bytes of UTF-8 are taken for a token."""

from __future__ import annotations

from typing import Final

from simulator.workloads.prefix_names import Context

BYTES_PER_TOKEN: Final = 4  # OpenAI's rule of thumb for English prose; code and other scripts differ


def approximate_tokens(text: str) -> int:
    """At least 1."""
    return max(1, -(-len(text.encode()) // BYTES_PER_TOKEN))


def append_text(context: Context, text: str) -> None:
    """Add ``text`` four bytes at a time, so that equal beginnings share blocks as far as they are equal."""
    encoded = text.encode()
    for start in range(0, len(encoded), BYTES_PER_TOKEN):
        context.append(encoded[start : start + BYTES_PER_TOKEN], 1)
