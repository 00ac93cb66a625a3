"""Replicas over a real Redis: instances, load, what was learned and leadership, and Redis gone in every way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from cluster_factory import request
from redis_process import PASSWORD, RedisProcess, needs_redis, redis_process
from sharing_replica import CONFIG, SharingReplica, engine
from structlog.testing import capture_logs

from conductor.admission import dump_output_lengths, load_output_lengths
from conductor.costs import Calibration
from conductor.placement import Usage
from conductor.shared_state import RedisLink, host_of, scripts
from conductor.shared_state.instances import Standing
from conductor.shared_state.learned import SharedCalibrations
from conductor.shared_state.sharing import PIECES_A_TURN, _pairs

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path / "redis") as started:
        yield started


@pytest.fixture
async def replicas(server: RedisProcess) -> AsyncIterator[Callable[..., SharingReplica]]:
    made: list[SharingReplica] = []

    def make(name: str, *configured, **options) -> SharingReplica:
        made.append(SharingReplica(server, name, *configured, **options).start())
        return made[-1]

    yield make
    server.resume()
    for replica in made:
        await replica.state.close()


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.01)


async def test_instances_are_everywhere(replicas) -> None:
    a, b = replicas("a", engine("e0")), replicas("b", engine("e1"))
    await until(lambda: a.instances().keys() == b.instances().keys() == {"e0", "e1"})
    a.members.put(engine("e2", api_key="the-engines"))
    await until(lambda: "e2" in b.instances())
    assert b.scheduler.cluster["e2"].ranks[0].target.api_key == "the-engines"
    b.members.put(engine("e2", port=9))
    await until(lambda: a.instances()["e2"] == "http://e2:9")
    b.members.remove("e0")
    await until(lambda: "e0" not in a.instances())
    placement = a.scheduler.place(request(), time.monotonic())
    left = b.members.drain(placement.decode.instance_id, 60.0)
    assert left == 0
    instance = a.scheduler.cluster[placement.decode.instance_id]
    await until(lambda: instance.draining)
    b.membership.check_drained()
    a.membership.check_drained()
    assert instance.instance_id not in b.instances()  # nothing ran there by b
    assert instance.instance_id in a.instances()
    late = replicas("late", engine("e0"), engine(instance.instance_id))
    await until(lambda: late.state.state == "up")
    late.membership.check_drained()
    assert late.instances().keys() == b.instances().keys()
    assert sorted(c.split(":")[0] for c in late.state.registry.conflicts) == ["e0", instance.instance_id]


async def test_what_is_configured_differently_is_named(replicas) -> None:
    a = replicas("a", engine("e0"), engine("e1"))
    await until(lambda: a.state.state == "up")
    with capture_logs() as logs:
        b = replicas("b", engine("e0", port=9, role="prefill"))
        await until(lambda: a.instances()["e0"] == "http://e0:9" and "e1" in b.instances())
    assert [e for e in logs if e["event"].startswith("an instance is configured differently")]
    assert a.state.registry.conflicts == ["e0: role, url differ from what b configures, which counts"]
    assert b.state.registry.conflicts == []
    assert a.state.status()["conflicts"] == a.state.registry.conflicts


async def test_entries_outlive_their_replica(replicas) -> None:
    a = replicas("a", engine("e0"))
    a.members.put(engine("e1"))
    await until(lambda: a.state.state == "up" and not a.state._unsent)
    await until(lambda: a.state._stamp not in (None, ""))
    await a.die()
    b = replicas("b")
    await until(lambda: b.instances().keys() == {"e0", "e1"})


async def test_load_of_others_counts_until_they_are_gone(replicas) -> None:
    a, b = replicas("a", engine("e0"), policy="least_loaded"), replicas("b", policy="least_loaded")
    await until(lambda: "e0" in b.instances())
    placements = [a.scheduler.place(request(16384, seed=n), time.monotonic()) for n in range(3)]
    await until(lambda: b.load_of("e0") == (3.0, 3.0))
    assert b.scheduler.consider(request(), time.monotonic()).queue_s > 0.1
    assert b.scheduler.cluster["e0"].ranks[0].active_decodes == 0
    b.scheduler.check_invariants()
    for placement in placements[1:]:
        a.scheduler.first_token(placement.placement_id, time.monotonic())
        a.scheduler.finished(placement.placement_id, time.monotonic(), Usage())
    await until(lambda: b.load_of("e0") == (1.0, 1.0))
    b.scheduler.place(request(), time.monotonic())
    assert b.load_of("e0") == (2.0, 2.0)
    await a.die()
    await until(lambda: b.load_of("e0") == (1.0, 1.0))
    b.scheduler.check_invariants()


async def test_replicas_do_not_herd(replicas) -> None:
    """Requests that come a little apart by turns spread as if one replica had placed them all."""
    engines = [engine(f"e{n}") for n in range(4)]
    a, b = (replicas(name, *engines, policy="least_loaded") for name in "ab")
    await until(lambda: a.state.state == b.state.state == "up")
    for number in range(8):
        replica = (a, b)[number % 2]
        turns = [r.state.counts.turns for r in (a, b)]
        replica.scheduler.place(request(2048, seed=number), time.monotonic())
        await until(
            lambda t=turns: all(r.state.counts.turns >= n + 3 for r, n in zip((a, b), t, strict=True))
        )
    assert [a.load_of(f"e{n}")[1] for n in range(4)] == [2.0] * 4


async def test_one_leads_and_another_takes_over(server: RedisProcess, replicas) -> None:
    a = replicas("a")
    await until(lambda: bool(a.state.token))
    b, c = replicas("b"), replicas("c")
    await until(lambda: all("a leads" in replica.state.leader_words() for replica in (b, c)))
    first = a.state.token
    assert await a.state.record_action({"id": "1"}) is None
    refused = await b.state.record_action({"id": "2"})
    assert refused is not None and "a leads" in refused
    await a.die()
    await until(lambda: bool(b.state.token) or bool(c.state.token))
    assert not a.state.token
    leader = b if b.state.token else c
    assert leader.state.token > first
    # An old leader that does not know is refused where actions are recorded.
    a.state.lease._token, a.state.lease._until_s = first, time.monotonic() + 60.0
    assert await a.state.record_action({"id": "3"}) == (
        f"the token {first} of this replica is not the leader's any more"
    )
    await leader.state.close()
    rest = c if leader is b else b
    with server.client() as client:  # who leaves in order gives the lease back
        lease = client.get("{t}:lease")
    assert lease is None or lease.decode().endswith(f" {rest.state.replica}")
    await until(lambda: bool(rest.state.token))


async def test_what_was_learned_is_there_for_the_next(server, replicas) -> None:
    a = replicas("a", engine("e0"))
    name = a.scheduler.cluster["e0"].instance_class.name
    for _ in range(50):
        a.scheduler.calibrations[name].prefill.observe(1.0, 2.0)
    await until(lambda: a.state.state == "up")
    a.state._due["learned"] = -1.0
    link = RedisLink(server.url, CONFIG.namespace, CONFIG.timeout_s)

    async def stored() -> dict[str, Calibration]:
        told = await link.run(scripts.EXCHANGE_LEARNED, ("learned",))
        return SharedCalibrations().start_with(_pairs(told))

    deadline_s = time.monotonic() + 10.0
    while not (learned := await stored()):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
    assert learned[name].prefill.factor == a.scheduler.calibrations[name].prefill.factor > 1.8
    b = replicas("b", engine("e0"))
    b.scheduler.calibrations[name].prefill.observe(1.0, 1.0)
    await until(lambda: b.state.state == "up")
    a.scheduler.reset_calibration(name)
    for replica in (a, b):
        replica.state._due["learned"] = -1.0
    await until(lambda: a.state._calibrations._resets.get(name) == 1)
    b.state._due["learned"] = -1.0
    await until(lambda: b.scheduler.calibrations[name].prefill.observations == 0)
    assert not (await stored())
    await link.close()


async def test_lengths_of_answers_are_written_in_pieces(server, replicas) -> None:
    a = replicas("a", engine("e0"))
    await until(lambda: bool(a.state.token))
    lengths = a.scheduler.gate.lengths
    for tenant in range(700):
        lengths.observe(request(tenant=f"t{tenant}"), None, 30)
    turns = a.state.counts.turns
    a.state._lengths_due_s = a.state._due["learned"] = -1.0
    await until(lambda: a.state._lengths_to_tell is not None)
    await until(lambda: a.state._lengths_to_tell is None)
    assert a.state.counts.turns >= turns + 700 / 64 / PIECES_A_TURN
    with server.client() as client:
        await until(lambda: not a.state._lengths_told and client.exists("{t}:lengths"))
        written = client.get("{t}:lengths")
    assert json.loads(written) == json.loads(dump_output_lengths(lengths))
    assert len(load_output_lengths(written)) == len(lengths) == 702


async def test_flushed_redis_is_filled_again(server: RedisProcess, replicas) -> None:
    a, b = replicas("a", engine("e0")), replicas("b")
    b.members.put(engine("e1"))
    await until(lambda: a.instances().keys() == b.instances().keys() == {"e0", "e1"})
    await until(lambda: bool(a.state.token or b.state.token))
    token = a.state.token or b.state.token
    b.members.remove("e0")
    await until(lambda: "e0" not in a.instances())
    server.flush()
    late = replicas("late", engine("e0"))
    await until(lambda: late.instances().keys() == {"e1"})
    # The lease stays with its holder, for nobody else is granted one before it would have ended.
    await until(lambda: late.state.lease.leader != "")
    assert (a.state.token or b.state.token) == token


async def test_what_could_not_be_told_is_told_later(
    server: RedisProcess, replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis goes between two steps of one turn, behind the reading and before the telling."""
    a, b = replicas("a"), replicas("b")
    await until(lambda: a.state.state == b.state.state == "up" and a.state._stamp == b.state._stamp == "")
    monkeypatch.setattr(scripts, "FORGET_INSTANCES", "return redis.error_reply('gone')")
    a.state.registry.write("of-last-week", Standing.REMOVED, {}, at_s=0.0)
    a.members.put(engine("e0"))
    await until(lambda: a.state.counts.losses == 1)
    monkeypatch.undo()
    await until(lambda: "e0" in b.instances())
    assert "of-last-week" not in a.state.registry.entries


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_without_redis_decisions_go_on(server: RedisProcess, replicas, how: str) -> None:
    a, b = replicas("a", engine("e0")), replicas("b")
    await until(lambda: "e0" in b.instances() and bool(a.state.token or b.state.token))
    a.scheduler.place(request(), time.monotonic())
    await until(lambda: b.load_of("e0") == (1.0, 1.0))
    with capture_logs() as logs:
        getattr(server, how)()
        slowest_s = 0.0
        while not (b.state.state == "down" and b.load_of("e0") == (0.0, 0.0)):
            before_s = time.monotonic()
            b.scheduler.consider(request(), before_s)
            slowest_s = max(slowest_s, time.monotonic() - before_s)
            await asyncio.sleep(0.01)
        await until(lambda: not a.state.token and not b.state.token)
        b.members.put(engine("e1"))  # is taken, and told later
        await asyncio.sleep(1.0)
    lost = [e for e in logs if "out of reach" in e["event"]]
    assert len(lost) == 2, "one line a replica, not one an attempt"
    assert PASSWORD not in str(logs) and str(server.port) in lost[0]["redis"]
    assert b.state.counts.failures > 1 and b.state.counts.losses == 1
    assert "e1" in b.instances() and "e1" not in a.instances()
    if how == "kill":
        server.start()
    else:
        server.resume()
    await until(lambda: a.state.state == b.state.state == "up" and "e1" in a.instances())
    await until(lambda: b.load_of("e0") == (1.0, 1.0))
    await until(lambda: bool(a.state.token or b.state.token))


async def test_redis_that_comes_later(server: RedisProcess, replicas) -> None:
    server.kill()
    a = replicas("a", engine("e0"))
    await until(lambda: a.state.state == "down")
    assert a.scheduler.place(request(), time.monotonic()).decode.instance_id == "e0"
    server.start()
    await until(lambda: a.state.state == "up" and bool(a.state.token))


async def test_what_cannot_be_read_costs_only_itself(server: RedisProcess, replicas) -> None:
    a = replicas("a", engine("e0"))
    await until(lambda: a.state.state == "up" and a.state._stamp not in (None, ""))
    with server.client() as client:
        client.hset("{t}:instances", "odd", b"0 x\n{]")
        client.hset("{t}:instances", "none", b'0 x\n{"instance_id":"none"}')
        client.set("{t}:stamp", "other")
    b = replicas("b")
    await until(lambda: "e0" in b.instances() and b.state.counts.faults >= 2)
    await until(lambda: b.state.state == "up")


def test_the_password_is_never_shown() -> None:
    assert host_of("redis://user:secret@h:1/2") == "h:1/2"
    assert host_of("rediss://:secret@h") == "h:6379"
    assert host_of("unix:///run/redis.sock?password=secret") == "/run/redis.sock"
