"""Prompts matched against LMCache servers beside their engines, and how fast the servers' events are taken.

64 engines, each with an LMCache server on its host (chunks of 256 tokens, blocks of 16). ``match`` is one call of
PromptMatcher.match, hashing included, in this process; ``events`` are chunk objects applied per second through
LMCacheDirectory.apply. Excluded: HTTP, and parsing of the servers' JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from cache_index import CacheIndex, Holder, Namespace, warm
from cache_index.hashing import Tokens
from cache_index.lmcache_directory import LMCacheDirectory
from cache_index.lmcache_keys import KvRank, chunk_keys
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch
from cache_index.prompt_match import PromptMatcher

HOSTS = 64
NAMESPACE = Namespace("model", 16)
SHORT, LONG = 12_032, 131_072
ONE_SHARD = KvRank(1, 0, 1, 0).pack()


class Fleet:
    """Engines, their LMCache servers, and prompts that all of them hold or none."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.prompts: dict[str, Tokens] = {
            name: generator.integers(0, 128_000, size, dtype=np.uint32)
            for name, size in (("short", SHORT), ("long", LONG), ("cold", LONG))
        }
        index = CacheIndex()
        self.lmcache = LMCacheDirectory(index)
        self.matcher = PromptMatcher(index, self.lmcache)
        for i in range(HOSTS):
            self.matcher.attach(Holder(f"engine-{i}"), f"10.0.0.{i}")
            self.lmcache.register(LMCacheServer(f"mp-{i}", f"10.0.0.{i}", 8080, 0.0), 0.0)

    def store(self) -> float:
        """All servers report the short and the long prompt; chunk objects per second."""
        batches = []
        for sequence, name in enumerate(("short", "long"), 1):
            keys = chunk_keys(self.prompts[name]).tolist()
            objects = tuple(ChunkObject(key, "model", ONE_SHARD) for key in keys)
            for i in range(HOSTS):
                batches.append(ObjectBatch(f"mp-{i}", 1, sequence, "store", "l1", "dram", False, objects))
        begin_s = time.perf_counter()
        for batch in batches:
            self.lmcache.apply(batch, 0.0)
        return sum(len(batch.objects) for batch in batches) / (time.perf_counter() - begin_s)

    def match_us(self, name: str, calls: int) -> dict[str, float]:
        tokens = self.prompts[name]
        durations = np.empty(calls)
        for i in range(calls):
            begin_s = time.perf_counter()
            self.matcher.match(NAMESPACE, tokens)
            durations[i] = time.perf_counter() - begin_s
        p50, p99 = np.percentile(durations, (50, 99)) * 1e6
        return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    options = parser.parse_args()
    calls = 200 if options.quick else 2000
    warm()
    fleet = Fleet()
    before = {f"{name}, nothing in LMCache": fleet.match_us(name, calls) for name in ("short", "long")}
    rate = fleet.store()
    after = {f"{name}, held by {HOSTS}": fleet.match_us(name, calls) for name in ("short", "long")}
    matches = before | after | {"long, held by none": fleet.match_us("cold", calls)}
    if options.json:
        print(json.dumps({"benchmark": "lmcache", "objects_per_s": round(rate), "match": matches}))
        return
    print(f"chunk objects applied per second: {rate:,.0f}")
    for name, figures in matches.items():
        print(f"match, {name:<28}" + "  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
