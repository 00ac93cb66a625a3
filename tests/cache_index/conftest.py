"""Feeds and the engines they follow, closed at the end; an index that forgets only when it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_feed import Engine, Feed

from cache_index import slots


@pytest.fixture
def feed() -> Iterator[Feed]:
    made = Feed()
    yield made
    made.source.close()


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def swept_between_groups() -> Iterator[None]:
    """What was cleared is forgotten piece by piece in passing; when exactly is nobody's business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "SWEEP_PER_BLOCK", 0)
        patch.setattr(slots, "SWEEP_PER_CALL", 0)
        yield
