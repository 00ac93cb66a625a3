"""Room for KV as people write it: tokens, or bytes that a token's KV divides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_DECIMAL: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_SIZE: Final = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*(?:([kKMGT]?)(\s*tokens)?|([kKMGT]i?|)B)")


@dataclass(frozen=True, slots=True)
class Size:
    """A number of tokens, or of bytes."""

    amount: float
    in_bytes: bool = False

    def tokens(self, kv_bytes_per_token: float) -> int:
        """Whole tokens that fit."""
        return int(self.amount / kv_bytes_per_token) if self.in_bytes else int(self.amount)


def read_size(value: object) -> Size:
    """``412000``, ``3M`` and ``3M tokens`` are tokens; ``640GB`` and ``1TiB`` are bytes. Raises ValueError."""
    if isinstance(value, Size):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = Size(value)
    else:
        found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"{value!r} is no size; write tokens (412000, 3M) or bytes (640GB, 1TiB)")
        number = float(found[1].replace("_", ""))
        unit = found[4]
        size = (
            Size(number * _DECIMAL[found[2]])
            if unit is None
            else Size(number * (_BINARY.get(unit) or _DECIMAL[unit]), in_bytes=True)
        )
    if not 1 <= size.amount < float("inf"):
        raise ValueError(f"{value!r} must be at least 1")
    return size
