"""Orders for the tiers of running emulated engines, and the KV events that tell of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq

PROMPT = list(range(100, 260))  # 10 blocks
END = b"\xff" * 8


@pytest.fixture(scope="module")
def one(emulator: Any) -> Any:
    return emulator("--speed", 20, "--kv-blocks", 64, "--host-blocks", 200)


@pytest.fixture(scope="module")
def other(emulator: Any) -> Any:
    return emulator("--speed", 20, "--kv-blocks", 64, "--host-blocks", 200)


def tiers(engine: Any, verb: str, tokens: list[int] | None = PROMPT, status: int = 200, **order: Any) -> Any:
    answer = engine.http.post(f"/kv_tiers/{verb}", json={"token_ids": tokens, **order})
    assert answer.status_code == status, answer.text
    return answer.json()["blocks"] if status == 200 else answer.json()["error"]


def complete(engine: Any, prompt: list[int]) -> int:
    """Run a request; how many of its tokens were cached."""
    answer = engine.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def told(engine: Any) -> dict[str, int]:
    """How many blocks each tier holds, as all events so far say."""
    held = {"GPU": Counter[int](), "CPU": Counter[int]()}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.rcvtimeo, socket.linger = 10_000, 0
        socket.connect(f"tcp://127.0.0.1:{engine.replay_port}")
        socket.send_multipart([b"", bytes(8)])
        while (frames := socket.recv_multipart())[2] != END:
            for event in msgspec.msgpack.decode(frames[3])[1]:
                if event["type"] == "BlockStored":
                    held[event["medium"]].update(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    held[event["medium"]].subtract(event["block_hashes"])
    assert not any(-tier for tier in held.values())
    return {medium: len(+tier) for medium, tier in held.items()}


def test_a_prefix_moves_between_tiers_and_engines(one: Any, other: Any) -> None:
    complete(one, PROMPT)
    assert (tiers(one, "held"), tiers(one, "held", tier="host")) == (10, 10)
    assert told(one) == {"GPU": 10, "CPU": 10}
    assert tiers(one, "evict", start=4) == 6
    assert (tiers(one, "held"), told(one)) == (4, {"GPU": 4, "CPU": 10})
    assert tiers(one, "load", stop=7) == 7  # from its own host tier
    assert told(one)["GPU"] == 7

    peer = f"http://127.0.0.1:{one.port}"
    assert tiers(other, "load", tier="host", peer=peer) == 10
    assert told(other) == {"GPU": 0, "CPU": 10}
    assert tiers(other, "load", peer=peer, peer_tier="device", start=2) == 5
    assert told(other) == {"GPU": 7, "CPU": 10}
    assert tiers(other, "load") == 10
    assert complete(other, [*PROMPT, 1]) == 160

    assert tiers(other, "evict", None, tier="host") == 10
    assert tiers(other, "load", tier="host") == 10  # down from the device
    assert tiers(other, "evict", None) == 10
    assert complete(other, [*PROMPT, 1]) == 160  # a request loads from the host by itself


def test_pinned_blocks_survive_others(one: Any) -> None:
    kept = list(range(1000, 1160))
    complete(one, kept)
    assert tiers(one, "pin", kept) == tiers(one, "pin", kept, tier="host") == 10
    for token in range(2000, 2007):
        complete(one, [token] * 800)
    assert tiers(one, "held", kept) == tiers(one, "held", kept, tier="host") == 10
    assert tiers(one, "unpin", kept) == tiers(one, "unpin", kept, tier="host") == 10
    assert tiers(one, "unpin", kept) == 0


def test_what_the_source_lost_does_not_arrive(one: Any, other: Any) -> None:
    lost = list(range(20_000, 20_160))
    assert tiers(other, "load", lost, peer=f"http://127.0.0.1:{one.port}") == 0
    assert tiers(other, "load", lost) == 0


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"stop": 11}, "among the 10 whole blocks"),
        ({"start": 3, "stop": 3}, "greater than start"),
        ({"rank": 1}, "ranks 0 to 0"),
        ({"tier": "disk"}, "tier"),
        ({"tokens": None}, "token_ids is required"),
        ({"token_id": 1}, "token_id"),
    ],
)
def test_orders_that_cannot_be(one: Any, order: dict[str, Any], says: str) -> None:
    tokens = order.pop("tokens", PROMPT)
    assert says in tiers(one, "load", tokens, 400, **order)["message"]


def test_engines_without_a_host_tier_and_peers_that_are_away(emulator: Any, free_port: int) -> None:
    plain = emulator("--speed", 20)
    assert "no host tier" in tiers(plain, "load", status=400, tier="host")["message"]
    assert (
        "does not answer" in tiers(plain, "load", status=502, peer=f"http://127.0.0.1:{free_port}")["message"]
    )
