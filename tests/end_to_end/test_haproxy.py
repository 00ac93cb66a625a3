"""The real HAProxy in front of emulated engines, asking over HTTP where every request should go."""

import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door_process import FrontDoor, front_door
from haproxy_process import haproxy

from simulator.emulator.tokens import TOKENIZER_FOLDER

MODEL = "emulated-8b"


def settings(folder: Path, owner: FrontDoor, **more: Any) -> str:
    file = folder / f"conductor-{uuid.uuid4().hex}.json"
    engines = [{"id": name, "url": each["url"]} for name, each in owner.instances().items()]
    model = {"name": MODEL, "tokenizer": str(TOKENIZER_FOLDER), "aliases": ["chat"]}
    file.write_text(json.dumps({"instances": engines, "models": [model], **more}))
    return str(file)


def urls(owner: FrontDoor) -> list[str]:
    return [each["url"] for each in owner.instances().values()]


def chat(*turns: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": MODEL, "messages": messages, "max_tokens": 12, **fields}


def fresh(size: int = 4_000) -> str:
    """Text that nobody has asked about."""
    return (uuid.uuid4().hex + " and some more of it ") * (size // 53)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    with front_door(tmp_path_factory.mktemp("engines"), "--emulate", "3") as door:
        yield door


def wait_for_the_end(door: FrontDoor) -> None:
    door.wait_until(lambda: door.samples()["conductor_picks_open"] == 0, "the end of every pick")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_conversation_stays_where_its_prefix_is(owner: FrontDoor, tmp_path: Path, workers: int) -> None:
    config = settings(tmp_path, owner, server={"workers": workers})
    with (
        front_door(tmp_path, "--config", config) as door,
        haproxy(tmp_path, urls(owner), door.url) as client,
    ):
        for _ in range(3):
            question = fresh()
            first = client.post("/v1/chat/completions", json=chat(question))
            assert first.status_code == 200, first.text
            answer = first.json()["choices"][0]["message"]["content"]
            wait_for_the_end(door)
            second = client.post("/v1/chat/completions", json=chat(question, answer, "And then?"))
            assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_000
            now = door.get(f"/v1/placements/{door.get('/v1/placements')['placements'][0]['placement_id']}")
            assert now["overlap_tokens"] > 1_000
            assert now["token_source"] == "local"
        with client.stream("POST", "/v1/chat/completions", json=chat(fresh(), stream=True)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert stream.status_code == 200
        assert lines[-1] == "data: [DONE]" and len(lines) > 5
        wait_for_the_end(door)
        assert door.samples()['conductor_picks_ended_total{how="predicted"}'] == 7
        picked = 'conductor_picks_total{code="200",endpoint="/v1/chat/completions",gateway="http"}'
        assert door.samples()[picked] == 7


def test_who_would_be_late_is_shed_and_the_rest_is_told_what_is_wrong(
    owner: FrontDoor, tmp_path: Path
) -> None:
    config = settings(tmp_path, owner, scheduling={"admission": {"rule": "early"}})
    with (
        front_door(tmp_path, "--config", config) as door,
        haproxy(tmp_path, urls(owner), door.url) as client,
    ):
        hurry = {"x-conductor-ttft-objective-ms": "0.1"}
        answer = client.post("/v1/chat/completions", json=chat(fresh()), headers=hurry)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "overloaded_prefill"
        assert int(answer.headers["retry-after"]) >= 1
        answer = client.post("/v1/chat/completions", json=chat("hello", model="other"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        answer = client.post("/v1/chat/completions", json=chat("hello", model="chat"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "alias_not_served")
        assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
        long = chat("hello", user="x" * 900_000)
        assert client.post("/v1/chat/completions", json=long).status_code == 200
        made = sum(
            count for name, count in door.samples().items() if name.startswith("conductor_picks_total")
        )
        longer = chat("hello", user="x" * 1_200_000)  # than HAProxy's buffer: it balances by itself
        assert client.post("/v1/chat/completions", json=longer).status_code in (200, 413)
        samples = door.samples().items()
        assert made == sum(count for name, count in samples if name.startswith("conductor_picks_total"))


def test_keys_are_those_of_the_front_door(owner: FrontDoor, tmp_path: Path) -> None:
    keys = [{"name": "a", "key_env": "TEST_KEY", "tenant": "t", "admin": True}]
    config = settings(tmp_path, owner, api_keys=keys)
    bearer = {"authorization": "Bearer secret-of-a"}
    with (
        front_door(tmp_path, "--config", config, env={"TEST_KEY": "secret-of-a"}, headers=bearer) as door,
        haproxy(tmp_path, urls(owner), door.url) as client,
    ):
        assert client.post("/v1/chat/completions", json=chat("hello")).status_code == 401
        assert client.post("/v1/chat/completions", json=chat("hello"), headers=bearer).status_code == 200


@pytest.mark.extended
def test_an_engine_that_dies_and_then_the_picker(tmp_path: Path) -> None:
    emulation = tmp_path / "engines.json"
    emulation.write_text(json.dumps({"emulation": {"cluster": "3", "restart_after_s": 600}}))
    with (
        front_door(tmp_path, "--config", str(emulation)) as owner,
        front_door(tmp_path, "--config", settings(tmp_path, owner, health={"interval_s": 600})) as door,
        haproxy(tmp_path, urls(owner), door.url) as client,
    ):
        question = fresh()
        assert client.post("/v1/chat/completions", json=chat(question)).status_code == 200
        wait_for_the_end(door)
        gone = door.get("/v1/placements")["placements"][0]["decode_instance"]
        os.kill(owner.engine_pids()[gone], signal.SIGKILL)
        answer = client.post("/v1/chat/completions", json=chat(question))
        assert answer.status_code == 200, answer.text
        assert door.get("/v1/placements")["placements"][0]["decode_instance"] == gone, "nobody has told it"
        assert door.stop() == 0
        for _ in range(6):
            assert client.post("/v1/chat/completions", json=chat(fresh())).status_code == 200
