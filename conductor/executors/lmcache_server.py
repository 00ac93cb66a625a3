"""Drives LMCache's multi-process servers, and its own coordinator where there is one, over HTTP.

Routes as served by LMCache 0.5.6. A server loads a prompt's chunks from what it reaches as L2 (its disk, or a
store that it shares with others) into its memory; it deletes by key in either tier. It has no way to be handed
chunks by another server, nor to write to L2 on request: what is stored is written through. Pins are the
coordinator's, for L2 in the whole fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx

from cache_index import Holder, Tier
from cache_index.lmcache_directory import LMCacheDirectory, is_lmcache, server_holder
from cache_index.lmcache_keys import CHUNK_TOKENS, KvRank, chunk_hashes
from conductor.actions import ActionKind, ExecutionError, Place, TierAction
from conductor.executors.chunk_ranges import chunks_inside, chunks_up_to, known_prefix, known_tokens
from conductor.executors.store_http import ask, count

_LOADS = (ActionKind.PREFETCH, ActionKind.PROMOTE, ActionKind.REPLICATE)
_PINS = (ActionKind.PIN, ActionKind.UNPIN)
_SLOW = (Tier.DISK, Tier.POD, Tier.REMOTE)
_FIRST_POLL_S = 0.01
_SLOWEST_POLL_S = 0.25


class _Prefetch(NamedTuple):
    """An order to one server, but for how many of the tokens."""

    url: str
    body: dict[str, Any]
    token_ids: list[int]


class LMCacheServerExecutor:
    """``urls`` are servers by instance id, beside those that registered with us in ``directory``.

    ``stored_name`` gives the name under which LMCache stores what is cached of a served model.
    """

    name = "lmcache-server"

    def __init__(
        self,
        client: httpx.AsyncClient,
        directory: LMCacheDirectory,
        *,
        stored_name: Callable[[str], str] = lambda model: model,
        urls: Mapping[str, str] | None = None,
        coordinator_url: str | None = None,
        world_size: int = 1,
    ) -> None:
        self._client = client
        self._directory = directory
        self._stored_name = stored_name
        self._urls = {server_holder(name): url for name, url in (urls or {}).items()}
        self._coordinator_url = coordinator_url
        self._world_size = world_size  # where no server has told of chunks of a model
        self._known: tuple[int, dict[Holder, str], dict[Holder, frozenset[Holder]]] = (-1, {}, {})
        self._chunk_tokens: dict[str, int] = {}

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        if not is_lmcache(target.holder):
            return False
        if kind in _PINS:
            return self._coordinator_url is not None and target.tier in _SLOW
        if kind is ActionKind.EVICT:
            return self._door_to(target.holder) is not None
        if kind not in _LOADS or target.tier is not Tier.HOST or target.holder not in self._servers():
            return False
        return source is None or self._reaches(target.holder, source)

    async def execute(self, action: TierAction) -> int:
        if action.kind in _PINS:
            return await self._pin(action)
        if action.kind is ActionKind.EVICT:
            return await self._evict(action)
        return await self._load(action)

    async def _load(self, action: TierAction) -> int:
        url = self._url(action.target.holder)
        chunks = chunks_up_to(action, await self._chunk_size(url))
        worlds = self._worlds(action)
        for world in worlds:
            body = {"model_name": self._model(action), "world_size": world, "source_tier": "l2"}
            body |= {"cache_salt": known_prefix(action).cache_salt or "", "target_tier": "l1"}
            order = _Prefetch(f"{url}/cache/prefetches", body, known_tokens(action).tolist())
            try:
                return chunks.blocks(
                    action, await self._loaded_chunks(order, chunks.last, chunks.chunk_tokens)
                )
            except ExecutionError:  # perhaps the engine there is of another parallelism
                if world == worlds[-1]:
                    raise
        raise AssertionError("there is at least one world size")

    async def _loaded_chunks(self, order: _Prefetch, chunks: int, chunk_tokens: int) -> int:
        """How many of the first chunks are in memory afterwards, without a gap.

        The server only counts what it found, gaps or not: where something is missing, beginnings of the prompt
        are asked for, which by then are in memory and cost nothing.
        """
        found, total = await self._prefetch(order, len(order.token_ids))
        if found == total:
            return chunks if total else 0
        low, high = 0, found * chunks // total
        middle = high
        while low < high:
            found, total = await self._prefetch(order, middle * chunk_tokens)
            low, high = (middle, high) if found == total else (low, middle - 1)
            middle = (low + high + 1) // 2
        return low

    async def _prefetch(self, order: _Prefetch, tokens: int) -> tuple[int, int]:
        """Objects found, and asked for. Waits until the load has ended."""
        body = {**order.body, "token_ids": order.token_ids[:tokens]}
        submitted = await ask(self._client, "POST", order.url, json=body)
        if submitted.get("status") == "noop":
            return 0, 0
        job, pause_s = f"{order.url}/{submitted.get('request_id')}", _FIRST_POLL_S
        while True:
            answer = await ask(self._client, "GET", job)
            if answer.get("status") == "completed":
                return count(answer, "found_keys"), count(answer, "total_keys")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLOWEST_POLL_S)

    async def _evict(self, action: TierAction) -> int:
        url = self._url(action.target.holder)
        tier = "l1" if action.target.tier is Tier.HOST else "l2"
        if action.prefix is None:
            await ask(self._client, "POST", f"{url}/cache/clear", json={"tier": tier})
            return action.blocks
        chunks = chunks_inside(action, await self._chunk_size(url))
        named = chunk_hashes(known_tokens(action), chunks.chunk_tokens)[chunks.first : chunks.last]
        deleted = 0
        for world in self._worlds(action):
            shards = [KvRank(world, rank, world, rank).pack() for rank in range(world)]
            keys = [
                {
                    "chunk_hash_hex": name.hex(),
                    "model_name": self._model(action),
                    "kv_rank": shard,
                    "cache_salt": action.prefix.cache_salt or "",
                }
                for name in named
                for shard in shards
            ]
            body = {"keys": keys, "tier": tier}
            answer = await ask(self._client, "DELETE", f"{url}/cache/objects", json=body)
            if answer.get("skipped") and not answer.get("deleted"):
                raise ExecutionError(f"the server keeps them: {str(answer)[:200]}", retryable=True)
            deleted = max(deleted, count(answer, "deleted") // world)
        return chunks.blocks(action, deleted)

    async def _pin(self, action: TierAction) -> int:
        """Pins of chunks that are not there would be taken as well: only what is in L2 is pinned."""
        chunks, tokens = chunks_up_to(action, CHUNK_TOKENS), known_tokens(action).tolist()
        most = 0
        for world in self._worlds(action):
            body: dict[str, Any] = {
                "model_name": self._model(action),
                "world_size": world,
                "token_ids": tokens,
                "cache_salt": known_prefix(action).cache_salt or "",
            }
            pins = f"{self._coordinator_url}/cache/pins"
            if action.kind is ActionKind.UNPIN:
                await ask(self._client, "DELETE", pins, json=body)
                most = chunks.last
            elif held := await self._in_l2(body):
                await ask(
                    self._client, "POST", pins, json={**body, "token_ids": tokens[: held * CHUNK_TOKENS]}
                )
                most = max(most, held)
        return chunks.blocks(action, most)

    async def _in_l2(self, body: dict[str, Any]) -> int:
        """How many of a prompt's first chunks are whole in L2, as the coordinator's directory knows."""
        answer = await ask(self._client, "POST", f"{self._coordinator_url}/directory/lookup", json=body)
        whole: dict[str, bool] = {}  # by chunk, in order
        for result in answer.get("results", ()):
            stored = any(each["tier"] == "l2" for each in result["placements"])
            name = result["key"]["chunk_hash_hex"]
            whole[name] = whole.get(name, True) and stored
        return next((i for i, each in enumerate(whole.values()) if not each), len(whole))

    def _model(self, action: TierAction) -> str:
        namespace = known_prefix(action).namespace
        if namespace.lora is not None:
            raise ExecutionError("LMCache's names leave LoRA adapters out; their cache cannot be told apart")
        return self._stored_name(namespace.model)

    def _worlds(self, action: TierAction) -> list[int]:
        salt = known_prefix(action).cache_salt or ""
        return self._directory.worlds(self._model(action), salt) or [self._world_size]

    def _servers(self) -> dict[Holder, str]:
        """URLs of all servers."""
        version = self._directory.version
        if self._known[0] != version:
            urls, mounts = dict(self._urls), {}
            for server, holders in self._directory.reach():
                holder = server_holder(server.instance_id)
                urls.setdefault(holder, f"http://{server.ip}:{server.http_port}")
                mounts[holder] = frozenset(holders) - {holder}
            self._known = version, urls, mounts
        return self._known[1]

    def _mounts(self, server: Holder) -> frozenset[Holder]:
        self._servers()
        return self._known[2].get(server, frozenset())

    def _reaches(self, server: Holder, source: Place) -> bool:
        """Whether what lies at ``source`` is in the L2 of a server, as far as its events have told."""
        if source.holder == server:
            return source.tier in _SLOW
        mounts = self._mounts(server)
        return source.holder in mounts or not mounts.isdisjoint(self._mounts(source.holder))

    def _door_to(self, holder: Holder) -> str | None:
        """The URL of a server, or of one that reaches a shared store."""
        servers = self._servers()
        return servers.get(holder) or next(
            (url for server, url in servers.items() if holder in self._mounts(server)), None
        )

    def _url(self, holder: Holder) -> str:
        url = self._door_to(holder)
        if url is None:
            raise ExecutionError(f"no LMCache server reaches {holder.instance_id} any more")
        return url

    async def _chunk_size(self, url: str) -> int:
        known = self._chunk_tokens.get(url)
        if known is None:
            told = (await ask(self._client, "GET", f"{url}/config")).get("mp")
            size = told.get("chunk_size") if isinstance(told, dict) else None
            known = self._chunk_tokens[url] = size if isinstance(size, int) and size > 0 else CHUNK_TOKENS
        return known
