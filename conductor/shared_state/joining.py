"""What a replica takes over before it begins: what others learned, and the index of one of them.

The index comes over HTTP from the replica itself and not through Redis: it may have gigabytes, which Redis would
have to hold in memory and would answer to nobody while it writes them out. A snapshot says up to which event it
has each engine's stream; from there the engine's own replay goes on, so nothing is missed and nothing comes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import structlog

from conductor.admission import OutputLengths, load_output_lengths
from conductor.costs import Calibration
from conductor.shared_state import replicas, scripts
from conductor.shared_state.learned import SharedCalibrations
from conductor.shared_state.link import LinkError, RedisLink

_log = structlog.get_logger(__name__)

SNAPSHOT_PATH = "/v1/index/snapshot"
FETCH_WITHIN_S = 60.0
_TIMEOUTS = httpx.Timeout(10.0, connect=1.0)


@dataclass(slots=True)
class Joined:
    """``snapshot`` is the file that was asked for, once it is there."""

    shared: SharedCalibrations = field(default_factory=SharedCalibrations)
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    lengths: OutputLengths | None = None
    snapshot: Path | None = None


async def join(
    link: RedisLink, client: httpx.AsyncClient, headers: Mapping[str, str], snapshot: Path
) -> Joined:
    """What can be had; where Redis or a peer does not answer, less of it. Writes ``snapshot``."""
    joined = Joined()
    try:
        records, learned, lengths = await link.run(
            scripts.LOOK, ("presence", "records", "learned", "lengths")
        )
    except LinkError as error:
        _log.warning(
            "nothing is taken over: the shared state is out of reach", redis=link.host, reason=str(error)
        )
        return joined
    try:
        joined.calibrations = joined.shared.start_with(_pairs(learned))
        if lengths:
            joined.lengths = load_output_lengths(lengths)
        peers = replicas.helpful(replicas.decoded(_pairs(records)))
    except (ValueError, msgspec.DecodeError) as error:
        _log.warning("what other replicas told cannot be read", redis=link.host, reason=str(error)[:200])
        return Joined()
    for peer in peers:
        if await _fetch(peer.url, client, headers, snapshot):
            joined.snapshot = snapshot
            _log.info("index taken over", replica=peer.replica, file_bytes=snapshot.stat().st_size)
            break
    return joined


async def _fetch(url: str, client: httpx.AsyncClient, headers: Mapping[str, str], path: Path) -> bool:
    try:
        async with (
            asyncio.timeout(FETCH_WITHIN_S),
            client.stream("GET", url + SNAPSHOT_PATH, headers=headers, timeout=_TIMEOUTS) as answer,
        ):
            if answer.status_code != 200:
                raise OSError(f"answered {answer.status_code}")
            with path.open("wb") as file:
                async for piece in answer.aiter_bytes(1 << 20):
                    file.write(piece)
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        _log.warning("a replica gives no index", url=url, reason=f"{type(error).__name__}: {error}"[:200])
        path.unlink(missing_ok=True)
        return False
    return True


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
