"""Tier actions are carried out by the leader only, and only while that can be recorded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from redis_process import needs_redis, redis_process
from sharing_replica import SharingReplica

from cache_index import Holder, PromptMatcher, Tier
from conductor.action_ledger import ActionLedger, ActionState
from conductor.action_runner import ActionRunner
from conductor.actions import ActionKind, Place, TierAction
from conductor.cache_orders import CacheOrder, CacheOrders, NotLeadingError
from conductor.shared_state.leadership import follow_leader

pytestmark = needs_redis

HOST = Place(Holder("e0"), Tier.HOST)


class Carrier:
    """Does what it is told to."""

    name = "carrier"

    def __init__(self) -> None:
        self.carried: list[str] = []

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        return True

    async def execute(self, action: TierAction) -> int:
        self.carried.append(action.action_id)
        return action.blocks


def action(name: str) -> TierAction:
    return TierAction(
        name, ActionKind.PIN, None, 0, 2, None, HOST, 0, 0.0, 0.0, time.monotonic() + 20, "test"
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_old_leader_is_refused(tmp_path: Path) -> None:
    with redis_process(tmp_path) as server:
        replicas = [SharingReplica(server, name) for name in "ab"]
        runners, carriers, orders = [], [], []
        for replica in replicas:
            carriers.append(Carrier())
            runner = ActionRunner(ActionLedger(), [carriers[-1]], time.monotonic)
            scheduler = replica.scheduler
            taken = CacheOrders(
                runner, scheduler.cluster, scheduler.index, PromptMatcher(scheduler.index), time.monotonic
            )
            follow_leader(replica.state, runner, None, taken)
            runner.start()
            runners.append(runner)
            orders.append(taken)
        a, b = replicas
        a.start()
        await until(lambda: bool(a.state.token))
        b.start()
        await until(lambda: b.state.lease.leader == "a")
        first = runners[0].ledger.submit(action("1"), time.monotonic())
        await until(lambda: first.state is ActionState.DONE)
        refused = runners[1].ledger.submit(action("2"), time.monotonic())
        await until(lambda: refused.state is ActionState.FAILED)
        assert "does not lead; a leads" in refused.detail and carriers[1].carried == []
        order = CacheOrder(ActionKind.PIN, "llama", HOST, tokens=np.arange(32, dtype=np.uint32))
        with pytest.raises(NotLeadingError, match="a leads"):
            orders[1].submit(order)
        token = a.state.token
        await a.die()
        await until(lambda: bool(b.state.token))
        # It stood still, and believes that it leads.
        a.state.lease._token, a.state.lease._until_s = token, time.monotonic() + 60.0
        late = runners[0].ledger.submit(action("3"), time.monotonic())
        await until(lambda: late.state is ActionState.FAILED)
        assert "not the leader's any more" in late.detail and carriers[0].carried == ["1"]
        # What cannot be recorded waits.
        server.pause()
        waiting = runners[1].ledger.submit(action("4"), time.monotonic())
        await until(lambda: waiting.attempts >= 1 and waiting.state is not ActionState.RUNNING)
        assert "cannot be recorded" in waiting.detail or "does not lead" in waiting.detail
        server.resume()
        with server.client() as client:
            recorded = [json.loads(each) for each in client.lrange("{t}:actions", 0, -1)]
        assert [(each["id"], each["replica"]) for each in recorded][-1] == ("1", "a")
        for runner in runners:
            await runner.close()
        await a.state.close()
        await b.state.close()
