"""The file format of recorded decisions: everything that entered a scheduler, and what it decided, as JSON lines.

The first line is the `Header`: the cluster before anything happened, the policy and the objectives. Every further
line is a `Frame`: one event, what the cache index and the prediction of answer lengths said while it was handled,
and the decisions that followed. The last line says how the recording ended; it is missing when the process did not
stop in order. Floats are written so that they read back exactly; prompts are not recorded, only how much of them
was found cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from conductor.circuit import SuspensionPolicy
from conductor.cluster import EngineFacts
from conductor.costs import InstanceClass, PoolLink, Speed
from conductor.placement import InstanceFailure, Role, TokenSource, Usage
from conductor.rank import PlacedElsewhere, ReportedLoad

FORMAT: Final = "conductor decisions"
VERSION: Final = 3


class RecordingError(Exception):
    """The file cannot be read as a recording; the message says where and why."""


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class RecordedInstance(_Line, frozen=True):
    """An instance as it was configured; ``instance_class`` names one of the header or of the event."""

    id: str
    url: str
    role: Role
    instance_class: str
    protocol: str
    ranks: int
    block_size: int | None = None
    location: str = ""
    fetches_from_peers: bool = False
    streams_layers: bool = False


class RecordedPolicy(_Line, frozen=True):
    """What `make_policy` is called with; of an admission rule, `make_rule`."""

    name: str
    parameters: dict[str, Any] = {}
    seed: int = 0


class LearnedFactor(_Line, frozen=True):
    """A `Scale`."""

    factor: float
    observations: int
    raw_s: float


class Header(_Line, frozen=True):
    """The first line."""

    recording: str
    version: int
    written_by: str  # version of the conductor
    started: str  # ISO 8601, UTC
    policy: RecordedPolicy
    ttft_objective_s: float
    tbt_objective_s: float
    suspension: SuspensionPolicy
    id_prefix: str
    links: list[Speed]  # by distance
    classes: list[InstanceClass]
    instances: list[RecordedInstance]
    admission: RecordedPolicy = RecordedPolicy("accept_all")
    tbt_share: float = 0.1
    aliases: dict[str, str] = {}
    calibrations: dict[str, tuple[LearnedFactor, LearnedFactor]] = {}  # prefill and decode, by class
    pool_links: list[PoolLink] = []


class RecordedRequest(_Line, frozen=True):
    """A `PlacementRequest` without its prompt."""

    request_id: str
    model: str
    prompt_tokens: int
    token_source: TokenSource = TokenSource.LOCAL
    streamed: bool = True
    max_output_tokens: int | None = None
    tenant: str = "default"
    route: str = ""
    session: str | None = None
    priority: int = 0
    arrived_s: float | None = None
    ttft_objective_s: float | None = None
    tbt_objective_s: float | None = None
    prefill_on: tuple[str, int] | None = None
    excluded: list[str] = []
    retry_of: str | None = None
    hedge_of: str | None = None


class Event(_Line, frozen=True, tag_field="event"):
    """Something that entered the scheduler. Times are of its clock."""


class Placed(Event, frozen=True, tag="place"):
    at_s: float
    request: RecordedRequest


class PrefillFinished(Event, frozen=True, tag="prefill_finished"):
    at_s: float
    id: str


class FirstToken(Event, frozen=True, tag="first_token"):
    at_s: float
    id: str


class Finished(Event, frozen=True, tag="finished"):
    at_s: float
    id: str
    usage: Usage


class Cancelled(Event, frozen=True, tag="cancelled"):
    at_s: float
    id: str


class Expired(Event, frozen=True, tag="expired"):
    at_s: float
    id: str


class Failed(Event, frozen=True, tag="failed"):
    at_s: float
    id: str
    failure: InstanceFailure


class InstanceUp(Event, frozen=True, tag="instance_up"):
    instance: str
    facts: EngineFacts


class InstanceDown(Event, frozen=True, tag="instance_down"):
    instance: str
    reason: str


class LoadReported(Event, frozen=True, tag="load"):
    instance: str
    rank: int
    load: ReportedLoad


class ElsewherePlaced(Event, frozen=True, tag="elsewhere"):
    """All that others have placed: instance, rank and load."""

    placed: list[tuple[str, int, PlacedElsewhere]]


class InstanceAdded(Event, frozen=True, tag="instance_added"):
    instance: RecordedInstance
    instance_class: InstanceClass


class InstanceDrained(Event, frozen=True, tag="instance_drained"):
    instance: str


class InstanceWithheld(Event, frozen=True, tag="instance_withheld"):
    instance: str
    reason: str


class InstanceReadmitted(Event, frozen=True, tag="instance_readmitted"):
    instance: str


class InstanceRemoved(Event, frozen=True, tag="instance_removed"):
    instance: str


class CalibrationReset(Event, frozen=True, tag="calibration_reset"):
    instance_class: str


AnyEvent = (
    Placed
    | PrefillFinished
    | FirstToken
    | Finished
    | Cancelled
    | Expired
    | Failed
    | InstanceUp
    | InstanceDown
    | LoadReported
    | ElsewherePlaced
    | InstanceAdded
    | InstanceDrained
    | InstanceWithheld
    | InstanceReadmitted
    | InstanceRemoved
    | CalibrationReset
)


class RecordedSegment(_Line, frozen=True, array_like=True):
    """A `PlanSegment`."""

    start: int
    stop: int
    instance: str
    rank: int
    tier: int


class Decision(_Line, frozen=True, tag_field="decision", tag="placed"):
    """A placement, as far as the policy and the estimates made it."""

    id: str
    prefill: tuple[str, int]  # instance and rank
    decode: tuple[str, int]
    overlap_tokens: int
    plan_tokens: int
    segments: list[RecordedSegment]
    fetch_s: float
    prefill_s: float
    queue_s: float
    hand_off_s: float
    ttft_s: float
    tbt_s: float


class Refusal(_Line, frozen=True, tag_field="decision", tag="refused"):
    """A request that could not be placed."""

    kind: str
    reason: str
    retry_after_s: float | None = None


class Prompt(_Line, frozen=True):
    """Sequence hashes of a prompt, recorded for policies that remember prompts."""

    block_size: int
    hashes: list[int]


# What the index said of one cache group: [position in the group, blocks by tier] of those that hold anything;
# None: nothing could be said.
Found = list[list[int]] | None


class Frame(_Line, frozen=True):
    """One line: an event, what was found cached on the way, and what was decided."""

    do: AnyEvent
    found: list[Found] = []
    answers: list[int] = []  # predicted lengths, in tokens
    decided: list[Decision | Refusal] = []
    prompt: Prompt | None = None


class End(_Line, frozen=True):
    """The last line; ``dropped`` events came after it and are not in the file."""

    end: str
    dropped: int = 0


encode = msgspec.json.Encoder(enc_hook=lambda array: array.tolist()).encode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_frame = msgspec.json.Decoder(Frame).decode
_decode_end = msgspec.json.Decoder(End).decode


@dataclass(slots=True)
class Recording:
    """A file of decisions. After `frames` is exhausted, ``end`` and ``truncated`` say how the file stops."""

    path: Path
    header: Header
    end: End | None = None
    truncated: bool = False

    def frames(self) -> Iterator[tuple[int, Frame]]:
        """Line numbers and frames. Raises RecordingError for a line that is none; a last line that was cut off
        in the middle is left out."""
        with self.path.open("rb") as lines:
            next(lines)
            for number, line in enumerate(lines, start=2):
                if line.startswith(b'{"end"'):
                    self.end = _decode_end(line)
                    return
                try:
                    yield number, _decode_frame(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if not line.endswith(b"\n"):
                        self.truncated = True
                        return
                    raise RecordingError(f"{self.path}, line {number}: {error}") from None


def open_recording(path: Path) -> Recording:
    """Raises RecordingError when the file is no recording, or one of another version."""
    try:
        with path.open("rb") as lines:
            first = lines.readline()
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from None
    try:
        about = msgspec.json.decode(first)
        known = isinstance(about, dict) and about.get("recording") == FORMAT
    except (msgspec.DecodeError, UnicodeDecodeError):
        known = False
    if not known:
        raise RecordingError(
            f"{path} is no recording of decisions: its first line is not a header with "
            f'"recording": "{FORMAT}"; record one with `conductor serve --record FILE`'
        )
    if about.get("version") != VERSION:
        raise RecordingError(
            f"{path} has version {about.get('version')!r} of the format, this conductor reads {VERSION}"
        )
    try:
        return Recording(path, _decode_header(first))
    except msgspec.ValidationError as error:
        raise RecordingError(f"{path}, line 1: {error}") from None
