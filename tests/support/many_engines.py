"""One process that answers as a thousand engines: each has a loopback address of its own, all the same port.

    python tests/support/many_engines.py PORT COUNT > cluster.yaml

Chats stream a few tokens at once; gauges are made up of the address, so that instances differ. No KV events.
"""

from __future__ import annotations

import json
import sys
from ipaddress import IPv4Address

import yaml
from aiohttp import web

MODEL = "many-8b"
_FIRST = int(IPv4Address("127.1.0.1"))
_ROLES = ("prefill", "decode", "mixed")


def cluster_file(port: int, count: int) -> str:
    """The configuration of a conductor in front of them, probing each every ten seconds."""
    instances = [
        {
            "id": f"{_ROLES[number % 3]}-{number:04}",
            "url": f"http://{IPv4Address(_FIRST + number)}:{port}",
            "role": _ROLES[number % 3],
        }
        for number in range(count)
    ]
    return yaml.safe_dump({"instances": instances, "health": {"interval_s": 10.0}})


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": MODEL, "max_model_len": 32_768}]})


async def metrics(request: web.Request) -> web.Response:
    number = int(IPv4Address(request.url.host or "127.1.0.1")) - _FIRST
    labels = f'{{model_name="{MODEL}",engine="0"}}'
    gauges = {
        "vllm:num_requests_running": number % 7,
        "vllm:num_requests_waiting": number % 2,
        "vllm:kv_cache_usage_perc": (number * 37 % 100) / 100,
    }
    text = "".join(f"# TYPE {name} gauge\n{name}{labels} {value}\n" for name, value in gauges.items())
    return web.Response(text=text, content_type="text/plain")


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    usage = {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104}
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "well"}, "finish_reason": "stop"}
        handed = {"kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1]}}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage, **handed}
        )
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for word in ("all", " is", " very", " well"):
        delta = {"id": "c", "choices": [{"index": 0, "delta": {"content": word}}]}
        await answer.write(f"data: {json.dumps(delta)}\n\n".encode())
    await answer.write(
        f"data: {json.dumps({'id': 'c', 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
    )
    return answer


def engines() -> web.Application:
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", lambda request: web.Response())
    app.router.add_post("/v1/chat/completions", chat)
    return app


if __name__ == "__main__":
    print(cluster_file(int(sys.argv[1]), int(sys.argv[2])), flush=True)
    sys.stdout.close()
    web.run_app(engines(), host="0.0.0.0", backlog=4096, port=int(sys.argv[1]), print=lambda *_: None)
