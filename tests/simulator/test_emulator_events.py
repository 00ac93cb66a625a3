"""KV events of a running emulator: live, replayed, and in every encoding."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from simulator.block_hash import HashChain, digest_as_int

WAIT_MS = 10_000
END = [b"", b"", b"\xff" * 8, b""]


@contextmanager
def subscribed(engine: Any) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber that is known to be connected: it has seen a batch."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.subscribe(b"kv@")
        socket.rcvtimeo = WAIT_MS
        socket.connect(f"tcp://127.0.0.1:{engine.event_port}")
        assert monitor.poll(WAIT_MS)
        monitor.close()
        # The subscription itself travels after the handshake; batches until the first seen may be lost.
        for attempt in range(500):
            complete(engine, [4000 - attempt % 7] * 32 + [attempt])
            if socket.poll(20):
                break
        while socket.poll(50):
            socket.recv_multipart()
        yield socket


def complete(engine: Any, prompt: list[int], **body: Any) -> Any:
    answer = engine.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def replayed(engine: Any, start: int, *, rank: int = 0) -> list[list[bytes]]:
    """Everything the replay socket sends for this start, end marker included."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.rcvtimeo = WAIT_MS
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{engine.replay_port + rank}")
        socket.send_multipart([b"garbage"])  # dropped without an answer
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        frames = [socket.recv_multipart()]
        while frames[-1] != END:
            frames.append(socket.recv_multipart())
        return frames


def events_of(engine: Any, *, rank: int = 0) -> list[Any]:
    batches = [msgspec.msgpack.decode(frames[3]) for frames in replayed(engine, 0, rank=rank)[:-1]]
    assert all(batch[2] == rank for batch in batches)
    return [event for batch in batches for event in batch[1]]


def test_a_stored_block_as_vllm_publishes_it(engine: Any) -> None:
    with subscribed(engine) as socket:
        prompt = list(range(1000, 1040))
        complete(engine, prompt, cache_salt="tenant", session_id="s1")
        topic, number, payload = socket.recv_multipart()
    timestamp_s, events, rank = msgspec.msgpack.decode(payload)
    hashes = [digest_as_int(digest) for digest in HashChain(prompt, 16, "tenant").digests(2)]
    assert topic.decode() == f"kv@127.0.0.1:{engine.port}@{engine.model}"
    assert len(number) == 8
    assert timestamp_s > 1e9 and rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": prompt[:32],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["tenant"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "session_id": "s1",
        }
    ]


def test_a_reset_is_announced_with_the_next_step_only(engine: Any) -> None:
    with subscribed(engine) as socket:
        complete(engine, [41] * 20)
        socket.recv_multipart()
        assert engine.http.post("/reset_prefix_cache").status_code == 200
        assert not socket.poll(200)
        usage = complete(engine, [41] * 20)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        events = msgspec.msgpack.decode(socket.recv_multipart()[2])[1]
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]
    assert events[0] == {"type": "AllBlocksCleared"}


def test_replay_gives_what_was_published_from_any_start(emulator: Any) -> None:
    engine = emulator("--speed", 20)
    for token in range(5):
        complete(engine, [token] * 20)
    frames = replayed(engine, 0)
    assert [int.from_bytes(batch[2], "big") for batch in frames[:-1]] == [0, 1, 2, 3, 4]
    assert {batch[1].decode() for batch in frames[:-1]} == {f"kv@127.0.0.1:{engine.port}@{engine.model}"}
    assert replayed(engine, 3) == frames[3:]
    assert replayed(engine, 99) == [END]


def test_the_replay_buffer_is_bounded(emulator: Any) -> None:
    engine = emulator("--speed", 20, "--replay-buffer-steps", 2)
    for token in range(5):
        complete(engine, [token] * 20)
    assert [int.from_bytes(batch[2], "big") for batch in replayed(engine, 0)[:-1]] == [3, 4]


@pytest.mark.parametrize("batched", [False, True])
def test_evictions_balance_the_stores(emulator: Any, batched: bool) -> None:
    """A small cache, aligned prompts (second copies) and growing answers: counts never go below zero."""
    options = ["--batch-removals"] if batched else []
    engine = emulator("--speed", 50, "--kv-blocks", 24, *options)
    for round_ in range(12):
        complete(engine, [round_ % 4] * 64, max_tokens=40, ignore_eos=True)
    resident: Counter[int] = Counter()
    stores = removals = 0
    for event in events_of(engine):
        if event["type"] == "BlockStored":
            resident.update(event["block_hashes"])
            stores += len(event["block_hashes"])
        else:
            assert event["medium"] == "GPU" and event["group_idx"] == 0
            assert batched or len(event["block_hashes"]) == 1
            resident.subtract(event["block_hashes"])
            removals += len(event["block_hashes"])
        assert not -resident or event["type"] == "BlockRemoved"
    assert removals > 0 and stores - removals == resident.total() <= 24
    assert not -resident


@pytest.mark.parametrize(("hash_encoding", "kind"), [("int", int), ("signed", int), ("bytes", bytes)])
@pytest.mark.parametrize("event_encoding", ["map", "array"])
def test_encodings(emulator: Any, event_encoding: str, hash_encoding: str, kind: type) -> None:
    engine = emulator("--speed", 20, "--event-encoding", event_encoding, "--hash-encoding", hash_encoding)
    prompt = list(range(2000, 2100))
    complete(engine, prompt)
    complete(engine, prompt[:48] + [7] * 20)
    first, second = events_of(engine)
    if event_encoding == "array":
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        first, second = (dict(zip(names, event, strict=True)) for event in (first, second))
    digests = HashChain(prompt, 16).digests(6)
    expected: list[Any] = list(digests)
    if kind is int:
        signed = hash_encoding == "signed"
        expected = [int.from_bytes(digest[-8:], "big", signed=signed) for digest in digests]
    assert first["block_hashes"] == expected
    assert (first["parent_block_hash"], second["parent_block_hash"]) == (None, expected[2])
    assert first["token_ids"] == prompt[:96] and first["medium"] == "GPU"


def test_hits_are_reported_again_on_request(engine: Any) -> None:
    complete(engine, [43] * 40)
    with subscribed(engine) as socket:
        complete(engine, [43] * 40, vllm_xargs={"kv_cache_report_mode": "full"})
        events = msgspec.msgpack.decode(socket.recv_multipart()[2])[1]
    assert [len(event["block_hashes"]) for event in events] == [2]


def test_the_event_sources_are_discoverable(engine: Any) -> None:
    assert engine.http.get("/kv_event_sources").json() == {
        "0": {
            "endpoint": f"tcp://*:{engine.event_port}",
            "replay_endpoint": f"tcp://*:{engine.replay_port}",
            "buffer_steps": 10_000,
            "topic": f"kv@127.0.0.1:{engine.port}@{engine.model}",
        }
    }
