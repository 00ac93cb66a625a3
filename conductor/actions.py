"""Tier actions, the orders that move cache between tiers and instances, and who carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from cache_index import Holder, Tier

_log = structlog.get_logger(__name__)


class ActionKind(StrEnum):
    REPLICATE = "replicate"
    PROMOTE = "promote"
    DEMOTE = "demote"
    PREFETCH = "prefetch"
    PIN = "pin"
    UNPIN = "unpin"
    COMPRESS = "compress"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class TierAction:
    """One order, with what it should bring and cost, and why."""

    kind: ActionKind
    source: Holder
    source_tier: Tier
    target: Holder
    target_tier: Tier
    sequence_hashes: tuple[int, ...]
    benefit_s: float
    cost_s: float
    kv_bytes: int
    reason: str


class Executor(Protocol):
    """Carries out the kinds of action it can; never on a request's critical path."""

    @property
    def capabilities(self) -> frozenset[ActionKind]: ...

    async def execute(self, action: TierAction) -> None:
        """Returns when the action has completed. Raises RuntimeError saying why it could not."""
        ...


class DryRunExecutor:
    """Only says what it would do."""

    capabilities = frozenset(ActionKind)

    async def execute(self, action: TierAction) -> None:
        _log.info(
            "tier action (dry run)",
            kind=action.kind,
            source=action.source.instance_id,
            target=action.target.instance_id,
            blocks=len(action.sequence_hashes),
            reason=action.reason,
        )
