"""Retries are a part of the requests, whatever fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.retry_budget import RetryBudget


@given(
    ratio=st.floats(0, 1),
    burst=st.integers(1, 20),
    events=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=200),
)
def test_no_more_attempts_than_the_burst_and_the_ratio(
    ratio: float, burst: int, events: list[tuple[str, bool]]
) -> None:
    budget = RetryBudget(ratio, burst)
    requests, taken = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    for model, arrives in events:
        if arrives:
            requests[model] += 1
            budget.requests[model] += 1
        elif budget.take(model):
            taken[model] += 1
        else:
            assert budget.tokens().get(model, burst) < 1
    for model in "ab":
        assert taken[model] <= burst + ratio * requests[model] + 1e-6
        assert 0 <= budget.tokens().get(model, burst) <= burst


async def server_error(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")


async def test_where_everything_fails_retries_add_their_part_and_no_more(cluster: Any) -> None:
    engines = [await cluster.engine(f"e{n}", server_error) for n in range(2)]
    door = await cluster.door(engines, max_attempts=2, retry_ratio=0.25, retry_burst=3)
    codes = [(await door.chat()).json()["error"]["code"] for _ in range(40)]
    assert codes[:3] == ["engine_failed"] * 3  # each was tried twice
    retried = codes.count("engine_failed")
    assert retried == sum(len(engine.received) for engine in engines) - 40
    assert 3 + 9 <= retried <= 3 + 10 and codes.count("retry_budget_spent") == 40 - retried
    assert door.sample("conductor_retries_total", reason="error") == retried
    assert door.sample("conductor_retries_denied_total", reason="error") == 40 - retried
    assert door.sample("conductor_retry_budget", model=cluster.MODEL) < 1
    await cluster.wait_until(lambda: door.placements.open_placements == 0)


async def test_the_client_is_told_when_to_come_back(cluster: Any) -> None:
    engines = [await cluster.engine(f"e{n}", server_error) for n in range(2)]
    door = await cluster.door(engines, retry_ratio=0, retry_burst=1)
    await door.chat()
    answer = await door.chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (502, "1")
    assert "Tried 1: e0: HTTP 500: broken" in answer.json()["error"]["message"]


@pytest.mark.parametrize("backoff_s", [30.0])
async def test_an_instance_that_is_gone_costs_no_wait(cluster: Any, backoff_s: float) -> None:
    async def reset(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    gone, good = await cluster.engine("gone", reset), await cluster.engine("good")
    door = await cluster.door([gone, good], retry_backoff_s=backoff_s)
    assert (await door.chat()).headers["x-conductor-decode-instance"] == "good"
