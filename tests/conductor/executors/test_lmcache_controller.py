"""The classic controller's executor, against bodies and answers of its OpenAPI description."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from tier_actions import host, order, prefix_of

from cache_index import Holder, Tier
from conductor.actions import ActionKind, ExecutionError, Place
from conductor.executors import LMCacheControllerExecutor

TOKENS = list(range(600))
URL = "http://controller:9000"


class Controller:
    def __init__(self, status: int = 200, **answer: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._status, self._answer = status, answer

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, orjson.loads(request.content)))
        return httpx.Response(self._status, json={"event_id": "e", **self._answer})

    @property
    def executor(self) -> LMCacheControllerExecutor:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return LMCacheControllerExecutor(client, URL, {"p0": "lm0", "p1": "lm1"})


@pytest.mark.parametrize(
    ("kind", "source", "target", "able"),
    [
        (ActionKind.REPLICATE, host("p0"), host("p1"), True),
        (ActionKind.MOVE, host("p0"), host("p1"), True),
        (ActionKind.MOVE, host("p0"), Place(Holder("p1"), Tier.DISK), False),
        (ActionKind.MOVE, host("p0"), host("p0"), False),
        (ActionKind.MOVE, host("p9"), host("p1"), False),
        (ActionKind.PIN, None, host("p1"), True),
        (ActionKind.UNPIN, None, host("p1"), False),
        (ActionKind.PREFETCH, host("p0"), host("p1"), False),
        (ActionKind.COMPRESS, None, Place(Holder("p0"), Tier.DISK), True),
        (ActionKind.EVICT, None, Place(Holder("p0"), Tier.DEVICE), False),
    ],
)
def test_what_it_can(kind: ActionKind, source: Place | None, target: Place, able: bool) -> None:
    assert Controller().executor.can(kind, source, target) is able


@pytest.mark.parametrize(("kind", "copies"), [(ActionKind.REPLICATE, True), (ActionKind.MOVE, False)])
async def test_moves(kind: ActionKind, copies: bool) -> None:
    controller = Controller(num_tokens=512)
    action = order(kind, prefix_of(TOKENS, "m"), host("p1"), source=host("p0"))
    assert await controller.executor.execute(action) == 32
    assert controller.asked == [
        (
            "/move",
            {
                "old_position": ["lm0", "LocalCPUBackend"],
                "new_position": ["lm1", "LocalCPUBackend"],
                "tokens": TOKENS[:592],
                "should_copy": copies,
            },
        )
    ]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (ActionKind.PIN, {}),
        (ActionKind.COMPRESS, {"method": "cachegen"}),
        (ActionKind.DECOMPRESS, {"method": "cachegen"}),
    ],
)
async def test_in_place(kind: ActionKind, extra: dict[str, str]) -> None:
    controller = Controller(num_tokens=256)
    assert await controller.executor.execute(order(kind, prefix_of(TOKENS, "m"), host("p0"))) == 16
    [(path, body)] = controller.asked
    assert path == f"/{kind}"
    assert body == {"instance_id": "lm0", "location": "LocalCPUBackend", "tokens": TOKENS[:592], **extra}


async def test_clearing() -> None:
    controller = Controller(num_tokens=9999)
    await controller.executor.execute(order(ActionKind.EVICT, None, Place(Holder("p0"), Tier.DISK)))
    assert controller.asked == [("/clear", {"instance_id": "lm0", "location": "LocalDiskBackend"})]
    with pytest.raises(ExecutionError, match="no single prefix"):
        await controller.executor.execute(order(ActionKind.EVICT, prefix_of(TOKENS, "m"), host("p0")))


async def test_an_instance_that_it_does_not_know() -> None:
    with pytest.raises(ExecutionError, match="registered with the controller") as error:
        await Controller(500).executor.execute(order(ActionKind.PIN, prefix_of(TOKENS, "m"), host("p0")))
    assert not error.value.retryable


async def test_questions() -> None:
    controller = Controller(layout_info={"lm0": ["LocalCPUBackend", 512]}, error_codes={"w": 0})
    assert await controller.executor.lookup(TOKENS) == {"lm0": ("LocalCPUBackend", 512)}
    assert await controller.executor.health("p0") == {"w": 0}
    assert controller.asked[1] == ("/health", {"instance_id": "lm0"})
