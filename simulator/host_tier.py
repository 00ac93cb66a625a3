"""Host memory behind an engine's device cache: blocks by digest, least recently used out first, and its events.

Written through: what is computed or arrives on the device is here as well, until it makes room for others. There
are no references, for what is read is copied; pinned blocks stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.block_hash import HashChain

MEDIUM = "CPU"


@dataclass(frozen=True, slots=True)
class HostBlock:
    """What a block's event tells of it; ``salt`` of a chain's first block."""

    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str | None


class HostTier:
    """Room for ``blocks`` blocks. Every operation is constant time per block."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"a host tier needs at least one block, not {blocks}")
        self.blocks = blocks
        self._held: OrderedDict[bytes, HostBlock] = OrderedDict()
        self._pinned: set[bytes] = set()
        self._removed: list[bytes] = []
        self._stored: dict[bytes, HostBlock] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def store(self, chain: HashChain, start: int, stop: int) -> int:
        """Keep blocks ``start`` to ``stop`` of a chain; how many of the first are here now.

        The last goes first when room is needed, so that a chain loses its tail.
        """
        kept = 0
        for index in range(start, stop):
            digest = chain.digests(index + 1)[index]
            if digest not in self._held and not self._make_room():
                break
            kept += 1
            if digest not in self._held:
                block = HostBlock(
                    digest,
                    chain.parent(index),
                    tuple(chain.block_tokens(index)),
                    None if index else chain.salt,
                )
                self._held[digest] = self._stored[digest] = block
        for digest in reversed(chain.digests(stop)[start : start + kept]):
            self.use(digest)
        return kept

    def use(self, digest: bytes) -> None:
        """It was used just now; no effect when it is not here."""
        if digest in self._held:
            self._held.move_to_end(digest)

    def run(self, chain: HashChain, start: int, stop: int) -> int:
        """How many blocks from ``start`` on are here without a gap."""
        digests = chain.digests(stop)[start:stop]
        return next((i for i, digest in enumerate(digests) if digest not in self._held), len(digests))

    def drop(self, digests: Sequence[bytes]) -> int:
        """Forget these, pinned or not; how many there were."""
        known = [digest for digest in digests if digest in self._held]
        for digest in known:
            self._forget(digest)
        return len(known)

    def pin(self, digests: Sequence[bytes]) -> int:
        """Keep these, of those that are here, until they are unpinned; at most half of the room."""
        pinned = 0
        for digest in digests:
            if digest not in self._held or (
                digest not in self._pinned and len(self._pinned) >= self.blocks // 2
            ):
                break
            self._pinned.add(digest)
            pinned += 1
        return pinned

    def unpin(self, digests: Sequence[bytes]) -> int:
        pinned = [digest for digest in digests if digest in self._pinned]
        self._pinned.difference_update(pinned)
        return len(pinned)

    def clear(self) -> None:
        """Forget everything, without events: the engine tells that it was cleared."""
        self._held.clear()
        self._pinned.clear()
        self._removed.clear()
        self._stored.clear()

    def digests(self) -> list[bytes]:
        return list(self._held)

    def take_changes(self) -> tuple[list[bytes], list[HostBlock]]:
        """Removed and stored since the last call; removals are older than stores."""
        changes = self._removed, list(self._stored.values())
        self._removed, self._stored = [], {}
        return changes

    def _make_room(self) -> bool:
        if len(self._held) < self.blocks:
            return True
        oldest = next((digest for digest in self._held if digest not in self._pinned), None)
        if oldest is None:
            return False
        self._forget(oldest)
        return True

    def _forget(self, digest: bytes) -> None:
        del self._held[digest]
        self._pinned.discard(digest)
        if self._stored.pop(digest, None) is None:  # a store that nobody has seen is taken back instead
            self._removed.append(digest)
