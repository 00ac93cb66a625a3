"""The index over REST: its event streams, its prefixes, and what is held where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from cache_index import (
    CacheIndex,
    Holder,
    Namespace,
    StreamBooks,
    StreamStats,
    Tier,
    TreeNode,
    sequence_hashes,
)
from cache_index.hot_tree import HotBranch, hot_branches
from cache_index.residency import HeldRange
from conductor.rest import answers

_WORD = (1 << 64) - 1

Limit = Annotated[int, Query(ge=1, le=10_000, description="How many at most.")]
BlockKey = Annotated[
    str,
    Query(
        pattern=r"^[0-9a-fA-F]{1,16}$", description="Show what continues this block: a `hash` of an answer."
    ),
]


class RangeQuery(BaseModel):
    """A range of a prompt's blocks, by its tokens or by its sequence hashes (RFC #1527, seed 1337)."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    model: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("model", "modelname", "model_name"))
    ]
    block_size: Annotated[int, Field(gt=0, le=65_536)]
    token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] | None = None
    seq_hashes: list[Annotated[int, Field(ge=-(2**63), lt=2**64)]] | None = None
    start_block: Annotated[int, Field(ge=0)] = 0
    stop_block: Annotated[int, Field(ge=0)] | None = None
    lora_name: str | None = None
    tenant_id: str | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _one_prompt_and_a_range(self) -> RangeQuery:
        if (self.token_ids is None) == (self.seq_hashes is None):
            raise ValueError("give either token_ids or seq_hashes")
        if self.stop_block is not None and self.stop_block <= self.start_block:
            raise ValueError(f"stop_block must be greater than start_block ({self.start_block})")
        return self


def make_cache_router(index: CacheIndex, events: StreamBooks) -> APIRouter:
    """Routes under /v1/cache. Those that read much of the index run in worker threads."""
    router = APIRouter(prefix="/v1/cache", tags=["cache"])

    @router.get("/streams", summary="KV event streams and their state")
    async def streams() -> dict[str, Any]:
        return {"streams": [_stream(s) for s in events.stream_stats()]}

    @router.get(
        "/tree",
        summary="The cached prefixes from their roots, or below one block",
        responses=answers.refusals(404, 422),
    )
    def tree(limit: Limit = 100, root: BlockKey | None = None) -> dict[str, Any]:
        """The blocks nearest to the roots first. `sampled` tells that the table was being moved, or that more
        than two million blocks lie at one depth below the root: then some that belong here are missing."""
        stats = index.stats()
        view = index.tree(limit=limit) if root is None else index.subtree(int(root, 16), limit=limit)
        if view is None:
            raise HTTPException(
                404, f"root: no block {root} is in the index; take a `hash` of /v1/cache/tree"
            )
        return {
            "blocks": stats.blocks,
            "residencies": stats.residencies,
            "index_bytes": stats.bytes,
            "sampled": view.sampled,
            "nodes": [_node(node) for node in view.nodes],
        }

    @router.get("/hot", summary="Where most recent look-ups ended", responses=answers.refusals(422))
    def hot(
        limit: Annotated[int, Query(ge=1, le=1000, description="How many at most.")] = 20,
    ) -> Response:
        """The last block that anybody had of the prompts asked for lately, most frequent first. Counts are
        estimates that fade; `above` is the nearest of these that a prefix continues, `held_by` names up to 20
        of its `holders`. `/v1/cache/tree?root=HASH` shows what continues a block."""
        return answers.json_answer({"prefixes": [_hot(branch) for branch in hot_branches(index, limit)]})

    @router.post(
        "/best-holder",
        summary="Who has most of a range of blocks without a gap",
        responses=answers.refusals(422),
    )
    def best_holder(query: RangeQuery) -> dict[str, Any]:
        """Tiers are cumulative: under `host`, blocks count that lie in the device or the host. A tier up to
        which nobody has the first block of the range is left out."""
        namespace = Namespace(query.model, query.block_size, query.lora_name, query.tenant_id or "default")
        if query.token_ids is not None:
            tokens = np.array(query.token_ids, np.uint32)
            hashes = sequence_hashes(tokens, query.block_size, cache_salt=query.cache_salt)
        else:
            hashes = np.array([value & _WORD for value in query.seq_hashes or ()], np.uint64)
        best = index.best_holder(namespace, hashes, query.start_block, query.stop_block)
        return {"tiers": {tier.name.lower(): _held(held, query.block_size) for tier, held in best.items()}}

    @router.get("/occupancy", summary="How much is held, in total and by holder, and what the index takes")
    async def occupancy() -> dict[str, Any]:
        """`max_blocks` is the index's own limit (null: none), at which it drops what was not used lately."""
        stats = index.stats()
        return {
            "blocks": stats.blocks,
            "residencies": stats.residencies,
            "tiers": _totals(stats.residencies_by_holder),
            "holders": [
                {"instance": holder.instance_id, "rank": holder.rank, "tiers": _named(tiers)}
                for holder, tiers in stats.residencies_by_holder.items()
            ],
            "index_bytes": stats.bytes,
            "max_blocks": stats.max_blocks,
            "dropped_residencies": stats.dropped_residencies,
        }

    return router


def _stream(stats: StreamStats) -> dict[str, Any]:
    counts = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "holder"}
    return {"instance": stats.holder.instance_id, "rank": stats.holder.rank, **counts}


def _node(node: TreeNode) -> dict[str, Any]:
    return {
        "hash": _hex(node.hash),
        "parent": _hex(node.parent),
        "depth": node.depth,
        "holders": _places(node.holders),
    }


def _hot(branch: HotBranch) -> dict[str, Any]:
    prefix = branch.prefix
    return {
        "hash": _hex(prefix.hash),
        "parent": _hex(prefix.parent),
        "above": _hex(branch.above),
        "depth": prefix.depth,
        "matches": prefix.matches,
        "holders": prefix.holders,
        "held_by": _places(branch.held_by),
    }


def _places(owners: Iterable[tuple[Holder, Tier]]) -> list[dict[str, Any]]:
    return [{"instance": h.instance_id, "rank": h.rank, "tier": t.name.lower()} for h, t in owners]


def _held(held: HeldRange, block_size: int) -> dict[str, Any]:
    return {
        "instance": held.holder.instance_id,
        "rank": held.holder.rank,
        "blocks": held.blocks,
        "tokens": held.blocks * block_size,
    }


def _totals(by_holder: Mapping[Holder, Mapping[Tier, int]]) -> dict[str, int]:
    return {tier.name.lower(): sum(tiers.get(tier, 0) for tiers in by_holder.values()) for tier in Tier}


def _named(tiers: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.name.lower(): blocks for tier, blocks in sorted(tiers.items())}


def _hex(key: int | None) -> str | None:
    return None if key is None else f"{key:016x}"
