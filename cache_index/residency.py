"""The words of a residency: which holder has a block, and in which tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec


class Tier(IntEnum):
    """Where a block's KV tensors lie, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    POD = 3
    REMOTE = 4

    @classmethod
    def parse(cls, name: str) -> Tier:
        """The tier that an engine's name for a medium means, in any letter case; ValueError if none."""
        tier = _MEDIA.get(name.upper())
        if tier is None:
            raise ValueError(f"unknown medium {name!r}")
        return tier


_MEDIA = {
    **dict.fromkeys(("DEVICE", "GPU", "HBM", "NPU", "XPU", "TPU"), Tier.DEVICE),
    **dict.fromkeys(("HOST", "CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "DRAM", "MEMORY"), Tier.HOST),
    **dict.fromkeys(("DISK", "NVME", "SSD", "FILE", "LOCAL_DISK"), Tier.DISK),
    **dict.fromkeys(("POD", "CMX"), Tier.POD),
    **dict.fromkeys(("REMOTE", "EXTERNAL", "NETWORK", "OBJECT", "S3", "STORAGE"), Tier.REMOTE),
}


class Holder(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """An engine's data-parallel rank, or a shared pool, that has blocks."""

    instance_id: str
    rank: int = 0


class UnknownHolderError(KeyError):
    """The holder was never registered, or is unregistered by now."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    """``blocks`` counts nodes, those that only cleared holders had included until they are reclaimed."""

    blocks: int
    residencies: int
    residencies_by_holder: Mapping[Holder, Mapping[Tier, int]]
    bytes: int
    retired_slots: int  # (holder, tier) incarnations whose blocks are not reclaimed yet
    max_blocks: int | None = None
    dropped_residencies: int = 0  # for want of room, since the index was made
    gaps: int = 0  # blocks that someone lacks who has a block right behind; they slow matching a little


@dataclass(frozen=True, slots=True)
class HeldRange:
    """``blocks`` consecutive blocks from the beginning of a range, all with one holder."""

    holder: Holder
    blocks: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A block where recent matches ended. ``hash`` and ``parent`` are sequence hash ^ namespace domain."""

    hash: int
    parent: int | None
    depth: int | None
    matches: int  # recent ones: the counts are halved now and then
    holders: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One block of the radix tree. ``hash`` and ``parent`` are sequence hash ^ namespace domain."""

    hash: int
    parent: int | None  # None: first block of a prefix, or the block before is not in the index
    depth: int | None  # None: stored below a block that the index did not have
    holders: tuple[tuple[Holder, Tier], ...]
