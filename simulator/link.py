"""A link whose bandwidth concurrent transfers share equally, without I/O."""

from __future__ import annotations

from math import inf


class SharedLink:
    """Processor sharing: ``n`` transfers in flight each get ``bytes_per_s / n``.

    All times are seconds of the caller's clock and must not go backwards.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bandwidth must be positive, not {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._left_bytes: dict[str, float] = {}
        self._ended: list[str] = []
        self._now_s = -inf

    def start(self, transfer_id: str, size_bytes: int, now_s: float) -> None:
        """Begin a transfer; ValueError if one of that name is in flight."""
        if transfer_id in self._left_bytes or transfer_id in self._ended:
            raise ValueError(f"transfer {transfer_id!r} is in flight")
        self._advance(now_s)
        self._left_bytes[transfer_id] = float(size_bytes)

    def cancel(self, transfer_id: str, now_s: float) -> None:
        """Stop a transfer, giving its share to the others. No effect if it has ended."""
        self._advance(now_s)
        self._left_bytes.pop(transfer_id, None)

    def finished(self, now_s: float) -> list[str]:
        """Take out the transfers that have ended by now, in the order they ended."""
        self._advance(now_s)
        ended, self._ended = self._ended, []
        return ended

    @property
    def next_end_s(self) -> float:
        """When the next transfer ends if none starts before; infinity if there is none."""
        if not self._left_bytes:
            return inf
        return self._now_s + min(self._left_bytes.values()) * len(self._left_bytes) / self.bytes_per_s

    def _advance(self, now_s: float) -> None:
        while (end_s := self.next_end_s) <= now_s:
            smallest = min(self._left_bytes.values())
            self._left_bytes = {name: left - smallest for name, left in self._left_bytes.items()}
            self._now_s = end_s
            self._take_ended()
        if self._left_bytes:
            share = (now_s - self._now_s) * self.bytes_per_s / len(self._left_bytes)
            self._left_bytes = {name: left - share for name, left in self._left_bytes.items()}
            self._take_ended()
        self._now_s = max(self._now_s, now_s)

    def _take_ended(self) -> None:
        # Half a byte is rounding: no caller's clock is more exact than that.
        ended = [name for name, left in self._left_bytes.items() if left < 0.5]
        for name in ended:
            del self._left_bytes[name]
        self._ended += ended
