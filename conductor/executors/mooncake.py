"""Drives a Mooncake store: its master's admin HTTP, and its client library for copies where that is installed.

As observed of the store of mooncake-transfer-engine 0.3.13: asking the master for a key (`/query_key`) counts as
an access and, with `--promotion_on_hit`, brings it from disk to memory; a drain job evacuates a segment, and
stays running for good when a target holds a replica of a key already; nothing demotes, pins or unpins a key.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx

from cache_index import Holder, Namespace, Tier
from cache_index.hashing import Hashes
from conductor.actions import ActionKind, ExecutionError, Place, TierAction
from conductor.executors.chunk_ranges import known_prefix
from conductor.executors.mooncake_copies import ObjectCopies
from conductor.executors.store_http import ask
from conductor.own_thread import in_own_thread

_LOADS = (ActionKind.PREFETCH, ActionKind.PROMOTE)
_COPIES = (ActionKind.REPLICATE, ActionKind.MOVE)
_KEYS_AT_ONCE = 256  # in one address
_POLL_S = 0.2
_STUCK_S = 5.0  # a drain without progress

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MooncakeStore:
    """``admin_url`` is the master's admin port; ``key_format`` makes an object's key of the engine's hash."""

    admin_url: str
    key_format: str = "0x{:016x}"
    copies: ObjectCopies | None = None


def segment_holder(pool: str, segment: str) -> Holder:
    """A node's part of a pool, as holder of actions; the index knows the pool as a whole."""
    return Holder(f"{pool}@{segment}")


class MooncakeExecutor:
    """``names_of`` tells which objects of a pool hold some blocks."""

    name = "mooncake"

    def __init__(
        self,
        client: httpx.AsyncClient,
        stores: Mapping[str, MooncakeStore],
        names_of: Callable[[Holder, Namespace, Hashes], Sequence[int | None]],
    ) -> None:
        self._client = client
        self._stores = dict(stores)
        self._names_of = names_of

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        pool, segment = _parts(target.holder)
        store = self._stores.get(pool)
        if store is None or (source is not None and _parts(source.holder)[0] != pool):
            return False
        if kind in _LOADS:
            return target.tier is not Tier.DISK and segment is None
        if kind is ActionKind.EVICT:  # of a whole segment
            return segment is not None
        if kind not in _COPIES or segment is None or store.copies is None:
            return False
        return kind is ActionKind.REPLICATE or (source is not None and _parts(source.holder)[1] is not None)

    async def execute(self, action: TierAction) -> int:
        pool, segment = _parts(action.target.holder)
        store = self._stores[pool]
        if action.kind is ActionKind.EVICT:
            return await self._drain(store, str(segment), action)
        keys = await self._keys(store, Holder(pool), action)
        if action.kind in _LOADS:
            return await self._promote(store, keys)
        source = None if action.source is None else _parts(action.source.holder)[1]
        held = await self._held(store, keys)
        return await _copied(
            store, keys[:held], source if action.kind is ActionKind.MOVE else None, str(segment)
        )

    async def _promote(self, store: MooncakeStore, keys: Sequence[str]) -> int:
        """Ask for what is not in memory, until it is, or as long as the action may take."""
        triggered: set[str] = set()
        while True:
            replicas = await self._replicas(store, keys)
            there = _first_without(replicas, lambda known: bool(known.get("ok")))
            cold = [
                key for key, known in zip(keys[:there], replicas, strict=False) if not known.get("values")
            ]
            if not cold:
                return there
            for key in cold:
                if key not in triggered:
                    triggered.add(key)
                    await ask(self._client, "GET", f"{store.admin_url}/query_key", params={"key": key})
            await asyncio.sleep(_POLL_S)

    async def _held(self, store: MooncakeStore, keys: Sequence[str]) -> int:
        """How many of the first keys have a replica in memory."""
        replicas = await self._replicas(store, keys)
        return _first_without(replicas, lambda known: bool(known.get("values")))

    async def _replicas(self, store: MooncakeStore, keys: Sequence[str]) -> list[dict[str, Any]]:
        """What the master knows of each key; counts as no access."""
        found: dict[str, Any] = {}
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = ",".join(keys[start : start + _KEYS_AT_ONCE])
            url = f"{store.admin_url}/batch_query_keys"
            found |= (await ask(self._client, "GET", url, params={"keys": some})).get("data") or {}
        return [found.get(key) or {} for key in keys]

    async def _keys(self, store: MooncakeStore, pool: Holder, action: TierAction) -> list[str]:
        """Of the action's blocks, up to the first that the pool is not known to hold."""
        prefix = known_prefix(action)
        hashes = prefix.hashes[action.start : action.stop]
        names = await asyncio.to_thread(self._names_of, pool, prefix.namespace, hashes)
        known = _first_without(names, lambda name: name is not None)
        return [store.key_format.format(name) for name in names[:known]]

    async def _drain(self, store: MooncakeStore, segment: str, action: TierAction) -> int:
        if action.prefix is not None:
            raise ExecutionError("Mooncake's master drops no single prefix; it drains whole segments")
        jobs = f"{store.admin_url}/api/v1/drain_jobs"
        order = {"segments": [segment], "target_segments": [], "max_concurrency": 4}
        job = {"job_id": (await ask(self._client, "POST", jobs, json=order))["job_id"]}
        try:
            await self._drained(f"{jobs}/query", job)
        except (asyncio.CancelledError, ExecutionError):
            await ask(self._client, "POST", f"{jobs}/cancel", params=job)
            raise
        return action.blocks

    async def _drained(self, url: str, job: dict[str, Any]) -> None:
        """Wait for the end of a drain. Raises ExecutionError when it failed, or got stuck."""
        loop = asyncio.get_running_loop()
        seen, since_s = None, loop.time()
        while True:
            state = await ask(self._client, "GET", url, params=job)
            name = str(state.get("status_name", ""))
            if name.startswith("SUCC"):
                return
            if name.startswith(("FAIL", "CANCEL")):
                raise ExecutionError(f"the drain ended as {name}: {state.get('message', '')}")
            progress = (state.get("succeeded_units"), state.get("active_units"))
            if progress != seen:
                seen, since_s = progress, loop.time()
            elif (
                loop.time() - since_s > _STUCK_S
                and not state.get("active_units")
                and state.get("blocked_units")
            ):
                raise ExecutionError(
                    f"{state['blocked_units']} objects cannot leave the segment, {state['succeeded_units']} have; "
                    "the other segments may hold replicas of them"
                )
            await asyncio.sleep(_POLL_S)


async def _copied(store: MooncakeStore, keys: Sequence[str], source: str | None, target: str) -> int:
    assert store.copies is not None
    stop = threading.Event()
    copy = partial(store.copies.carry_out, keys, source, target, stop)
    try:
        return await in_own_thread(copy, "mooncake-copies")  # it hangs as long as the master does
    finally:
        stop.set()  # a thread cannot be cancelled


def _parts(holder: Holder) -> tuple[str, str | None]:
    """The pool, and the segment that is meant of it."""
    pool, at, segment = holder.instance_id.partition("@")
    return pool, segment if at else None


def _first_without(items: Sequence[Item], has: Callable[[Item], bool]) -> int:
    return next((i for i, each in enumerate(items) if not has(each)), len(items))
