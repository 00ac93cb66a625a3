"""TLS on both sides of the front door. Each event loop has a TLS of its own, so most tests run on both."""

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import uvloop
from certificates import Authority

from router import ApiKey, KeyRing, ServerTls, TlsError, engine_tls

CHAT = "/v1/chat/completions"
Scenario = Callable[[Any], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, cluster_type: Any) -> Run:
    def start(scenario: Scenario) -> None:
        async def whole() -> None:
            async with AsyncExitStack() as stack:
                await scenario(cluster_type(stack))

        (uvloop if request.param == "uvloop" else asyncio).run(whole())

    return start


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serving(authority: Authority, **options: Any) -> ServerTls:
    issued = authority.issue("door")
    return ServerTls(issued.certificate, issued.private_key, **options)


def test_openais_client_streams_over_https(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        trusted = authority.client()
        door = await cluster.door(
            [await cluster.engine("p")],
            [await cluster.engine("d")],
            tls=serving(authority).context,
            verify=trusted,
        )
        assert door.server.url.startswith("https://")
        http = httpx.AsyncClient(verify=trusted, trust_env=False)
        client = openai.AsyncOpenAI(
            base_url=f"{door.server.url}/v1", api_key="-", max_retries=0, http_client=http
        )
        async with client:
            ask = {"model": cluster.MODEL, "messages": [{"role": "user", "content": "x"}]}
            answer = await client.chat.completions.create(**ask)
            assert answer.choices[0].message.content == "hello"
            stream = await client.chat.completions.create(**ask, stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            assert text == "01234"
            assert [model.id async for model in client.models.list()] == [cluster.MODEL, "alias"]
        assert door.placements.open_placements == 0

    run(scenario)


def test_a_slow_client_pauses_the_engine(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        pieces, written = 800, 0
        piece = cluster.chunk(cluster.event("x" * 60_000))

        async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            writer.write(cluster.STREAM_HEAD)
            for _ in range(pieces):
                writer.write(piece)
                await writer.drain()
                written += len(piece)
            writer.write(b"0\r\n\r\n")

        engine_certificate = authority.issue("engine")
        engine = await cluster.engine(respond=respond, tls=authority.server(engine_certificate))
        door = await cluster.door(
            [engine], tls=serving(authority).context, engine_tls=engine_tls(ca=authority.file)
        )
        connection = await door.connect(authority.client())
        connection.writer.transport.pause_reading()
        connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
        await cluster.wait_until(lambda: written > 0)
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.3)
        assert written < 30_000_000, "of 48 MB"
        connection.writer.transport.resume_reading()
        await connection.reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < pieces * len(piece) + 5:
            received += len(await connection.reader.read(1 << 20))
        assert received == pieces * len(piece) + 5
        await cluster.wait_until(lambda: door.placements.open_placements == 0)
        await connection.close()

    run(scenario)


def test_stopping_finishes_streams_and_waits_for_no_idle_client(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        go = asyncio.Event()

        async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
            await writer.drain()
            await go.wait()
            writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()

        trusted = authority.client()
        door = await cluster.door(
            [await cluster.engine(respond=respond)],
            tls=serving(authority).context,
            shutdown_timeout_s=60,
        )

        def idle() -> ssl.SSLSocket:
            """Reads nothing behind its answer, so it never learns that the connection ends."""
            plain = socket.create_connection(("127.0.0.1", door.port))
            wrapped = trusted.wrap_socket(plain, server_hostname="127.0.0.1")
            wrapped.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert wrapped.recv(4096).startswith(b"HTTP/1.1 200")
            return wrapped

        sleeper = await asyncio.to_thread(idle)
        connection = await door.connect(trusted)
        connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
        await connection.reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(20):
            stopping = asyncio.ensure_future(door.server.stop())
            await asyncio.sleep(0.3)
            go.set()
            assert (await connection.reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            await stopping
        sleeper.close()
        await connection.close()

    run(scenario)


def test_clients_without_a_certificate_are_shut_out(run: Run, authority: Authority, tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        members = Authority(tmp_path, "members")
        tls = serving(authority, client_ca=members.file)
        known = authority.client(members.issue("alice"))
        door = await cluster.door([await cluster.engine()], tls=tls.context, verify=known)
        assert (await door.chat()).status_code == 200
        for stranger in (authority.client(), authority.client(authority.issue("mallory"))):
            async with httpx.AsyncClient(
                base_url=door.server.url, verify=stranger, trust_env=False
            ) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")
        assert (await door.chat()).status_code == 200

    run(scenario)


def test_versions_and_other_protocols(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        tls = serving(authority, minimum_version=ssl.TLSVersion.TLSv1_3)
        door = await cluster.door([await cluster.engine()], tls=tls.context, verify=authority.client())
        old = authority.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):  # a TLS alert, or a connection that is closed first
            await door.connect(old)
        plain = await door.connect()
        plain.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not (await plain.reader.read()).startswith(b"HTTP/1.1 200")
        await plain.close()
        assert (await door.chat()).status_code == 200

    run(scenario)


def test_a_stranger_is_told_before_sending_the_body(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        keys = KeyRing([ApiKey("a", hashlib.sha256(b"k").digest(), "t")])
        door = await cluster.door(
            [await cluster.engine()], tls=serving(authority).context, keys=keys, linger_s=0.1
        )
        connection = await door.connect(authority.client())
        connection.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" % CHAT.encode())
        head, _ = await connection.response()
        assert head.startswith(b"HTTP/1.1 401")
        assert await connection.reader.read() == b""
        await connection.close()

    run(scenario)


async def test_a_renewed_certificate(cluster: Any, authority: Authority) -> None:
    issued = authority.issue("door")
    tls = ServerTls(issued.certificate, issued.private_key)
    door = await cluster.door([await cluster.engine()], tls=tls.context, verify=authority.client())

    async def shown() -> bytes:
        connection = await door.connect(authority.client())
        peer = connection.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        await connection.close()
        return peer

    async def chat() -> None:
        assert (await door.chat()).status_code == 200

    first = await shown()
    await chat()
    authority.issue("door")
    assert await shown() == first
    tls.reload()
    second = await shown()
    assert second != first
    await chat()
    issued.certificate.write_bytes(authority.issue("other").certificate.read_bytes())
    with pytest.raises(TlsError, match=r"private_key.*does not belong"):
        tls.reload()
    assert await shown() == second
    await chat()


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    text = tmp_path / "text"
    text.write_text("nothing")
    secret = tmp_path / "encrypted"
    secret.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\n"
        "MIGjMF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBBdl8m+0NlrtJHFJLpA\n"
        "-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    missing = tmp_path / "missing"
    for certificate, key, client_ca, says in (
        (missing, good.private_key, None, "^certificate: cannot read .*missing: No such file"),
        (good.certificate, missing, None, "^private_key: cannot read"),
        (text, good.private_key, None, "^certificate: .*text holds no certificate"),
        (good.certificate, text, None, "^private_key: .*text holds no private key"),
        (good.certificate, other.private_key, None, "^private_key: .*does not belong to the certificate"),
        (good.certificate, good.private_key, missing, "^client_ca: cannot read"),
        (good.certificate, good.private_key, text, "^client_ca: .*holds no certificate"),
        (good.certificate, tmp_path, None, "^private_key: cannot read"),
        (good.certificate, secret, None, "^private_key: "),
    ):
        with pytest.raises(TlsError, match=says):
            ServerTls(certificate, key, client_ca=client_ca)
    for field, options in (
        ("ca", {"ca": text}),
        ("certificate", {"certificate": missing}),
        ("private_key", {"certificate": good.certificate, "private_key": other.private_key}),
    ):
        with pytest.raises(TlsError, match=f"^{field}: "):
            engine_tls(**options)
    engine_tls(certificate=good.certificate, private_key=good.private_key)


def test_engines_over_https(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        context = authority.server(authority.issue("engine"))
        prefill, decode = await cluster.engine("p", tls=context), await cluster.engine("d", tls=context)
        door = await cluster.door([prefill], [decode], engine_tls=engine_tls(ca=authority.file))
        for stream in (False, True, False):
            assert (await door.chat(stream=stream)).status_code == 200
        assert len(prefill.received) == len(decode.received) == 3
        assert prefill.connections == decode.connections == 1, "connections are used again"

    run(scenario)


def test_engines_that_are_not_trusted(run: Run, authority: Authority, tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        named_otherwise = await cluster.engine("n", tls=authority.server(authority.issue("n", "example.com")))
        stranger = Authority(tmp_path, "strangers")
        unknown = await cluster.engine("u", tls=stranger.server(stranger.issue("u")))
        plain = await cluster.engine("plain")
        for engine, options, says in (
            (named_otherwise, {"ca": authority.file}, "IP address mismatch"),
            (unknown, {"ca": authority.file}, "certificate"),
            (unknown, {}, "certificate"),
        ):
            door = await cluster.door([engine], engine_tls=engine_tls(**options), max_attempts=1)
            response = await door.chat()
            assert response.status_code == 502
            message = response.json()["error"]["message"]
            assert says in message and "routing.engine_tls" in message
            assert not engine.received, "nothing is sent"
            trusting = await cluster.door([engine], engine_tls=engine_tls(verify=False))
            assert (await trusting.chat()).status_code == 200
            engine.received.clear()
        speaks_http = await cluster.door([plain])
        target = replace(plain.target, url=f"https://127.0.0.1:{speaks_http.port}", port=speaks_http.port)
        target = replace(target, tls=True)
        door = await cluster.door([target], max_attempts=1)
        response = await door.chat()
        assert response.status_code == 502 and "cannot connect to 127.0.0.1" in response.text

    run(scenario)


def test_an_engine_that_asks_for_a_certificate(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        context = authority.server(authority.issue("engine"), client_ca=authority.file)
        engine = await cluster.engine(tls=context)
        own = authority.issue("router")
        both = own.certificate.with_name("both.pem")
        both.write_bytes(own.private_key.read_bytes() + own.certificate.read_bytes())
        for options, status in (
            ({}, 502),
            ({"certificate": own.certificate, "private_key": own.private_key}, 200),
            ({"certificate": both}, 200),
        ):
            tls = engine_tls(ca=authority.file, **options)
            door = await cluster.door([engine], engine_tls=tls, max_attempts=1)
            assert (await door.chat()).status_code == status

    run(scenario)


def test_an_engine_that_dies_in_the_middle(run: Run, authority: Authority) -> None:
    async def scenario(cluster: Any) -> None:
        async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()

        engine = await cluster.engine(respond=respond, tls=authority.server(authority.issue("engine")))
        door = await cluster.door([engine], engine_tls=engine_tls(ca=authority.file))
        response = await door.chat(stream=True)
        assert "stream_interrupted" in response.text and response.text.endswith("data: [DONE]\n\n")
        assert door.placements.open_placements == 0

    run(scenario)
