"""KV caches on their way from one instance to another, over the links of both."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

from conductor.costs import Speed


@dataclass(slots=True)
class _Transfer:
    giver: str
    taker: str
    left_bytes: float
    since_s: float  # when ``left_bytes`` was true
    bytes_per_s: float = 0.0


class HandOffs:
    """Each instance's link is shared equally by what goes out of it, and equally by what comes in.

    A transfer moves at the lesser of its two shares (what it leaves at the other end, others do not get), after
    the taker's latency. Times must not go backwards.
    """

    def __init__(self, links: dict[str, Speed]) -> None:
        self._links = links
        self._transfers: dict[Hashable, _Transfer] = {}
        self._giving: dict[str, set[Hashable]] = {name: set() for name in links}
        self._taking: dict[str, set[Hashable]] = {name: set() for name in links}

    def __len__(self) -> int:
        return len(self._transfers)

    def start(self, key: Hashable, giver: str, taker: str, kv_bytes: float, now_s: float) -> None:
        """Raises ValueError for a key that is under way."""
        if key in self._transfers:
            raise ValueError(f"transfer {key!r} is under way")
        begins_s = now_s + self._links[taker].latency_s
        self._transfers[key] = _Transfer(giver, taker, kv_bytes, begins_s)
        self._giving[giver].add(key)
        self._taking[taker].add(key)
        self._share(giver, taker, now_s)

    def next_end(self) -> tuple[float, Hashable]:
        """When the next transfer ends if none starts before, and which; infinity when none is under way."""
        earliest_s, first = inf, None
        for key, transfer in self._transfers.items():
            end_s = transfer.since_s + transfer.left_bytes / transfer.bytes_per_s
            if end_s < earliest_s:
                earliest_s, first = end_s, key
        return earliest_s, first

    def end(self, key: Hashable, now_s: float) -> None:
        """Take a transfer out, ended or given up."""
        transfer = self._transfers.pop(key)
        self._giving[transfer.giver].remove(key)
        self._taking[transfer.taker].remove(key)
        self._share(transfer.giver, transfer.taker, now_s)

    def _share(self, giver: str, taker: str, now_s: float) -> None:
        """The transfers at these ends move at other speeds from now on."""
        for key in self._giving[giver] | self._taking[taker]:
            transfer = self._transfers[key]
            if now_s > transfer.since_s:  # else its latency is not over
                moved = (now_s - transfer.since_s) * transfer.bytes_per_s
                transfer.left_bytes = max(transfer.left_bytes - moved, 0.0)
                transfer.since_s = now_s
            transfer.bytes_per_s = min(
                self._links[transfer.giver].bytes_per_s / len(self._giving[transfer.giver]),
                self._links[transfer.taker].bytes_per_s / len(self._taking[transfer.taker]),
            )
