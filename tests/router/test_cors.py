"""Web pages of other origins: what browsers are told, on spliced answers, errors and the REST API alike."""

import asyncio
import hashlib
from typing import Any

import pytest
from fastapi import APIRouter

from router import ApiKey, CorsPolicy, KeyRing

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
ONE_PAGE = CorsPolicy(frozenset((PAGE,)))
ANY_PAGE = CorsPolicy(None)


def told(response: Any) -> dict[str, str]:
    return {
        name.removeprefix("access-control-"): value
        for name, value in response.headers.multi_items()
        if name.startswith("access-control-")
    }


def keys() -> KeyRing:
    return KeyRing([ApiKey("a", hashlib.sha256(b"secret").digest(), "t")])


async def test_browsers_are_told_nothing_by_default(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    for response in (
        await door.client.post(CHAT, json=cluster.chat_document(), headers={"origin": PAGE}),
        await door.client.get("/v1/models", headers={"origin": PAGE}),
    ):
        assert response.status_code == 200
        assert not told(response) and "vary" not in response.headers


@pytest.mark.parametrize("streamed", [False, True])
async def test_spliced_answers(cluster: Any, streamed: bool) -> None:
    door = await cluster.door([await cluster.engine()], cors=ONE_PAGE)
    body = cluster.chat_document(stream=streamed)
    for origin, allowed in ((PAGE, True), ("https://evil.example", False), (None, False)):
        headers = {} if origin is None else {"origin": origin}
        response = await door.client.post(CHAT, json=body, headers=headers)
        assert response.status_code == 200
        assert response.headers["vary"] == "Origin"
        assert told(response).get("allow-origin") == (origin if allowed else None)
        assert ("x-request-id" in told(response).get("expose-headers", "")) == allowed
        assert "allow-credentials" not in told(response)


async def test_errors_before_and_after_the_body_is_read(cluster: Any) -> None:
    async def bad(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b'{"error":{}}', status="400 Bad Request"))

    door = await cluster.door([await cluster.engine(respond=bad)], cors=ONE_PAGE, keys=keys())
    key = {"authorization": "Bearer secret"}
    for headers, body, status in (
        ({}, cluster.chat_document(), 401),
        (key, {"model": "unknown", "messages": [{"role": "user", "content": "x"}]}, 404),
        (key, {"model": 1}, 400),
        (key, cluster.chat_document(), 400),
    ):
        response = await door.client.post(CHAT, json=body, headers={"origin": PAGE, **headers})
        assert (response.status_code, told(response)["allow-origin"]) == (status, PAGE)


async def test_what_an_engine_says_of_origins_is_dropped(cluster: Any) -> None:
    async def any_page(request: Any, writer: asyncio.StreamWriter) -> None:
        extra = b"Access-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\nx-kept: 1\r\n"
        writer.write(cluster.json_response(b"{}", extra=extra))

    engine = await cluster.engine(respond=any_page)
    door = await cluster.door([engine], cors=ONE_PAGE)
    for origin in (PAGE, "https://evil.example"):
        response = await door.client.post(CHAT, json=cluster.chat_document(), headers={"origin": origin})
        assert response.headers.get_list("access-control-allow-origin") == ([PAGE] if origin == PAGE else [])
        assert "allow-credentials" not in told(response)
        assert response.headers["x-kept"] == "1"


async def test_the_rest_api_and_its_errors(cluster: Any) -> None:
    broken = APIRouter()

    @broken.get("/broken")
    def fail() -> None:
        raise RuntimeError("on purpose")

    door = await cluster.door([await cluster.engine()], cors=ONE_PAGE, routers=[broken])
    for path, status in (("/v1/models", 200), ("/health", 200), ("/nowhere", 404), ("/broken", 500)):
        response = await door.client.get(path, headers={"origin": PAGE})
        assert (response.status_code, told(response)["allow-origin"]) == (status, PAGE), path
        other = await door.client.get(path, headers={"origin": "https://evil.example"})
        assert "allow-origin" not in told(other)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/placements"])
async def test_browsers_ask_beforehand_without_a_key(cluster: Any, path: str) -> None:
    door = await cluster.door([await cluster.engine()], cors=ONE_PAGE, keys=keys())
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    response = await door.client.options(path, headers=asked)
    assert response.status_code == 200
    answer = told(response)
    assert answer["allow-origin"] == PAGE
    assert answer["allow-methods"] == "GET, POST"
    assert "x-stainless-lang" in answer["allow-headers"]
    assert answer["max-age"] == "600"
    refused = await door.client.options(path, headers={**asked, "access-control-request-method": "DELETE"})
    assert refused.status_code == 400
    stranger = await door.client.options(path, headers={**asked, "origin": "https://evil.example"})
    assert stranger.status_code == 400 and "allow-origin" not in told(stranger)
    assert (await door.client.options(path)).status_code == 401, "this is no question of a browser"


async def test_only_listed_headers(cluster: Any) -> None:
    policy = CorsPolicy(frozenset((PAGE,)), headers=("authorization", "x-api-key"), max_age_s=5)
    door = await cluster.door([await cluster.engine()], cors=policy)
    for asked, status in (("authorization", 200), ("x-api-key, content-type", 200), ("x-other", 400)):
        headers = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": asked,
        }
        assert (await door.client.options(CHAT, headers=headers)).status_code == status, asked


async def test_every_page(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()], cors=ANY_PAGE)
    for response in (
        await door.client.post(CHAT, json=cluster.chat_document(), headers={"origin": PAGE}),
        await door.client.get("/v1/models", headers={"origin": PAGE}),
    ):
        assert told(response)["allow-origin"] == "*"


async def test_credentials_are_allowed_to_listed_pages(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()], cors=CorsPolicy(frozenset((PAGE,)), credentials=True))
    for response in (
        await door.client.post(CHAT, json=cluster.chat_document(), headers={"origin": PAGE}),
        await door.client.get("/v1/models", headers={"origin": PAGE}),
    ):
        assert told(response)["allow-credentials"] == "true"
