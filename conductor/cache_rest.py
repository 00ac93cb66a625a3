"""The index over REST: its event streams and a view of its prefixes."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from fastapi import APIRouter, Query

from cache_index import CacheIndex, StreamBooks, StreamStats, TreeNode


def make_cache_router(index: CacheIndex, events: StreamBooks) -> APIRouter:
    """Routes under /v1/cache."""
    router = APIRouter(prefix="/v1/cache", tags=["cache"])

    @router.get("/streams", summary="KV event streams and their state")
    async def streams() -> dict[str, Any]:
        return {"streams": [_stream(s) for s in events.stream_stats()]}

    @router.get("/tree", summary="A bounded view of the cached prefixes")
    async def tree(limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> dict[str, Any]:
        stats = index.stats()
        return {
            "blocks": stats.blocks,
            "residencies": stats.residencies,
            "index_bytes": stats.bytes,
            "nodes": [_node(node) for node in index.tree(limit=limit)],
        }

    return router


def _stream(stats: StreamStats) -> dict[str, Any]:
    counts = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "holder"}
    return {"instance": stats.holder.instance_id, "rank": stats.holder.rank, **counts}


def _node(node: TreeNode) -> dict[str, Any]:
    return {
        "hash": f"{node.hash:016x}",
        "parent": None if node.parent is None else f"{node.parent:016x}",
        "depth": node.depth,
        "holders": [
            {"instance": h.instance_id, "rank": h.rank, "tier": t.name.lower()} for h, t in node.holders
        ],
    }
