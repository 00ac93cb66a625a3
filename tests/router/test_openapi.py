"""Every operation that /openapi.json documents answers as documented, whatever it is asked.

That fields exclude each other is told in words: a request that the schema allows may be refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import schemathesis
from cluster_factory import make_scheduler, request
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cache_index import PromptMatcher, VllmEventSource
from conductor.action_ledger import ActionLedger
from conductor.action_runner import ActionRunner
from conductor.cache_lookup import make_lookup_router
from conductor.cache_orders import CacheOrders
from conductor.cache_rest import make_cache_router
from conductor.engine_caches import EngineCaches
from conductor.executors import DryRunExecutor
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership
from conductor.placement import TokenSource
from conductor.rest import Reservations, TokenizedPrompt, make_rest_router
from router import RouterServices, create_app
from router.inference import PATHS


async def tokens_of(document: dict[str, Any]) -> TokenizedPrompt | None:
    return TokenizedPrompt(np.arange(100, dtype=np.uint32), TokenSource.LOCAL)


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    scheduler = make_scheduler()
    scheduler.place(request(64), 0.5)

    def clock() -> float:
        return 1.0

    events = VllmEventSource(scheduler.index)
    prompts = PromptMatcher(scheduler.index)
    configs = [
        InstanceConfig(id=instance.instance_id, url=instance.url, role=instance.role, block_size=16)
        for instance in scheduler.cluster
    ]
    membership = Membership(scheduler, clock, configs)
    engines = EngineCaches(scheduler.cluster, scheduler.index, prompts, membership.configs, scheduler.aliases)
    runner = ActionRunner(ActionLedger(), [DryRunExecutor()], clock)
    rest = make_rest_router(
        scheduler,
        clock,
        reservations=Reservations(scheduler, clock, ttl_s=60.0),
        membership=membership,
        tokenize=tokens_of,
        orders=CacheOrders(runner, scheduler.cluster, scheduler.index, prompts, clock),
    )
    app = create_app(
        RouterServices(scheduler),
        routers=[
            rest,
            make_cache_router(scheduler.index, events),
            make_lookup_router(scheduler.index, prompts, engines),
        ],
    )
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    events.close()


def test_every_operation_conforms(api: Any) -> None:
    conforming = 0
    for found in api.exclude(
        path=list(PATHS)
    ).get_all_operations():  # the front door serves these before ASGI
        operation = found.ok()

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def conforms(case: Any) -> None:
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        conforms()
        conforming += 1
    assert conforming >= 30
