"""Drives emulated engines (`python -m simulator.emulator`): their device and host tiers, by their own routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from cache_index import Tier
from conductor.actions import ActionKind, ExecutionError, Place, TierAction
from conductor.executors.chunk_ranges import known_prefix, known_tokens
from conductor.executors.store_http import ask, count

_LOADS = (ActionKind.PREFETCH, ActionKind.PROMOTE, ActionKind.DEMOTE, ActionKind.REPLICATE, ActionKind.MOVE)
_IN_PLACE = (ActionKind.EVICT, ActionKind.PIN, ActionKind.UNPIN)


class EmulatedExecutor:
    """``urls`` are emulated engines by instance id; those in ``with_host`` have a host tier."""

    name = "emulated"

    def __init__(
        self, client: httpx.AsyncClient, urls: Mapping[str, str], with_host: frozenset[str] = frozenset()
    ) -> None:
        self._client = client
        self._urls = dict(urls)
        self._with_host = with_host

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        if not self._has(target) or (source is not None and not self._has(source)):
            return False
        if kind in _IN_PLACE:
            return True
        if kind not in _LOADS or source is None or source == target:
            return False
        at_home = source.holder == target.holder
        if kind in (ActionKind.REPLICATE, ActionKind.MOVE):
            return not at_home
        down = source.tier is Tier.DEVICE
        return at_home and down == (kind is ActionKind.DEMOTE)

    async def execute(self, action: TierAction) -> int:
        if action.kind in _IN_PLACE:
            return await self._ask(action.target, str(action.kind), action)
        source = action.source
        if source is None:
            raise ExecutionError(f"{action.kind} needs a source")
        peer: dict[str, Any] = {}
        if source.holder != action.target.holder:
            peer = {
                "peer": self._urls[source.holder.instance_id],
                "peer_tier": source.tier.name.lower(),
                "peer_rank": source.holder.rank,
            }
        loaded = await self._ask(action.target, "load", action, **peer)
        if action.kind in (ActionKind.MOVE, ActionKind.DEMOTE) and loaded == action.blocks:
            await self._ask(source, "evict", action)
        return loaded

    async def _ask(self, place: Place, verb: str, action: TierAction, **more: Any) -> int:
        """Blocks of the action's range, as the engine answers."""
        body: dict[str, Any] = {"tier": place.tier.name.lower(), "rank": place.holder.rank, **more}
        if action.prefix is not None:
            body |= {"start": action.start, "stop": action.stop, "token_ids": known_tokens(action).tolist()}
            body["cache_salt"] = known_prefix(action).cache_salt
        url = f"{self._urls[place.holder.instance_id]}/kv_tiers/{verb}"
        return count(await ask(self._client, "POST", url, json=body), "blocks")

    def _has(self, place: Place) -> bool:
        name = place.holder.instance_id
        return name in self._urls and (
            place.tier is Tier.DEVICE or (place.tier is Tier.HOST and name in self._with_host)
        )
