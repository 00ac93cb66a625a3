"""The executor that only tells."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from cache_index import Holder, Namespace, Tier
from conductor.actions import ActionKind, ExecutionError, Place, Prefix, TierAction
from conductor.executors import DryRunExecutor


async def test_a_dry_run_tells_and_moves_nothing() -> None:
    action = TierAction(
        action_id="1",
        kind=ActionKind.REPLICATE,
        prefix=Prefix(Namespace("m", 16), np.array([1, 2], np.uint64)),
        start=0,
        stop=2,
        source=Place(Holder("a"), Tier.DEVICE),
        target=Place(Holder("b"), Tier.HOST),
        kv_bytes=4096,
        benefit_s=1.0,
        cost_s=0.1,
        deadline_s=9.0,
        reason="hot",
    )
    executor = DryRunExecutor()
    assert executor.can(action.kind, action.source, action.target)
    with capture_logs() as logs, pytest.raises(ExecutionError, match="nothing was moved"):
        await executor.execute(action)
    assert (logs[0]["source"], logs[0]["target"], logs[0]["blocks"]) == ("a/device", "b/host", 2)
