"""`conductor serve` behind TLS, and before engines behind TLS."""

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import yaml
from certificates import Authority, Identity
from front_door_process import conductor_command, front_door

MODEL = "emulated-8b"


def written(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


def as_config(identity: Identity) -> dict[str, str]:
    return {"certificate": str(identity.certificate), "private_key": str(identity.private_key)}


def shown(port: int, trusted: ssl.SSLContext) -> bytes | None:
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trusted.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)


@pytest.mark.extended
@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_over_https_and_a_renewed_certificate(tmp_path: Path, workers: int) -> None:
    authority = Authority(tmp_path)
    trusted = authority.client()
    tls = as_config(authority.issue("door"))
    server = {"tls": tls, "workers": workers, "cors": {"origins": "https://chat.example.com"}}
    file = written(tmp_path, "conductor.yaml", {"server": server, "emulation": {"cluster": "2p2d"}})
    with front_door(tmp_path, "--config", file, tls=trusted) as door:
        assert door.url.startswith("https://")
        http = httpx.Client(verify=trusted, trust_env=False)
        with openai.OpenAI(base_url=f"{door.url}/v1", api_key="-", http_client=http) as client:
            for _ in range(2):
                stream = client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "x"}],
                    stream=True,
                    max_tokens=20,
                )
                assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        answer = door.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 2},
            headers={"origin": "https://chat.example.com"},
        )
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        port = urlsplit(door.url).port
        assert port is not None
        first = shown(port, trusted)
        authority.issue("door")
        door.process.send_signal(signal.SIGHUP)
        door.wait_until(lambda: shown(port, trusted) != first, "the renewed certificate")
        Path(tls["private_key"]).write_text("nothing")
        door.process.send_signal(signal.SIGHUP)
        door.wait_until(lambda: "server.tls.private_key" in door.log.read_text(), "a line in the log")
        assert door.get("/health") == {"status": "ok"}
        with contextlib.suppress(httpx.TransportError):
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code != 200
        assert door.stop() == 0


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = as_config(authority.issue("a")) | {"private_key": str(authority.issue("b").private_key)}
    file = written(tmp_path, "conductor.yaml", {"server": {"tls": tls}, "emulation": {"cluster": "1"}})
    ended = subprocess.run(
        conductor_command("serve", "--config", file), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert "server.tls.private_key" in ended.stderr and "does not belong" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextmanager
def behind_tls(port: int, tls: ssl.SSLContext) -> Iterator[int]:
    """A port that speaks TLS before ``port`` of this machine."""
    started, stop = threading.Event(), threading.Event()
    ports: list[int] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await asyncio.to_thread(stop.wait)
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(10)
        yield ports[0]
    finally:
        stop.set()
        thread.join()


@pytest.mark.extended
def test_engines_over_https(tmp_path: Path) -> None:
    """An emulated engine behind TLS with client certificates: probed, tokenized by, asked, its events followed."""
    authority = Authority(tmp_path)
    terminated = authority.server(authority.issue("engine"), client_ca=authority.file)
    with front_door(tmp_path, "--emulate", "1") as owner:
        (emulated,) = owner.instances().values()
        with behind_tls(int(urlsplit(emulated["url"]).port or 0), terminated) as port:
            to_engines = {"ca": str(authority.file), **as_config(authority.issue("router"))}
            engine = {"id": "secure", "url": f"https://127.0.0.1:{port}"}
            file = written(
                tmp_path, "secure.yaml", {"routing": {"engine_tls": to_engines}, "instances": [engine]}
            )
            with front_door(tmp_path, "--config", file) as door:
                assert door.instances()["secure"]["url"] == engine["url"]
                with openai.OpenAI(base_url=f"{door.url}/v1", api_key="-", max_retries=0) as client:
                    ask = {"model": MODEL, "messages": [{"role": "user", "content": "x " * 300}]}
                    for _ in range(2):
                        stream = client.chat.completions.create(**ask, stream=True, max_tokens=5)
                        assert list(stream)
                    answer = client.chat.completions.with_raw_response.create(**ask, max_tokens=5)
                placement = door.get(f"/v1/placements/{answer.headers['x-conductor-placement-id']}")
                assert placement["token_source"] == "engine"
                assert int(answer.headers["x-conductor-overlap-tokens"]) > 0
