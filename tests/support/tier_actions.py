"""Tier actions for tests of executors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from cache_index import Holder, Namespace, Tier, sequence_hashes
from conductor.actions import ActionKind, Place, Prefix, TierAction

BLOCK = 16
_ids = itertools.count()


def prefix_of(
    tokens: Sequence[int], model: str, *, salt: str | None = None, lora: str | None = None
) -> Prefix:
    array = np.array(tokens, np.uint32)
    hashes = sequence_hashes(array, BLOCK, cache_salt=salt)
    return Prefix(Namespace(model, BLOCK, lora), hashes, array, salt)


def order(
    kind: ActionKind,
    prefix: Prefix | None,
    target: Place,
    *,
    source: Place | None = None,
    start: int = 0,
    stop: int | None = None,
) -> TierAction:
    """For the whole prefix unless ``start`` and ``stop`` are given."""
    blocks = 0 if prefix is None else len(prefix.hashes)
    return TierAction(
        action_id=f"order-{next(_ids)}",
        kind=kind,
        prefix=prefix,
        start=start,
        stop=blocks if stop is None else stop,
        source=source,
        target=target,
        kv_bytes=1024,
        benefit_s=0.0,
        cost_s=0.0,
        deadline_s=time.monotonic() + 60.0,
        reason="a test",
    )


def host(instance_id: str) -> Place:
    return Place(Holder(instance_id), Tier.HOST)
