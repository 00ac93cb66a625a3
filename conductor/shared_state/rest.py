"""Routes of the replicas: who they are, and the index for one that joins."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog
from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import StreamingResponse

from conductor.rest import answers
from conductor.shared_state.joining import SNAPSHOT_PATH
from conductor.shared_state.sharing import SharedState

_log = structlog.get_logger(__name__)

_PIECE_BYTES: Final = 1 << 20


class ReplicaAnswer(answers.Answer):
    """One conductor that shares the state."""

    replica: str
    url: str
    started_at_s: float
    warm_streams: int
    instances: int
    leads: bool


class ReplicasAnswer(answers.Answer):
    """How the shared state stands, and who takes part."""

    redis: str
    address: str
    reason: str
    for_s: float
    replica: str
    leads: bool
    leader: str
    token: int
    conflicts: list[str]
    replicas: list[ReplicaAnswer]


def make_shared_state_router(shared: SharedState, save: Callable[[Path], object]) -> APIRouter:
    """``save`` writes a snapshot of the index to a file; it is called in a thread."""
    router = APIRouter(tags=["replicas"])
    saving = asyncio.Lock()

    @router.get("/v1/replicas", summary="The replicas that share state", **answers.documented(ReplicasAnswer))
    async def replicas() -> Response:
        """`redis` is `up`, `down` or `connecting`; `token` is the leader's, which grows with every new one."""
        status: dict[str, Any] = shared.status()
        status["replicas"] = [
            {
                "replica": peer.replica,
                "url": peer.url,
                "started_at_s": peer.started_at_s,
                "warm_streams": peer.warm_streams,
                "instances": peer.instances,
                "leads": bool(status["leader"]) and peer.replica == status["leader"],
            }
            for peer in shared.peers
        ]
        return answers.json_answer(status)

    @router.get(SNAPSHOT_PATH, summary="The index as it is now", response_class=StreamingResponse)
    async def snapshot() -> Response:
        """For a replica that joins: a file as those of `state_dir`."""
        async with saving:
            try:
                file = await asyncio.to_thread(_saved, save)
            except OSError as error:
                _log.error("no snapshot can be written", path=tempfile.gettempdir(), reason=str(error))
                raise HTTPException(503, f"no snapshot can be written here: {error.strerror}") from None
        length = {"content-length": str(os.fstat(file.fileno()).st_size)}
        return StreamingResponse(_pieces(file), media_type="application/octet-stream", headers=length)

    return router


def _saved(save: Callable[[Path], object]) -> BinaryIO:
    """A file that has no name any more: it may have gigabytes, and is gone however the request for it ends."""
    with tempfile.TemporaryDirectory(prefix="conductor-index-") as folder:
        path = Path(folder) / "snapshot"
        save(path)
        return path.open("rb")


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
