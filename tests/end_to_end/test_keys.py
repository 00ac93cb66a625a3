"""`conductor serve` and `conductor index` with keys: who gets in, and that no secret gets out."""

import base64
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from front_door_process import FrontDoor, conductor_command, free_port, front_door
from lmcache_server import LMCacheServer
from waiting import wait_for

MODEL = "emulated-8b"
ALICE, BOB, ROOT, TOKEN, WRONG = (
    "sk-alice-1a2b",
    "sk-bob-3c4d",
    "sk-root-5e6f",
    "the-admin-token-7g8h",
    "sk-wrong",
)
OPEN = {"/health", "/metrics"}


def config(tmp_path: Path, content: dict[str, object]) -> tuple[str, ...]:
    path = tmp_path / "conductor.yaml"
    path.write_text(yaml.safe_dump({"log": {"level": "debug", "format": "json"}, **content}))
    return "--config", str(path)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    keys = [
        {"name": "alice", "key": ALICE, "tenant": "research", "limits": {"requests_per_minute": 3}},
        {"name": "bob", "key_sha256": hashlib.sha256(BOB.encode()).digest().hex(), "models": ["other"]},
        {"name": "root", "key_env": "ROOT_KEY", "admin": True},
    ]
    folder = tmp_path_factory.mktemp("keys")
    content = {"api_keys": keys, "emulation": {"cluster": "2p2d", "speed": 10}}
    bearer = {"authorization": f"Bearer {ROOT}"}
    with front_door(folder, *config(folder, content), env={"ROOT_KEY": ROOT}, headers=bearer) as door:
        yield door


def client(door: FrontDoor, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{door.url}/v1", api_key=key, max_retries=0)


def ask(openai_client: openai.OpenAI, **more: object) -> object:
    messages = [{"role": "user", "content": "Hello!"}]
    return openai_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3, **more)  # type: ignore[call-overload]


def routes(url: str, headers: dict[str, str]) -> Iterator[tuple[str, str]]:
    document = httpx.get(f"{url}/openapi.json", headers=headers, trust_env=False).json()
    for path, operations in document["paths"].items():
        for method in operations:
            yield method, re.sub(r"\{\w+\}", "x", path)


def assert_closed(url: str, headers: dict[str, str], status: int, inference: set[str]) -> None:
    checked = 0
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
        for method, path in routes(url, headers):
            if path not in OPEN and path not in inference and not path.startswith("/v1/models"):
                assert http.request(method, path, json={}).status_code == status, (method, path)
                checked += 1
    assert checked > 10


def status_of(url: str, key: str) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    headers = {"x-api-key": key}
    return httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
    ).status_code


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_keys_are_read_again(tmp_path: Path, workers: int) -> None:
    """By the front door, by its workers, and by a router elsewhere."""
    routers_port, port = free_port(), free_port()
    server = {"workers": workers, "routers_port": routers_port, "admin_token": TOKEN}

    def written(*names_and_keys: tuple[str, str], **more: object) -> tuple[str, ...]:
        keys = [{"name": name, "key": key} for name, key in names_and_keys]
        emulation = {"cluster": "1", "speed": 10}
        return config(tmp_path, {"server": server, "api_keys": keys, "emulation": emulation, **more})

    def everywhere(key: str) -> list[int]:
        return [status_of(url, key) for url in (door.url, f"http://127.0.0.1:{port}") for _ in range(3)]

    bearer = {"authorization": f"Bearer {TOKEN}"}
    arguments = written(("alice", ALICE), ("bob", BOB))
    with front_door(tmp_path, *arguments, headers=bearer) as door, contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "router.log").open("wb"))
        router = subprocess.Popen(
            conductor_command("router", "--port", str(port), "--conductor", f"127.0.0.1:{routers_port}"),
            env=os.environ | {"CONDUCTOR_SERVER__ADMIN_TOKEN": TOKEN},
            stdout=log,
            stderr=log,
        )
        stack.callback(router.wait, 30)
        stack.callback(router.send_signal, signal.SIGINT)

        def accepts() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return status_of(f"http://127.0.0.1:{port}", ALICE) == 200
            return False

        door.wait_until(accepts, "the router's start")
        assert everywhere(BOB) == [200] * 6
        written(("alice", ALICE), ("root", ROOT), scheduling={"policy": "round_robin"})
        door.process.send_signal(signal.SIGHUP)
        door.wait_until(lambda: everywhere(BOB) == [401] * 6, "that the key is unknown everywhere")
        assert everywhere(ALICE) == everywhere(ROOT) == [200] * 6
        assert '"settings": ["scheduling"]' in door.log.read_text()
        for names, told in (
            ((("alice", ALICE), ("alice", ROOT)), "all stays as it was"),
            ((), "as they were"),
        ):
            written(*names)
            door.process.send_signal(signal.SIGHUP)
            door.wait_until(lambda told=told: told in door.log.read_text(), "a line that tells why")
            assert everywhere(ALICE) == [200] * 6 and everywhere(WRONG) == [401] * 6
        assert door.get("/v1/instances")["instances"]
        assert ROOT not in door.log.read_text()
        assert door.stop() == 0


INFERENCE = {
    *("/inference/v1/generate", "/generate"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/v1/rerank", "/rerank", "/v1/score", "/score", "/tokenize", "/detokenize"),
}


def test_right_and_wrong_keys(door: FrontDoor) -> None:
    with client(door, WRONG) as stranger:
        for stream in (False, True):
            with pytest.raises(openai.AuthenticationError) as refused:
                ask(stranger, stream=stream)
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    with client(door, ROOT) as known:
        assert ask(known).choices[0].message.content  # type: ignore[attr-defined]
        assert len(list(ask(known, stream=True))) > 1  # type: ignore[attr-defined]
        assert MODEL in [model.id for model in known.models.list()]
    with client(door, BOB) as elsewhere, pytest.raises(openai.PermissionDeniedError) as forbidden:
        ask(elsewhere)
    assert forbidden.value.code == "model_not_allowed"


def test_a_limit(door: FrontDoor) -> None:
    with client(door, ALICE) as limited:
        for left in ("2", "1", "0"):
            answer = limited.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1
            )
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        with pytest.raises(openai.RateLimitError) as refused:
            ask(limited)
        assert int(refused.value.response.headers["retry-after"]) >= 1
    metrics = door.http.get("/metrics").text
    assert 'conductor_tenant_requests_total{code="429",tenant="research"} 1.0' in metrics


def test_everything_that_administers_takes_an_admins_key(door: FrontDoor) -> None:
    assert_closed(door.url, {}, 401, INFERENCE)
    assert_closed(door.url, {"authorization": f"Bearer {WRONG}"}, 401, INFERENCE)
    assert_closed(door.url, {"x-api-key": BOB}, 403, INFERENCE)
    assert door.get("/v1/placements")["placements"]
    drained = door.http.delete("/v1/instances/nobody", params={"drain": "true"})
    assert drained.status_code == 404


def test_an_lmcache_server_brings_its_key_in_the_url(door: FrontDoor) -> None:
    host = door.url.removeprefix("http://")
    with LMCacheServer(f"http://lmcache:{ROOT}@{host}/lmcache", "node-0") as server:
        server.leave()
    wrong = httpx.put(f"http://lmcache:{WRONG}@{host}/lmcache/instances/node-1/heartbeat", trust_env=False)
    assert wrong.status_code == 401


def test_no_secret_gets_out(door: FrontDoor) -> None:
    door.http.post("/v1/placements", content=f'{{"model": "{ROOT}')
    shown = door.log.read_text() + door.http.get("/metrics").text
    shown += door.http.get("/v1/instances").text + door.http.get("/openapi.json").text
    assert '"level": "info"' in shown, "requests are logged"
    for secret in (ALICE, BOB, ROOT, WRONG):
        digest = hashlib.sha256(secret.encode()).hexdigest()
        encoded = base64.b64encode(f"lmcache:{secret}".encode()).decode()
        for form in (secret, digest, encoded):
            assert form not in shown


def test_inference_open_and_administration_closed(tmp_path: Path) -> None:
    arguments = config(tmp_path, {"emulation": {"cluster": "1"}})
    env = {"CONDUCTOR_SERVER__ADMIN_TOKEN": TOKEN}
    with front_door(tmp_path, *arguments, env=env, headers={"authorization": f"Bearer {TOKEN}"}) as door:
        with client(door, WRONG) as anybody:
            assert ask(anybody).choices  # type: ignore[attr-defined]
            assert MODEL in [model.id for model in anybody.models.list()]
        assert_closed(door.url, {}, 401, INFERENCE)
        (placement, *_) = door.get("/v1/placements")["placements"]
        assert door.get(f"/v1/placements/{placement['placement_id']}")["why"]
        assert TOKEN not in door.log.read_text()


def test_the_index_alone(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def written(*keys: str) -> tuple[str, ...]:
        entries = [{"name": key[3:], "key": key, "admin": True} for key in keys]
        return config(tmp_path, {"server": {"admin_token": TOKEN}, "api_keys": entries})

    arguments = written(ROOT)
    index = subprocess.Popen(
        conductor_command("index", "--port", str(port), *arguments), stderr=subprocess.PIPE
    )
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert_closed(url, {}, 401, set())
        query = {"model": "m", "token_ids": [1, 2], "block_size": 16}

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/query", json=query, headers=headers, trust_env=False).status_code

        assert [status(key) for key in (TOKEN, ROOT, ALICE)] == [200, 200, 401]
        written(ALICE)
        index.send_signal(signal.SIGHUP)
        wait_for(lambda: status(ROOT) == 401)
        assert [status(key) for key in (TOKEN, ROOT, ALICE)] == [200, 401, 200]
    finally:
        index.terminate()
        _, log = index.communicate(timeout=30)
    assert TOKEN.encode() not in log


def test_a_trace_is_replayed_with_a_key(door: FrontDoor, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 2, "hash_ids": [1]}\n' * 3)

    def replay(*more: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = conductor_command("replay", str(trace), "--url", door.url, *more)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | env)

    assert replay("--token", ROOT).returncode == 0
    assert "3 of 3 requests succeeded" in replay(CONDUCTOR_API_KEY=ROOT).stdout
    for refused in (replay(), replay("--token", WRONG)):
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "takes an API key: --token, or CONDUCTOR_API_KEY" in refused.stderr
    other = replay("--token", ROOT, "--model", "other")
    assert (other.returncode, f"served: {MODEL}" in other.stderr) == (2, True)
