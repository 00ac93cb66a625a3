"""Prompts matched against engines' blocks and LMCache servers' chunks together."""

from __future__ import annotations

import numpy as np
import pytest

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from cache_index.lmcache_directory import LMCacheDirectory, server_holder, shared_holder
from cache_index.lmcache_keys import KvRank, chunk_keys
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch
from cache_index.prompt_match import PromptMatcher

BLOCK, CHUNK = 16, 40  # chunks of two and a half blocks
MODEL = "llama"
PROMPT = np.arange(5000, 5000 + 30 * CHUNK, dtype=np.uint32)
NAMESPACE = Namespace(MODEL, BLOCK)
ONE = KvRank(1, 0, 1, 0).pack()
ENGINE, OTHER = Holder("engine"), Holder("other", 1)


class Cluster:
    """Engines on hosts, LMCache servers beside them."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.lmcache = LMCacheDirectory(self.index, chunk_tokens=CHUNK)
        self.prompts = PromptMatcher(self.index, self.lmcache)
        self._sequences: dict[str, int] = {}

    def server(self, instance_id: str, ip: str) -> None:
        self.lmcache.register(LMCacheServer(instance_id, ip, 8080, 0.0), 0.0)

    def hold(
        self,
        instance_id: str,
        chunks: int,
        *,
        first: int = 0,
        tier: str = "l1",
        backend: str = "dram",
        shared: bool = False,
        salt: str = "",
        model: str = MODEL,
    ) -> None:
        sequence = self._sequences[instance_id] = self._sequences.get(instance_id, 0) + 1
        keys = chunk_keys(PROMPT, CHUNK)[first:chunks].tolist()
        objects = tuple(ChunkObject(key, model, ONE, salt=salt) for key in keys)
        self.lmcache.apply(
            ObjectBatch(instance_id, 1, sequence, "store", tier, backend, shared, objects),  # type: ignore[arg-type]
            0.0,
        )

    def levels(self, holder: Holder, **options: object) -> list[int]:
        """Blocks of the prompt by tier, device first."""
        namespace = options.pop("namespace", NAMESPACE)
        row = self.index.holder_id(holder)
        matched = self.prompts.match(namespace, PROMPT, **options)  # type: ignore[arg-type]
        return [0] * len(Tier) if row is None or row >= len(matched) else matched[row].tolist()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_an_engine_reaches_what_the_server_of_its_host_has(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "10.0.0.1")
    cluster.prompts.attach(OTHER, "10.0.0.2")
    cluster.server("mp-1", "10.0.0.1")
    cluster.hold("mp-1", 3)
    blocks = 3 * CHUNK // BLOCK  # 7 of 7.5
    assert blocks == 7
    assert cluster.levels(ENGINE) == [0, 7, 7, 7, 7]
    assert cluster.levels(OTHER) == [0] * 5
    assert cluster.levels(server_holder("mp-1")) == [0, 7, 7, 7, 7]


def test_the_longer_prefix_counts_in_every_tier(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "10.0.0.1")
    cluster.index.store(ENGINE, Tier.DEVICE, NAMESPACE, sequence_hashes(PROMPT, BLOCK)[:9])
    cluster.server("mp-1", "10.0.0.1")
    cluster.hold("mp-1", 2)
    assert cluster.levels(ENGINE) == [9] * 5
    cluster.hold("mp-1", 8, first=2, tier="l2", backend="fs")
    assert cluster.levels(ENGINE) == [9, 9, 20, 20, 20]
    hashes = sequence_hashes(PROMPT, BLOCK)
    assert cluster.levels(ENGINE, hashes=hashes) == [9, 9, 20, 20, 20]


def test_shared_stores_count_for_those_whose_servers_use_them(cluster: Cluster) -> None:
    for i, engine in enumerate((ENGINE, OTHER)):
        cluster.prompts.attach(engine, f"10.0.0.{i}")
        cluster.server(f"mp-{i}", f"10.0.0.{i}")
    cluster.hold("mp-0", 4, tier="l2", backend="s3", shared=True)
    assert cluster.levels(ENGINE) == [0, 0, 0, 0, 10]
    assert cluster.levels(OTHER) == [0] * 5
    cluster.hold("mp-1", 1, tier="l2", backend="s3", shared=True)  # now it is known to use it too
    assert cluster.levels(OTHER) == [0, 0, 0, 0, 10]
    assert cluster.levels(shared_holder("s3")) == [0, 0, 0, 0, 10]


def test_servers_may_be_named_where_addresses_differ(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "pod-7", servers=frozenset({"mp-1"}))
    cluster.server("mp-1", "10.0.0.1")
    cluster.server("mp-2", "pod-7")
    cluster.hold("mp-1", 2)
    cluster.hold("mp-2", 6)
    assert cluster.levels(ENGINE)[Tier.HOST] == 5


def test_attachments_follow_servers_that_come_and_go(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "localhost")
    cluster.hold("mp-1", 2)  # events may come before the registration
    assert cluster.levels(ENGINE)[Tier.HOST] == 0
    cluster.server("mp-1", "127.0.0.1")
    assert cluster.levels(ENGINE)[Tier.HOST] == 5
    cluster.prompts.detach(ENGINE)
    assert cluster.levels(ENGINE)[Tier.HOST] == 0
    cluster.prompts.attach(ENGINE, "127.0.0.1")
    assert cluster.levels(ENGINE)[Tier.HOST] == 5
    cluster.lmcache.deregister("mp-1", 0.0)
    assert cluster.levels(ENGINE)[Tier.HOST] == 0


def test_a_server_named_like_an_engine_is_another_holder(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "10.0.0.1")
    cluster.server(ENGINE.instance_id, "10.0.0.9")
    cluster.hold(ENGINE.instance_id, 2)
    assert cluster.levels(ENGINE) == [0] * 5
    cluster.index.clear(ENGINE)  # the engine restarts; LMCache's process does not
    assert cluster.levels(server_holder(ENGINE.instance_id))[Tier.HOST] == 5


def test_salts_and_adapters_separate_and_paths_stand_for_names(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "10.0.0.1", stored_as={MODEL: "/models/llama"})
    cluster.server("mp-1", "10.0.0.1")
    cluster.hold("mp-1", 2, model="/models/llama")
    cluster.hold("mp-1", 4, model="/models/llama", salt="mine")
    assert cluster.levels(ENGINE)[Tier.HOST] == 5
    assert cluster.levels(ENGINE, cache_salt="mine")[Tier.HOST] == 10
    assert cluster.levels(ENGINE, cache_salt="theirs")[Tier.HOST] == 0
    assert cluster.levels(ENGINE, namespace=Namespace(MODEL, BLOCK, "adapter")) == [0] * 5


def test_long_prompts_are_followed_to_their_end(cluster: Cluster) -> None:
    cluster.prompts.attach(ENGINE, "10.0.0.1")
    cluster.server("mp-1", "10.0.0.1")
    cluster.hold("mp-1", 30)
    assert cluster.levels(ENGINE)[Tier.HOST] == len(PROMPT) // BLOCK


def test_without_lmcache_it_is_the_index_that_answers() -> None:
    index = CacheIndex()
    index.register(ENGINE)
    index.store(ENGINE, Tier.DEVICE, NAMESPACE, sequence_hashes(PROMPT, BLOCK, cache_salt="s")[:4])
    prompts = PromptMatcher(index)
    assert prompts.match(NAMESPACE, PROMPT, cache_salt="s").tolist() == [[4] * 5]
    assert prompts.match(NAMESPACE, PROMPT).tolist() == [[0] * 5]


def test_the_servers_and_the_stored_names_of_an_engine(cluster: Cluster) -> None:
    for name, ip in (("mp-1", "10.0.0.1"), ("mp-2", "10.0.0.2")):
        cluster.server(name, ip)
    cluster.prompts.attach(ENGINE, "10.0.0.1", stored_as={MODEL: "/models/llama"})
    cluster.prompts.attach(OTHER, "pod-7", servers=frozenset({"mp-2", "mp-9"}))
    assert cluster.prompts.servers_of(ENGINE) == ["mp-1"]
    assert cluster.prompts.servers_of(OTHER) == ["mp-2"]
    assert cluster.prompts.servers_of(Holder("stranger")) == []
    assert (cluster.prompts.stored_name(MODEL), cluster.prompts.stored_name("x")) == ("/models/llama", "x")


def test_the_worlds_of_a_model_most_chunks_first(cluster: Cluster) -> None:
    assert cluster.lmcache.worlds(MODEL) == []
    two = tuple(ChunkObject(9, MODEL, KvRank(2, rank, 2, rank).pack()) for rank in range(2))
    cluster.lmcache.apply(ObjectBatch("other", 1, 1, "store", "l1", "dram", False, two), 0.0)
    cluster.hold("mp-1", 3)
    assert cluster.lmcache.worlds(MODEL) == [1, 2]
    assert cluster.lmcache.worlds(MODEL, "salt") == []
