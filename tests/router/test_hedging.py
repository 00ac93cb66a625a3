"""A second instance is asked when the first one is late; the first answer wins and the other leg is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from router.hedging import FirstBytes

HEDGING = {"hedge_quantile": 0.9, "hedge_least_s": 0.02}
KNOWN = 64  # requests whose times are known


class Slow:
    """An engine that answers at once until told to think for so long."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.think_s = 0.0
        self.fails = False

    async def respond(self, request: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.think_s)
        if self.fails:
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")
        elif request.document.get("stream"):
            writer.write(self.cluster.STREAM_HEAD + self.cluster.chunk(self.cluster.event("x")))
            writer.write(self.cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.write(self.cluster.json_response(orjson.dumps(self.cluster.ANSWER)))


def know_times(door: Any, streams: bool) -> None:
    """Answers took a millisecond so far."""
    if door.services.first_bytes is not None:
        for _ in range(KNOWN):
            door.services.first_bytes.observe(door.placements.engine_model, streams, 0.001)


class Scene:
    """Two instances, of which the first is asked first, behind a front door that knows how long answers take."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.first, self.second = Slow(cluster), Slow(cluster)
        self.engines: list[Any] = []
        self.door: Any = None

    async def open(self, streams: bool, decode: list[Any] | None = None, **settings: Any) -> Scene:
        for name, slow in (("e0", self.first), ("e1", self.second)):
            self.engines.append(await self.cluster.engine(name, slow.respond))
        self.door = await self.cluster.door(self.engines, decode, **{**HEDGING, **settings})
        know_times(self.door, streams)
        return self

    def hedges(self, outcome: str) -> float:
        return float(self.door.sample("conductor_hedges_total", outcome=outcome))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_instance_wins_and_the_first_is_cancelled(cluster: Any, stream: bool) -> None:
    scene = await Scene(cluster).open(stream)
    scene.first.think_s = 30.0
    response = await scene.door.chat(stream=stream)
    assert response.status_code == 200
    assert response.headers["x-conductor-decode-instance"] == "e1"
    assert response.headers["x-conductor-attempts"] == "2"
    assert response.text.endswith("data: [DONE]\n\n") if stream else response.json() == cluster.ANSWER
    await cluster.wait_until(lambda: scene.engines[0].open_connections == 0)
    await cluster.wait_until(lambda: scene.door.placements.open_placements == 0)
    assert (scene.hedges("won"), scene.hedges("lost")) == (1, 0)
    asked = scene.door.placements.asked[-1]
    assert (asked.excluded, asked.retry_of) == ({"e0"}, None)
    assert scene.door.placements.named("cancelled") == [asked.hedge_of] == ["p-1"]
    assert len(scene.door.placements.named("finished")) == 1


async def test_the_first_instance_wins_and_the_second_is_cancelled(cluster: Any) -> None:
    scene = await Scene(cluster).open(False)
    scene.first.think_s, scene.second.think_s = 0.5, 30.0
    response = await scene.door.chat()
    assert (response.status_code, response.headers["x-conductor-decode-instance"]) == (200, "e0")
    await cluster.wait_until(lambda: scene.engines[1].open_connections == 0)
    assert len(scene.engines[1].received) == 1
    assert (scene.hedges("won"), scene.hedges("lost")) == (0, 1)
    await cluster.wait_until(lambda: scene.door.placements.open_placements == 0)


async def test_nobody_else_is_asked_unless_it_is_late(cluster: Any) -> None:
    scene = await Scene(cluster).open(False, hedge_least_s=30.0)
    scene.first.think_s = 0.2
    assert (await scene.door.chat()).headers["x-conductor-attempts"] == "1"
    assert not scene.engines[1].received


async def test_without_the_setting_nobody_else_is_asked(cluster: Any) -> None:
    scene = await Scene(cluster).open(False, hedge_quantile=None)
    scene.first.think_s = 0.2
    assert (await scene.door.chat()).headers["x-conductor-attempts"] == "1"
    assert not scene.engines[1].received


async def test_hedges_count_against_the_retry_budget(cluster: Any) -> None:
    scene = await Scene(cluster).open(False, retry_ratio=0, retry_burst=2)
    scene.first.think_s = 0.2
    for _ in range(4):
        assert (await scene.door.chat()).status_code == 200
    assert len(scene.engines[1].received) == 2
    assert (scene.hedges("won"), scene.hedges("no budget")) == (2, 2)


@pytest.mark.parametrize("fails", ["first", "second"])
async def test_a_failure_of_one_leaves_the_other(cluster: Any, fails: str) -> None:
    scene = await Scene(cluster).open(False)
    scene.first.think_s = scene.second.think_s = 1.0
    failing = scene.first if fails == "first" else scene.second
    failing.fails, failing.think_s = True, 0.5
    response = await scene.door.chat()
    assert response.status_code == 200
    answered = response.headers["x-conductor-decode-instance"]
    assert answered == ("e1" if fails == "first" else "e0")
    [failure] = scene.door.placements.named("failed")
    assert failure.instance_id != answered
    assert scene.hedges("won" if fails == "first" else "failed") == 1
    assert scene.door.sample("conductor_retries_total", reason="error") == 0
    await cluster.wait_until(lambda: scene.door.placements.open_placements == 0)


async def test_both_fail_and_a_third_instance_answers(cluster: Any) -> None:
    scene = await Scene(cluster).open(False)
    third = await cluster.engine("e2")
    scene.door.placements.prefill.append(third.target)
    scene.first.think_s, scene.second.think_s = 0.8, 0.4
    scene.first.fails = scene.second.fails = True
    response = await scene.door.chat()
    assert (response.status_code, response.headers["x-conductor-decode-instance"]) == (200, "e2")
    assert response.headers["x-conductor-attempts"] == "3"
    assert scene.door.placements.asked[-1].excluded == {"e0", "e1"}


async def test_without_another_instance_the_first_one_is_waited_for(cluster: Any) -> None:
    slow = Slow(cluster)
    engine = await cluster.engine("e0", slow.respond)
    door = await cluster.door([engine], retry_ratio=0, retry_burst=1, **HEDGING)
    know_times(door, False)
    slow.think_s = 0.2
    assert (await door.chat()).status_code == 200
    assert door.sample("conductor_hedges_total", outcome="no instance") == 1
    assert door.sample("conductor_retry_budget", model=cluster.MODEL) == 1  # given back


async def test_pairs_are_not_hedged(cluster: Any) -> None:
    decode = [await cluster.engine("d0"), await cluster.engine("d1")]
    scene = await Scene(cluster).open(False, decode)
    scene.first.think_s = 0.2
    assert (await scene.door.chat()).headers["x-conductor-attempts"] == "1"
    assert not scene.engines[1].received and not decode[1].received


async def test_a_client_that_leaves_ends_both(cluster: Any) -> None:
    scene = await Scene(cluster).open(False)
    scene.first.think_s = scene.second.think_s = 30.0
    connection = await scene.door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    await cluster.wait_until(lambda: bool(scene.engines[1].received))
    await connection.close()
    await cluster.wait_until(lambda: scene.engines[1].open_connections == 0)
    await cluster.wait_until(lambda: scene.door.placements.open_placements == 0)
    assert len(scene.door.placements.named("cancelled")) == 2 and not scene.door.services.active


async def test_times_are_learned_from_answers(cluster: Any) -> None:
    slow = Slow(cluster)
    door = await cluster.door([await cluster.engine("e0", slow.respond)], **HEDGING)
    for number in range(KNOWN):
        assert number >= 50 or door.services.first_bytes.late_after_s(cluster.MODEL, False) is None
        await door.chat()
    assert door.services.first_bytes.late_after_s(cluster.MODEL, False) is not None
    assert door.services.first_bytes.late_after_s(cluster.MODEL, True) is None


def test_lateness_follows_the_latest_times() -> None:
    times = FirstBytes(0.9, least_s=0.01)
    for number in range(49):
        times.observe("m", True, 0.1 + number / 1e6)
        assert times.late_after_s("m", True) is None
    for _ in range(20):
        times.observe("m", True, 0.1)
    assert times.late_after_s("m", True) == pytest.approx(0.1, rel=0.01)
    assert times.late_after_s("m", False) is None and times.late_after_s("other", True) is None
    for _ in range(600):
        times.observe("m", True, 0.001)
    assert times.late_after_s("m", True) == 0.01  # never before the least
