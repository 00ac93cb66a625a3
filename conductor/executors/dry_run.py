"""The executor that only says what it would do."""

from __future__ import annotations

import structlog

from conductor.actions import ActionKind, ExecutionError, Place, TierAction

_log = structlog.get_logger(__name__)


class DryRunExecutor:
    name = "dry-run"

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        return True

    async def execute(self, action: TierAction) -> int:
        """Always fails, for nothing is moved."""
        _log.info(
            "tier action (dry run)",
            kind=action.kind,
            source=None if action.source is None else str(action.source),
            target=str(action.target),
            blocks=action.blocks,
            reason=action.reason,
        )
        raise ExecutionError("dry run: nothing was moved")
