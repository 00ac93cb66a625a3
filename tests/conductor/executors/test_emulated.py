"""What the executor of emulated engines takes on; that it does it shows at the running front door."""

from __future__ import annotations

import httpx
import pytest

from cache_index import Holder, Tier
from conductor.actions import ActionKind, Place
from conductor.executors import EmulatedExecutor

URLS = {"a": "http://a:1", "b": "http://b:1", "c": "http://c:1"}


def place(name: str, tier: Tier) -> Place:
    return Place(Holder(name), tier)


A, A_HOST = place("a", Tier.DEVICE), place("a", Tier.HOST)
B_HOST, C, C_HOST = place("b", Tier.HOST), place("c", Tier.DEVICE), place("c", Tier.HOST)


@pytest.mark.parametrize(
    ("kind", "source", "target", "able"),
    [
        (ActionKind.PROMOTE, A_HOST, A, True),
        (ActionKind.PREFETCH, A_HOST, A, True),
        (ActionKind.PREFETCH, A, A_HOST, False),
        (ActionKind.PREFETCH, None, A, False),
        (ActionKind.DEMOTE, A, A_HOST, True),
        (ActionKind.DEMOTE, A_HOST, A, False),
        (ActionKind.REPLICATE, A, B_HOST, True),
        (ActionKind.REPLICATE, A_HOST, A, False),
        (ActionKind.MOVE, B_HOST, C, True),
        (ActionKind.MOVE, A, C_HOST, False),  # it has no host tier
        (ActionKind.MOVE, A, place("a", Tier.DISK), False),
        (ActionKind.REPLICATE, place("x", Tier.DEVICE), A, False),
        (ActionKind.EVICT, None, A_HOST, True),
        (ActionKind.PIN, None, C, True),
        (ActionKind.COMPRESS, None, A, False),
    ],
)
async def test_what_it_can(kind: ActionKind, source: Place | None, target: Place, able: bool) -> None:
    async with httpx.AsyncClient() as client:
        executor = EmulatedExecutor(client, URLS, frozenset("ab"))
        assert executor.can(kind, source, target) is able
