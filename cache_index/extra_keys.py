"""Stores that leave out what else is in a block's hash.

vLLM puts cache salts, adapters and images into its block hashes, and names them as extra keys where it tells
of blocks in device memory. Its store connectors tell of their copies (medium ``cpu``) without them (vLLM
0.32): then the tokens alone do not say which block is meant. The engine's hash does, for it covers the extra
keys. So a store outside of device memory that names no extra keys is a *bare* one, and

- where the stream's engine hash is known, the block is the one it was stored as;
- where it is not, and the stream has named extra keys before, the block and those behind it are left out,
  and counted as unresolved: taken for plain ones, they would be found by prompts that do not have them;
- where the stream never named any, the block is taken for a plain one. When the stream names extra keys
  later, the tiers with such blocks are cleared, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_index.residency import Tier


@dataclass(slots=True)
class ExtraKeyRecord:
    """What one stream has told of extra keys. The compiled reader does the same."""

    published: bool = False
    doubtful: int = 0  # bit 1 << tier: bare blocks with unknown hashes are in the tier

    def doubtful_tiers(self) -> list[Tier]:
        return [tier for tier in Tier if self.doubtful & 1 << tier]
