"""LMCache servers that report to us as to their coordinator, over real HTTP."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

import blake3
import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import CacheIndex, Holder, Namespace, Tier
from cache_index.lmcache import make_lmcache_router
from cache_index.lmcache_directory import DEPARTED_S, LMCacheDirectory, server_holder, shared_holder
from cache_index.lmcache_keys import ChunkChain, KvRank, chunk_hashes, chunk_keys, index_key
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch

CHUNK = 8
MODEL = "org/tiny"
TOKENS = [*range(8), *range(100_000, 100_008), *range(50, 58), 1, 2]
SERVER = server_holder("mp-1")
ONE = KvRank(1, 0, 1, 0).pack()
GOLDEN = [  # of the first two chunks
    "74bf0cfc4ece26bc2969917f00888658f77086248591faeb900a28ded9f86a82",
    "efe3c90ba619cbcadbdf8d6af8493c518d6c9e8cc809ea8d9d726781ded13670",
]


def test_the_chain_is_the_one_that_lmcache_computes() -> None:
    """Golden values computed with LMCache 0.5.6's own hasher."""
    hashes = chunk_hashes(np.array(TOKENS, np.uint32), CHUNK)
    assert [each.hex() for each in hashes[:2]] == GOLDEN
    assert len(hashes) == 3
    assert chunk_keys(np.array(TOKENS, np.uint32), CHUNK).tolist() == [index_key(each) for each in hashes]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_any_chain_follows_the_definition(tokens: list[int], chunk_tokens: int) -> None:
    previous = blake3.blake3(struct.pack(">q", 0) + struct.pack(">I", 0)).digest()
    expected = []
    for start in range(0, len(tokens) // chunk_tokens * chunk_tokens, chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        previous = blake3.blake3(previous + struct.pack(f">{chunk_tokens}I", *chunk)).digest()
        expected.append(previous)
    assert chunk_hashes(np.array(tokens, np.uint32), chunk_tokens) == expected


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 12), max_size=5))
def test_a_chain_may_be_asked_for_in_pieces(tokens: list[int], asked: list[int]) -> None:
    array = np.array(tokens, np.uint32)
    chain, whole = ChunkChain(array, 4), chunk_keys(array, 4)
    for chunks in asked:
        assert chain.keys(chunks).tolist() == whole[:chunks].tolist()


def test_kv_ranks_unpack() -> None:
    assert KvRank.unpack(0x01000100) == KvRank(world=1, rank=0, local_world=1, local_rank=0)
    assert KvRank.unpack(KvRank(8, 5, 4, 1).pack()) == KvRank(8, 5, 4, 1)


_OBJECT_FIELDS = ("salt", "group", "model", "first_tokens")


class Fleet:
    """A directory with batches as a server would send them."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.directory = LMCacheDirectory(self.index, chunk_tokens=CHUNK)
        self.sequence = 0

    def register(self, instance_id: str = "mp-1", now_s: float = 0.0) -> bool:
        return self.directory.register(LMCacheServer(instance_id, "10.0.0.1", 8080, now_s), now_s)

    def send(self, kind: str, chunks: list[int], **fields: Any) -> str:
        """Chunks by their position in TOKENS."""
        hashes = chunk_hashes(np.array(TOKENS, np.uint32), CHUNK)
        ranks = fields.pop("ranks", [ONE])
        names = {name: fields.pop(name) for name in _OBJECT_FIELDS if name in fields}
        objects = tuple(
            ChunkObject(**{"key": index_key(hashes[i]), "model": MODEL, "kv_rank": rank} | names)
            for i in chunks
            for rank in ranks
        )
        self.sequence = fields.pop("sequence", self.sequence + 1)
        batch = {
            "instance_id": "mp-1",
            "incarnation": 1,
            "sequence": self.sequence,
            "kind": kind,
            "tier": "l1",
            "backend": "dram",
            "shared": False,
            "objects": objects,
        }
        return self.directory.apply(ObjectBatch(**batch | fields), 0.0)

    def tokens(self, tier: Tier = Tier.HOST, holder: Holder = SERVER, **options: Any) -> int:
        row = self.index.holder_id(holder)
        if row is None:
            return 0
        matched = self.directory.match(MODEL, np.array(TOKENS, np.uint32), **options)
        return 0 if matched is None else int(matched[row, tier])

    @property
    def state(self) -> str:
        return self.directory.stream_stats()[0].state


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.register()
    return made


def test_prompts_are_matched_by_their_chunks(fleet: Fleet) -> None:
    assert fleet.send("store", [0, 1]) == "applied"
    assert (fleet.tokens(), fleet.tokens(Tier.DEVICE)) == (2 * CHUNK, 0)
    fleet.send("store", [2])
    assert fleet.tokens() == 3 * CHUNK
    fleet.send("delete", [1])
    assert fleet.tokens() == CHUNK
    fleet.send("delete", [1])
    fleet.send("access", [0])
    fleet.send("config", [])
    assert fleet.tokens() == CHUNK
    assert fleet.state == "warm"


def test_a_repeated_store_is_one(fleet: Fleet) -> None:
    fleet.send("store", [0])
    fleet.send("store", [0])
    fleet.send("delete", [0])
    assert fleet.tokens() == 0


def test_a_chunk_is_there_when_all_its_shards_are(fleet: Fleet) -> None:
    shards = [KvRank(2, rank, 2, rank).pack() for rank in (0, 1)]
    fleet.send("store", [0], ranks=shards[:1])
    assert fleet.tokens(world=2) == 0
    fleet.send("store", [0], ranks=shards[1:])
    assert (fleet.tokens(world=2), fleet.tokens(world=1)) == (CHUNK, 0)
    fleet.send("delete", [0], ranks=shards[:1])
    assert fleet.tokens(world=2) == 0


def test_salts_models_and_groups_separate(fleet: Fleet) -> None:
    fleet.send("store", [0], salt="s")
    fleet.send("store", [0], model="other")
    fleet.send("store", [0], group=3)
    assert (fleet.tokens(), fleet.tokens(salt="s")) == (0, CHUNK)
    assert fleet.directory.stream_stats()[0].unresolved_blocks == 1


def test_tiers_by_backend(fleet: Fleet) -> None:
    fleet.send("store", [0], tier="l2", backend="fs")
    assert fleet.index.residencies(SERVER) and fleet.tokens(Tier.DISK) == CHUNK
    assert fleet.tokens(Tier.HOST) == 0
    fleet.send("store", [0], tier="l2", backend="valkey")
    assert {tier for _, tier in fleet.index.residencies(SERVER)} == {Tier.DISK, Tier.REMOTE}
    fleet.send("store", [0], tier="l2", backend="s3", shared=True)
    assert fleet.tokens(Tier.REMOTE, shared_holder("s3")) == CHUNK
    fleet.send("store", [0], backend="cxl", shared=True)
    assert fleet.tokens(Tier.POD, shared_holder("cxl")) == CHUNK


def test_duplicates_and_former_lives_are_dropped(fleet: Fleet) -> None:
    fleet.send("store", [0], incarnation=5)
    assert fleet.send("delete", [0], incarnation=5, sequence=1) == "duplicate"
    assert fleet.send("delete", [0], incarnation=4, sequence=9) == "stale"
    assert fleet.tokens() == CHUNK


def test_a_restart_voids_memory_and_keeps_what_lies_on_disk(fleet: Fleet) -> None:
    fleet.send("store", [0])
    fleet.send("store", [0], tier="l2", backend="fs")
    fleet.send("store", [1], incarnation=2, sequence=1)
    assert {tier for _, tier in fleet.index.residencies(SERVER)} == {Tier.DISK, Tier.HOST}
    assert fleet.tokens(Tier.HOST) == 0
    assert fleet.tokens(Tier.DISK) == 2 * CHUNK
    assert fleet.state == "warm"


def test_a_gap_voids_what_the_server_told_of_itself(fleet: Fleet) -> None:
    fleet.send("store", [0])
    fleet.send("store", [0], tier="l2", backend="fs")
    fleet.send("store", [0], tier="l2", backend="s3", shared=True)
    fleet.send("store", [1], sequence=7)
    assert {tier for _, tier in fleet.index.residencies(SERVER)} == {Tier.HOST}
    assert fleet.tokens() == 0
    assert fleet.tokens(Tier.REMOTE, shared_holder("s3")) == CHUNK
    stats = fleet.directory.stream_stats()[0]
    assert (stats.state, stats.gaps, stats.last_seq) == ("cold", 1, 7)


def test_voiding_one_backend_spares_another_of_the_same_tier(fleet: Fleet) -> None:
    shards = [KvRank(2, rank, 2, rank).pack() for rank in (0, 1)]
    fleet.send("store", [0], tier="l2", backend="fs", ranks=shards)
    fleet.send("store", [0], ranks=shards[:1])  # never whole in memory
    fleet.send("store", [0], backend="cxl", ranks=shards)
    fleet.send("delete", [0], backend="cxl", ranks=shards[:1])
    assert (fleet.tokens(Tier.HOST, world=2), fleet.tokens(Tier.DISK, world=2)) == (0, CHUNK)
    fleet.directory.deregister("mp-1", 0.0)
    assert {tier for _, tier in fleet.index.residencies(SERVER)} == {Tier.DISK}


def test_the_disk_of_a_server_that_left_is_remembered_for_a_while(fleet: Fleet) -> None:
    fleet.send("store", [0], tier="l2", backend="fs")
    fleet.directory.deregister("mp-1", 10.0)
    fleet.directory.expire(9.0 + DEPARTED_S)
    assert fleet.tokens(Tier.DISK) == CHUNK
    fleet.directory.expire(10.0 + DEPARTED_S)
    assert fleet.index.holder_id(SERVER) is None
    assert fleet.index.stats().residencies == 0


def test_servers_that_come_and_go_leave_no_rows_behind(fleet: Fleet) -> None:
    for i in range(50):
        fleet.register(f"passing-{i}")
        fleet.directory.deregister(f"passing-{i}", 0.0)
    assert (
        fleet.index.match(Namespace(MODEL, 16), chunk_keys(np.array(TOKENS, np.uint32), CHUNK)).shape[0] <= 3
    )


def test_nothing_held_costs_no_hashing(fleet: Fleet) -> None:
    tokens = np.array(TOKENS, np.uint32)
    assert fleet.directory.match(MODEL, tokens) is None
    fleet.send("store", [0])
    assert fleet.directory.match(MODEL, tokens) is not None
    assert fleet.directory.match(MODEL, tokens, salt="other") is None
    assert fleet.directory.match(MODEL, tokens, world=2) is None
    fleet.send("delete", [0])
    assert fleet.directory.match(MODEL, tokens) is None


def test_the_size_of_chunks_is_learned_from_their_tokens(fleet: Fleet) -> None:
    tokens = np.arange(64, dtype=np.uint32)
    keys = chunk_keys(tokens, 32).tolist()
    stored = [
        ChunkObject(keys[0], MODEL, ONE, first_tokens=tuple(range(32))),
        ChunkObject(keys[1], MODEL, ONE),
    ]
    batch = ObjectBatch("mp-1", 1, 1, "store", "l1", "dram", False, tuple(stored))
    assert fleet.directory.apply(batch, 0.0) == "applied"
    assert fleet.directory.chunk_sizes == (CHUNK, 32)
    matched = fleet.directory.match(MODEL, tokens)
    row = fleet.index.holder_id(SERVER)
    assert matched is not None and matched[row, Tier.HOST] == 64


def test_chunks_hashed_in_another_way_are_counted(fleet: Fleet) -> None:
    fleet.send("store", [0], first_tokens=(1, 2, 3))
    assert fleet.directory.chunk_sizes == (CHUNK,)
    assert fleet.directory.stream_stats()[0].unresolved_blocks == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 79), st.integers(1, 79)), max_size=12), st.data())
def test_any_chunks_are_matched_exactly(changes: list[tuple[bool, int, int]], data: st.DataObject) -> None:
    """Chunks come one by one, without the chunk before: gaps anywhere must end the match."""
    index = CacheIndex()
    directory = LMCacheDirectory(index, chunk_tokens=4)
    tokens = np.arange(320, dtype=np.uint32)
    keys, held = chunk_keys(tokens, 4).tolist(), set[int]()
    for seq, (stored, start, count) in enumerate(changes, 1):
        chunks = range(start, min(start + count, 80))
        held = held.union(chunks) if stored else held.difference(chunks)
        objects = tuple(ChunkObject(keys[i], MODEL, ONE) for i in chunks)
        kind = "store" if stored else "delete"
        directory.apply(ObjectBatch("mp-1", 1, seq, kind, "l1", "dram", False, objects), 0.0)
        length = data.draw(st.integers(0, 320))
        matched = directory.match(MODEL, tokens[:length])
        expected = next(i for i in range(81) if i not in held or i == length // 4)
        row = index.holder_id(SERVER)
        assert (0 if matched is None else matched[row, Tier.HOST]) == 4 * expected


def test_silent_servers_are_gone(fleet: Fleet) -> None:
    fleet.send("store", [0])
    assert fleet.directory.heartbeat("mp-1", 20.0)
    assert fleet.directory.expire(49.0) == []
    assert fleet.tokens() == CHUNK
    assert fleet.directory.expire(50.0) == ["mp-1"]
    assert fleet.tokens() == 0
    assert not fleet.directory.heartbeat("mp-1", 51.0)
    assert fleet.register() is False
    assert fleet.register() is True


def test_events_of_unregistered_servers_count_and_expire() -> None:
    fleet = Fleet()
    fleet.send("store", [0])
    assert (fleet.tokens(), fleet.state) == (CHUNK, "connecting")
    assert fleet.directory.expire(1000.0) == ["mp-1"]
    assert fleet.tokens() == 0


# --- over HTTP -----------------------------------------------------------------------------------------


class Coordinator:
    """The routes under a real server, below a prefix."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.now_s = 0.0
        app = FastAPI()
        app.include_router(make_lmcache_router(self.fleet.directory, lambda: self.now_s), prefix="/lmcache")
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/lmcache"
        self.client = httpx.AsyncClient(base_url=base_url, trust_env=False)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        await self.client.aclose()
        self._server.should_exit = True
        await self._task


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    made = Coordinator()
    await made.start()
    yield made
    await made.stop()


def batch(
    seq: int, event_type: str = "store", chunks: tuple[int, ...] = (0,), **fields: Any
) -> dict[str, Any]:
    hashes = chunk_hashes(np.array(TOKENS, np.uint32), CHUNK)
    key = {"model_name": MODEL, "kv_rank": ONE, "object_group_id": 0, "cache_salt": ""}
    entries = [
        {
            "key": {"chunk_hash_hex": hashes[i].hex(), **key},
            "size_bytes": 9,
            "token_ids": [],
            "token_offset": -1,
        }
        for i in chunks
    ]
    return {
        "instance_id": "mp-1",
        "incarnation": 1,
        "seq": seq,
        "event_type": event_type,
        "tier": "l1",
        "backend": "dram",
        "entries": entries,
        "shared": False,
        "ts": 0.0,
        "capacity_bytes": 0,
        "capacity_revision": 0,
        **fields,
    }


async def test_a_server_registers_reports_and_leaves(coordinator: Coordinator) -> None:
    client = coordinator.client
    body = {"instance_id": "mp-1", "ip": " 10.0.0.1 ", "http_port": 8080, "metadata": {"zone": "a"}}
    answer = await client.post("/instances", json=body)
    assert answer.json() == {"instance_id": "mp-1", "re_registered": False}
    assert (await client.post("/instances", json=body)).json()["re_registered"] is True
    listed = (await client.get("/instances")).json()["instances"]
    assert [(each["instance_id"], each["ip"], each["mq_port"]) for each in listed] == [
        ("mp-1", "10.0.0.1", 0)
    ]
    assert (await client.put("/instances/mp-1/heartbeat")).json() == {"instance_id": "mp-1"}

    batches = [batch(1, chunks=(0, 1)), batch(1), batch(2, "access"), batch(1, incarnation=0)]
    answer = await client.post("/events", json={"batches": batches})
    assert answer.json() == {"applied": 2, "duplicates": 1, "stale": 1}
    assert coordinator.fleet.tokens() == 2 * CHUNK

    assert (await client.delete("/instances/mp-1")).status_code == 204
    assert (await client.delete("/instances/mp-1")).status_code == 204
    assert coordinator.fleet.tokens() == 0
    unknown = await client.put("/instances/mp-1/heartbeat")
    assert (unknown.status_code, unknown.json()) == (404, {"error": "unknown instance mp-1; re-register"})


async def test_a_nameless_server_is_given_a_name(coordinator: Coordinator) -> None:
    names = set()
    for _ in range(2):
        answer = await coordinator.client.post("/instances", json={"ip": "h", "http_port": 1, "new": 1})
        names.add(answer.json()["instance_id"])
    assert len(names) == 2 and all(name.startswith("mp-") for name in names)
    assert (await coordinator.client.get("/healthz")).json() == {"status": "healthy"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"ip": "", "http_port": 1}, "ip"),
        ({"ip": "h", "http_port": 0}, "http_port"),
        ({"http_port": 1}, "ip"),
    ],
)
async def test_a_bad_registration_names_its_field(
    coordinator: Coordinator, body: dict[str, Any], field: str
) -> None:
    answer = await coordinator.client.post("/instances", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seq": 0}, "seq"),
        ({"event_type": "sing"}, "event_type"),
        ({"tier": "all"}, "tier"),
        ({"instance_id": ""}, "instance_id"),
    ],
)
async def test_a_bad_batch_names_its_field(
    coordinator: Coordinator, change: dict[str, Any], field: str
) -> None:
    answer = await coordinator.client.post("/events", json={"batches": [batch(1) | change]})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "batches", 0, field]


async def test_a_hash_that_is_none_is_refused(coordinator: Coordinator) -> None:
    bad = batch(1)
    bad["entries"][0]["key"]["chunk_hash_hex"] = "xyz"
    answer = await coordinator.client.post("/events", json={"batches": [bad]})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][-1] == "chunk_hash_hex"


async def test_no_batches_are_fine(coordinator: Coordinator) -> None:
    answer = await coordinator.client.post("/events", json={})
    assert answer.json() == {"applied": 0, "duplicates": 0, "stale": 0}


def test_placements_do_not_wait_for_a_batch_that_is_being_applied() -> None:
    fleet = Fleet()
    fleet.register()
    fleet.send("store", [0, 1])
    begun, go = threading.Event(), threading.Event()

    class Long(tuple[ChunkObject, ...]):
        def __iter__(self) -> Any:
            begun.set()
            go.wait(30)
            return super().__iter__()

    found: list[Any] = []

    def place() -> None:
        found.append(fleet.tokens())
        found.append(fleet.directory.worlds(MODEL))
        found.append([each.instance_id for each in fleet.directory.servers()])
        found.append(fleet.directory.stream_stats()[0].last_seq)
        found.append(len(fleet.directory.reach()))

    batch = ObjectBatch("mp-1", 1, 2, "store", "l1", "dram", False, Long())
    applying = threading.Thread(target=fleet.directory.apply, args=(batch, 0.0))
    placing = threading.Thread(target=place)
    applying.start()
    assert begun.wait(30)
    placing.start()
    placing.join(10)
    waited = placing.is_alive()
    go.set()
    applying.join()
    placing.join()
    assert not waited and found == [2 * CHUNK, [1], ["mp-1"], 2, 1]
