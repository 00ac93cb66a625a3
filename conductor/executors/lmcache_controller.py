"""Drives LMCache's classic controller over HTTP, which passes orders on to the workers inside engines.

Routes as served by `lmcache_controller` of LMCache 0.5.6. It can copy and move between hosts' memories, pin,
compress, decompress, and clear a whole backend; it has no unpin and no prefetch. Its `/check_finish` is not
implemented, and workers start a move when they are told: what is answered is how many tokens they took on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from cache_index import Holder, Tier
from cache_index.lmcache_directory import is_lmcache
from cache_index.lmcache_keys import CHUNK_TOKENS
from conductor.actions import ActionKind, ExecutionError, Place, TierAction
from conductor.executors.chunk_ranges import chunks_up_to, known_tokens
from conductor.executors.store_http import ask, count

_LOCATIONS = {
    Tier.HOST: "LocalCPUBackend",
    Tier.DISK: "LocalDiskBackend",
    Tier.REMOTE: "RemoteBackend",
}
_MOVES = (ActionKind.MOVE, ActionKind.REPLICATE)
_IN_PLACE = (ActionKind.PIN, ActionKind.COMPRESS, ActionKind.DECOMPRESS, ActionKind.EVICT)


class LMCacheControllerExecutor:
    """``instances`` are LMCache's instance ids by ours; engines that are not named are unknown to it."""

    name = "lmcache-controller"

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        instances: Mapping[str, str],
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        compression: str = "cachegen",
    ) -> None:
        self._client = client
        self._url = url
        self._instances = dict(instances)
        self._chunk_tokens = chunk_tokens
        self._compression = compression

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        if not self._knows(target):
            return False
        if kind in _MOVES:  # workers receive into their host's memory, and only from another instance
            return (
                source is not None
                and self._knows(source)
                and source.tier is target.tier is Tier.HOST
                and source.holder != target.holder
            )
        return kind in _IN_PLACE

    async def execute(self, action: TierAction) -> int:
        instance, location = self._position(action.target)
        place = {"instance_id": instance, "location": location}
        if action.kind is ActionKind.EVICT:
            if action.prefix is not None:
                raise ExecutionError("the controller clears whole backends and drops no single prefix")
            await self._ordered("clear", place)
            return action.blocks
        chunks, tokens = chunks_up_to(action, self._chunk_tokens), known_tokens(action).tolist()
        if action.kind in _MOVES:
            assert action.source is not None
            order: dict[str, Any] = {
                "old_position": self._position(action.source),
                "new_position": (instance, location),
                "tokens": tokens,
                "should_copy": action.kind is ActionKind.REPLICATE,
            }
            done = await self._ordered("move", order)
        else:
            order = {**place, "tokens": tokens}
            if action.kind is not ActionKind.PIN:
                order["method"] = self._compression
            done = await self._ordered(action.kind, order)
        return chunks.blocks(action, done // self._chunk_tokens)

    async def lookup(self, token_ids: list[int]) -> dict[str, tuple[str, int]]:
        """Where the controller has seen a prompt: location and matched tokens by LMCache's instance ids."""
        answer = await ask(self._client, "POST", f"{self._url}/lookup", json={"tokens": token_ids})
        return {name: (found[0], found[1]) for name, found in answer.get("layout_info", {}).items()}

    async def health(self, instance_id: str) -> dict[str, int]:
        """Error codes by worker; 0 is healthy. Raises ExecutionError for an instance that it does not know."""
        body = {"instance_id": self._instances.get(instance_id, instance_id)}
        answer = await ask(self._client, "POST", f"{self._url}/health", json=body)
        return dict(answer.get("error_codes", {}))

    async def _ordered(self, verb: str, body: dict[str, Any]) -> int:
        """Tokens that the workers took on. An unknown instance is a server error there, and no passing one."""
        try:
            return count(await ask(self._client, "POST", f"{self._url}/{verb}", json=body), "num_tokens")
        except ExecutionError as error:
            if " answered 500" in str(error):
                raise ExecutionError(f"{error} (is the instance registered with the controller?)") from None
            raise

    def _knows(self, place: Place) -> bool:
        return (
            place.holder.instance_id in self._instances
            and not is_lmcache(place.holder)
            and place.tier in _LOCATIONS
        )

    def _position(self, place: Place) -> tuple[str, str]:
        return self._instance(place.holder), _LOCATIONS[place.tier]

    def _instance(self, holder: Holder) -> str:
        return self._instances[holder.instance_id]
