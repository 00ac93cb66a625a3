"""What is said about a stream of events: where it comes from, where it stands, how it goes."""

from __future__ import annotations

from dataclasses import dataclass

from cache_index.replay import Position, StreamState
from cache_index.residency import Holder, Tier


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Where one rank of an engine publishes its KV events.

    ``block_size`` None takes it from the events; ``replay_endpoint`` None: the engine cannot replay.
    ``tiers`` are those that the stream speaks for, None: all. When the engine clears its cache, or batches
    are missing, only they are cleared; another stream of the same holder may tell of the others.
    """

    holder: Holder
    model: str
    endpoint: str
    replay_endpoint: str | None
    topic: str = ""
    block_size: int | None = None
    tenant: str = "default"
    tiers: frozenset[Tier] | None = None

    def overlaps(self, other: StreamConfig) -> bool:
        """Whether both speak for the same tier of the same holder."""
        if self.holder != other.holder:
            return False
        return self.tiers is None or other.tiers is None or bool(self.tiers & other.tiers)

    def means_the_same(self, other: StreamConfig) -> bool:
        """Whether events would be read in the same way, wherever they come from."""
        return (self.holder, self.model, self.block_size, self.tenant, self.tiers) == (
            other.holder,
            other.model,
            other.block_size,
            other.tenant,
            other.tiers,
        )


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What a stream's events have told of its engine's ways: see ``cache_groups`` and ``extra_keys``."""

    main_group: int | None = None
    main_group_is_provisional: bool = False
    publishes_extra_keys: bool = False
    doubtful: int = 0


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Up to where a stream is in the index, and what was learned of its engine on the way."""

    config: StreamConfig
    position: Position
    traits: EngineTraits = EngineTraits()


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Counts since the stream was added. ``cold``: usable, but residencies may be missing."""

    holder: Holder
    state: StreamState
    last_seq: int
    batches: int
    events: int
    gaps: int
    replays: int
    malformed_frames: int
    malformed_events: int
    unknown_events: int
    unresolved_blocks: int
    last_event_at_s: float | None  # on the source's clock
    other_group_events: int = 0  # not applied: of KV cache groups beside the one that is followed
    lag_s: float | None = (
        None  # of the last batch: from its publisher's clock to ours, when it was in the index
    )
