"""`conductor serve --workers 2`: two processes answer as one; one that dies takes only its own streams along."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from front_door_process import FrontDoor, alive, children, conductor_command, front_door
from waiting import wait_for

MODEL = "emulated-8b"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    folder = tmp_path_factory.mktemp("workers")
    with front_door(folder, "--emulate", "2p2d", "--emulate-speed", "10", "--workers", "2") as opened:
        yield opened


def _body(number: int, tokens: int) -> dict:
    prompt = [number * 7 % 1000 + 1, *range(100, 140)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def _stream(door: FrontDoor, number: int, tokens: int, **headers: str) -> tuple[str, int, bool]:
    """On a connection of its own: which process answered, the status, and whether the stream was whole."""
    async with httpx.AsyncClient(base_url=door.url, timeout=60, trust_env=False) as client:
        process, status, body = "", 0, b""
        try:
            async with client.stream(
                "POST", "/v1/completions", json=_body(number, tokens), headers=headers
            ) as answer:
                process, status = answer.headers["x-request-id"].split("-")[0], answer.status_code
                async for data in answer.aiter_raw():
                    body += data
        except httpx.TransportError:
            return process, status, False
        return process, status, body.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in body


async def _streams(door: FrontDoor, count: int, tokens: int) -> list[tuple[str, int, bool]]:
    return await asyncio.gather(*(_stream(door, number, tokens) for number in range(count)))


def _requests_by_worker(samples: dict[str, float]) -> list[float]:
    return [samples[f'conductor_worker_requests_total{{worker="{number}"}}'] for number in range(2)]


async def test_both_workers_answer_and_their_figures_are_added(door: FrontDoor) -> None:
    before = door.samples()
    answers = await _streams(door, 32, 8)
    assert {answer[1:] for answer in answers} == {(200, True)}
    after = door.samples()
    answered = Counter(process for process, _, _ in answers)
    assert len(answered) == 2
    gained = [b - a for a, b in zip(_requests_by_worker(before), _requests_by_worker(after), strict=True)]
    assert sorted(gained) == sorted(answered.values())
    count = 'conductor_requests_total{code="200",endpoint="/v1/completions",model="emulated-8b"}'
    assert after[count] - before.get(count, 0.0) == 32
    assert after["conductor_ttft_seconds_count"] - before["conductor_ttft_seconds_count"] == 32
    assert after["conductor_placement_seconds_count"] - before["conductor_placement_seconds_count"] == 32
    assert after["conductor_inflight_requests"] == 0
    assert after["conductor_active_placements"] == 0


def test_the_openai_client_finds_one_server(door: FrontDoor) -> None:
    for _ in range(4):
        with openai.OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=0) as client:
            assert [card.id for card in client.models.list().data] == [MODEL]
            messages = [{"role": "user", "content": "Same?"}]
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12)
            parts = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, stream=True)
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert text == whole.choices[0].message.content
            with pytest.raises(openai.NotFoundError, match="Served models: emulated-8b"):
                client.completions.create(model="absent", prompt="x")


def test_what_is_no_inference_is_answered_by_the_conductor(door: FrontDoor) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 200_000}]}
    for _ in range(4):
        with httpx.Client(base_url=door.url, timeout=60, trust_env=False) as client:
            placed = client.post("/v1/placements", json=asked).json()
            found = client.get(f"/v1/placements/{placed['placement_id']}")
            assert found.json()["placement_id"] == placed["placement_id"]
            progress = f"/v1/placements/{placed['placement_id']}/progress"
            assert client.post(progress, json={"event": "cancelled"}).status_code == 200
            missing = client.get("/v1/nothing?x=1")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
            assert client.get("/openapi.json").json()["info"]["title"] == "Conductor"
            tokenized = client.post("/tokenize", json={"model": MODEL, "prompt": "one two"}).json()
            assert tokenized["count"] == len(tokenized["tokens"])


async def test_workers_that_are_killed_and_that_are_stopped(tmp_path: Path) -> None:
    """One that is killed takes only its own streams along; a stop lets all streams finish."""
    with front_door(tmp_path, "--emulate", "2", "--workers", "2") as door:
        victim = door.worker_pids()["1"]
        streaming = asyncio.gather(*(_stream(door, number, 600) for number in range(24)))
        while (await asyncio.to_thread(door.samples))["conductor_active_placements"] < 24:
            await asyncio.sleep(0.02)
        os.kill(victim, signal.SIGKILL)
        meanwhile = asyncio.gather(*(_stream(door, number, 4) for number in range(16)))
        while (await asyncio.to_thread(door.samples))['conductor_worker_starts_total{worker="1"}'] < 2:
            await asyncio.sleep(0.02)
        answers = await streaming
        outcomes = {process: set() for process, _, _ in answers}
        for process, _, whole in answers:
            outcomes[process].add(whole)
        assert sorted(map(tuple, outcomes.values())) == [(False,), (True,)], answers
        assert {answer[1:] for answer in await meanwhile} == {(200, True)}, "connections wait for the restart"
        wait_for(lambda: door.samples()["conductor_active_placements"] == 0)
        wait_for(lambda: door.samples()['conductor_worker_up{worker="1"}'] == 1)
        assert door.worker_pids()["1"] != victim
        ended = Counter(each["outcome"] for each in door.get("/v1/placements?limit=100")["placements"])
        broken = sum(not whole for _, _, whole in answers)
        assert ended == {"finished": 40 - broken, "cancelled": broken}
        again = await _streams(door, 16, 4)
        assert {answer[1:] for answer in again} == {(200, True)}
        assert len({process for process, _, _ in again}) == 2

        left = [door.process.pid, *children(door.process.pid), *door.engine_pids().values()]
        assert len(left) == 6
        streaming = asyncio.gather(*(_stream(door, number, 400) for number in range(12)))
        while (await asyncio.to_thread(door.samples))["conductor_active_placements"] < 12:
            await asyncio.sleep(0.02)
        stopping = asyncio.create_task(asyncio.to_thread(door.stop, signal.SIGTERM))
        assert {answer[1:] for answer in await streaming} == {(200, True)}
        assert await stopping == 0
        assert not [pid for pid in left if alive(pid)]


@pytest.mark.extended
async def test_a_worker_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    config = tmp_path / "conductor.yaml"
    config.write_text("server: {workers: 2, worker_timeout_s: 2}\n")
    with front_door(tmp_path, "--emulate", "2", "--config", str(config)) as door:
        victim = door.worker_pids()["0"]
        streaming = asyncio.gather(*(_stream(door, number, 3_000) for number in range(16)))
        while (await asyncio.to_thread(door.samples))["conductor_active_placements"] < 16:
            await asyncio.sleep(0.02)
        os.kill(victim, signal.SIGSTOP)
        await asyncio.to_thread(wait_for, lambda: not alive(victim))
        await asyncio.to_thread(wait_for, lambda: door.worker_pids().get("0", victim) != victim)
        killed = {
            number: door.samples()[f'conductor_worker_killed_total{{worker="{number}"}}'] for number in "01"
        }
        assert killed == {"0": 1, "1": 0}
        answers = await streaming
        assert len({process for process, _, _ in answers}) == 2
        wait_for(lambda: door.samples()["conductor_active_placements"] == 0)
        wait_for(lambda: door.samples()['conductor_worker_up{worker="0"}'] == 1)
        again = await _streams(door, 16, 4)
        assert {answer[1:] for answer in again} == {(200, True)}
        assert "does not answer and is killed" in door.log.read_text()


@pytest.mark.extended
def test_workers_end_with_the_conductor(tmp_path: Path) -> None:
    with front_door(tmp_path, "--emulate", "1", "--workers", "2") as door:
        workers = door.worker_pids().values()
        arguments = Path(f"/proc/{door.worker_pids()['0']}/cmdline").read_text().split("\0")
        sockets = Path(arguments[arguments.index("--socket") + 1]).parent
        assert sockets.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in sockets.iterdir()} == {0o600}
        os.kill(door.process.pid, signal.SIGKILL)
        door.process.wait()
        wait_for(lambda: not any(map(alive, workers)))
        assert not sockets.exists()


@pytest.mark.extended
async def test_limits_of_keys_hold_over_all_workers(tmp_path: Path) -> None:
    config = tmp_path / "conductor.yaml"
    config.write_text(
        "emulation: {cluster: '1'}\nserver: {workers: 2}\napi_keys:\n"
        "- {name: few, key: few, limits: {requests_per_minute: 10}}\n"
        "- {name: narrow, key: narrow, limits: {concurrency: 5}}\n"
        "- {name: root, key: root, admin: true}\n"
    )
    root = {"authorization": "Bearer root"}
    with front_door(tmp_path, "--config", str(config), headers=root) as door:
        few = [await _stream(door, number, 2, authorization="Bearer few") for number in range(20)]
        served = sum(status == 200 for _, status, _ in few)
        assert 10 <= served <= 13, "ten at once, one more every six seconds, and not so many for each process"
        assert Counter(status for _, status, _ in few) == {200: served, 429: 20 - served}
        assert len({process for process, status, _ in few if status == 200}) == 2
        narrow = await asyncio.gather(
            *(_stream(door, number, 400, authorization="Bearer narrow") for number in range(16))
        )
        assert Counter(status for _, status, _ in narrow) == {200: 5, 429: 11}
        assert (await _stream(door, 1, 2, authorization="Bearer narrow"))[1:] == (200, True)
        samples = door.samples()
        assert samples['conductor_tenant_refused_total{limit="requests",tenant="few"}'] == 20 - served
        assert samples['conductor_tenant_refused_total{limit="concurrency",tenant="narrow"}'] == 11
        assert samples['conductor_tenant_requests_total{code="200",tenant="few"}'] == served
        assert samples['conductor_tenant_active_requests{tenant="narrow"}'] == 0
        answer = httpx.post(f"{door.url}/v1/completions", json=_body(0, 2), headers=root, trust_env=False)
        assert "x-ratelimit-limit-requests" not in answer.headers


@pytest.mark.extended
def test_a_folder_that_sockets_do_not_fit_into_is_said_so(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    ended = subprocess.run(
        conductor_command("serve", "--emulate", "1", "--workers", "2", "--port", "0"),
        capture_output=True,
        timeout=60,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert ended.returncode == 2
    assert "set TMPDIR" in ended.stderr


@pytest.mark.extended
def test_an_address_in_use_is_said_so(door: FrontDoor, tmp_path: Path) -> None:
    port = door.url.rsplit(":", 1)[1]
    ended = subprocess.run(
        conductor_command("serve", "--emulate", "1", "--workers", "2", "--port", port),
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
