"""What workers and the conductor tell each other, as msgpack arrays; both ends are of one installation.

A worker asks with tickets of its own; an answer names the ticket. All times are of the machine's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from conductor.placement import (
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementError,
    PlacementRequest,
    PrefixPlan,
    RejectedError,
    Role,
    Target,
    TokenSource,
    TooLongError,
    UnknownModelError,
    Usage,
)
from router.api_keys import ApiKey
from router.errors import RequestError
from router.refusals import AnsweredError
from router.settings import RouterSettings


class MessageError(Exception):
    """A payload that is no message of this protocol."""


class _Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    pass


class AskedPlacement(_Message):
    """A placement request; tokens and hashes travel as their bytes."""

    request_id: str
    model: str
    tokens: memoryview
    prompt_tokens: int
    token_source: TokenSource
    token_fallback: str | None
    streamed: bool
    max_output_tokens: int | None
    cache_salt: str | None
    tenant: str
    cache_tenant: str
    route: str
    session: str | None
    priority: int
    arrived_s: float | None
    ttft_objective_s: float | None
    tbt_objective_s: float | None
    hashes: memoryview | None
    hashes_block_size: int | None
    excluded: frozenset[str]
    retry_of: str | None
    hedge_of: str | None

    @classmethod
    def of(cls, request: PlacementRequest) -> AskedPlacement:
        """Raises ValueError for a request whose prefill rank is fixed: only the scheduler fixes it."""
        if request.prefill_on is not None:
            raise ValueError("prefill_on cannot be asked for by a router worker")
        hashes = request.hashes
        return cls(
            request.request_id,
            request.model,
            np.ascontiguousarray(request.tokens).data,
            request.prompt_tokens,
            request.token_source,
            request.token_fallback,
            request.streamed,
            request.max_output_tokens,
            request.cache_salt,
            request.tenant,
            request.cache_tenant,
            request.route,
            request.session,
            request.priority,
            request.arrived_s,
            request.ttft_objective_s,
            request.tbt_objective_s,
            None if hashes is None else np.ascontiguousarray(hashes).data,
            request.hashes_block_size,
            request.excluded,
            request.retry_of,
            request.hedge_of,
        )

    def request(self) -> PlacementRequest:
        """Raises MessageError when the bytes are no whole number of tokens or hashes."""
        try:
            tokens = np.frombuffer(
                self.tokens, np.uint32
            ).copy()  # aligned, and writable as kernels want them
            hashes = None if self.hashes is None else np.frombuffer(self.hashes, np.uint64).copy()
        except ValueError as error:
            raise MessageError(f"tokens or hashes of request {self.request_id}: {error}") from None
        return PlacementRequest(
            request_id=self.request_id,
            model=self.model,
            tokens=tokens,
            prompt_tokens=self.prompt_tokens,
            token_source=self.token_source,
            token_fallback=self.token_fallback,
            streamed=self.streamed,
            max_output_tokens=self.max_output_tokens,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            cache_tenant=self.cache_tenant,
            route=self.route,
            session=self.session,
            priority=self.priority,
            arrived_s=self.arrived_s,
            ttft_objective_s=self.ttft_objective_s,
            tbt_objective_s=self.tbt_objective_s,
            hashes=hashes,
            hashes_block_size=self.hashes_block_size,
            excluded=self.excluded,
            retry_of=self.retry_of,
            hedge_of=self.hedge_of,
        )


class MadePlacement(_Message):
    """A placement as far as a router needs it: the segments of its plan stay with the scheduler."""

    placement_id: str
    request_id: str
    model: str
    prefill: Target
    decode: Target | None  # None: the prefill instance
    overlap_tokens: int
    plan_tokens: int
    fetch_s: float
    prefill_s: float
    predicted_ttft_s: float
    predicted_tbt_s: float
    predicted_output_tokens: int

    @classmethod
    def of(cls, placement: Placement) -> MadePlacement:
        plan = placement.plan
        return cls(
            placement.placement_id,
            placement.request_id,
            placement.model,
            placement.prefill,
            None if placement.decode == placement.prefill else placement.decode,
            placement.overlap_tokens,
            plan.tokens,
            plan.fetch_s,
            plan.prefill_s,
            placement.predicted_ttft_s,
            placement.predicted_tbt_s,
            placement.predicted_output_tokens,
        )

    def placement(self) -> Placement:
        return Placement(
            self.placement_id,
            self.request_id,
            self.model,
            self.prefill,
            self.prefill if self.decode is None else self.decode,
            self.overlap_tokens,
            PrefixPlan(self.plan_tokens, (), self.fetch_s, self.prefill_s),
            self.predicted_ttft_s,
            self.predicted_tbt_s,
            self.predicted_output_tokens,
        )


class ModelUnknown(_Message, tag="model"):
    message: str
    served: list[ModelCard]


class NoneCanTakeIt(_Message, tag="instance"):
    message: str


class NotAdmitted(_Message, tag="admission"):
    message: str
    stage: str
    retry_after_s: float


class AnsweredWith(_Message, tag="answer"):
    """An answer that is already in words: a limit of the key, or a fault of the conductor."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None
    retry_after_s: int | None


class TooLong(_Message, tag="long"):
    """Into no instance's KV memory does the prompt fit."""

    message: str


Refusal = ModelUnknown | NoneCanTakeIt | NotAdmitted | TooLong | AnsweredWith


def refusal_of(error: PlacementError, served: Callable[[], list[ModelCard]]) -> Refusal:
    """What is ``served`` goes along where the model is unknown."""
    if isinstance(error, AnsweredError):
        answer = error.answer
        return AnsweredWith(
            answer.status, answer.message, answer.kind, answer.param, answer.code, answer.retry_after_s
        )
    if isinstance(error, UnknownModelError):
        return ModelUnknown(str(error), served())
    if isinstance(error, RejectedError):
        return NotAdmitted(str(error), error.stage, error.retry_after_s)
    if isinstance(error, TooLongError):
        return TooLong(str(error))
    return NoneCanTakeIt(str(error))


def error_of(refusal: Refusal) -> PlacementError:
    match refusal:
        case ModelUnknown():
            return UnknownModelError(refusal.message)
        case NotAdmitted():
            return RejectedError(refusal.message, refusal.stage, refusal.retry_after_s)
        case AnsweredWith(status, message, kind, param, code, retry_after_s):
            return AnsweredError(
                RequestError(status, message, kind=kind, param=param, code=code, retry_after_s=retry_after_s)
            )
        case TooLong():
            return TooLongError(refusal.message)
        case NoneCanTakeIt():
            return NoInstanceError(refusal.message)


class MetricFamily(_Message):
    """One family of Prometheus samples, each of them a name, labels and a value."""

    name: str
    kind: str
    documentation: str
    samples: list[tuple[str, dict[str, str], float]]


class Setup(_Message):
    """Everything that a worker has to know. ``tokenizers`` are folders by the models' names.

    ``rest_socket`` is where the REST API is: the path of a Unix socket, or a URL for a router elsewhere.

    ``front_door`` is JSON of what the command line configures a front door by.
    """

    settings: RouterSettings
    tokenizers: dict[str, str]
    token_cache_bytes: int
    keys: list[ApiKey] | None
    rest_socket: str
    front_door: str


# From a worker


class Hello(_Message, tag=1):
    """The first message on a connection.

    A router elsewhere shows the ``token``, and tells the time of its clock.
    """

    worker: int
    pid: int
    token: str = ""
    clock_s: float = 0.0


class Ready(_Message, tag=2):
    """Requests are accepted from now on."""


class Place(_Message, tag=3):
    """``anywhere``: nothing is to be reserved. ``grant`` is the request's of an `Enter`, 0 without one."""

    ticket: int
    request: AskedPlacement
    anywhere: bool
    grant: int


class Leave(_Message, tag=4):
    """The client of a request that waits for its placement is gone."""

    ticket: int


class PrefillFinished(_Message, tag=5):
    placement_id: str


class FirstToken(_Message, tag=6):
    placement_id: str


class Finished(_Message, tag=7):
    placement_id: str
    usage: Usage


class Cancelled(_Message, tag=8):
    placement_id: str


class Failed(_Message, tag=9):
    placement_id: str
    failure: InstanceFailure


class Enter(_Message, tag=10):
    """A request of a key with limits begins; whether it may is answered when it asks for its placement."""

    grant: int
    key: str


class GrantEnded(_Message, tag=11):
    grant: int
    failed: bool
    prompt_tokens: int | None
    output_tokens: int | None


class Samples(_Message, tag=12):
    """The answer to `Collect`."""

    families: list[MetricFamily]


class Ping(_Message, tag=13):
    """To be answered at once."""


# From the conductor


class Welcome(_Message, tag=1):
    setup: Setup


class Placed(_Message, tag=2):
    """``limits`` are the header lines about the limits of the request's key, as they are now."""

    ticket: int
    placement: MadePlacement
    limits: str


class Refused(_Message, tag=3):
    ticket: int
    refusal: Refusal
    limits: str


class Revoked(_Message, tag=4):
    """Admission ended a placement between its prefill and its decode."""

    placement_id: str
    refusal: Refusal


class InstanceLost(_Message, tag=5):
    instance_id: str
    reason: str


class Collect(_Message, tag=6):
    """Asks for the worker's metrics."""


class Pong(_Message, tag=7):
    """The conductor is there."""


class KnownInstance(_Message):
    """An instance that can take requests; ``targets`` are its ranks."""

    role: Role
    models: list[str]
    targets: list[Target]


class Instances(_Message, tag=8):
    """All that can take requests now, for a router that may have to choose without a conductor."""

    instances: list[KnownInstance]
    aliases: dict[str, str]


class Keys(_Message, tag=9):
    """Those of clients, when they were read again."""

    keys: list[ApiKey]


FromWorker = (
    Hello
    | Ready
    | Place
    | Leave
    | PrefillFinished
    | FirstToken
    | Finished
    | Cancelled
    | Failed
    | Enter
    | GrantEnded
    | Samples
    | Ping
)
FromConductor = Welcome | Placed | Refused | Revoked | InstanceLost | Collect | Pong | Instances | Keys

_encoder: Final = msgspec.msgpack.Encoder()
_from_worker: Final[msgspec.msgpack.Decoder[FromWorker]] = msgspec.msgpack.Decoder(FromWorker)
_from_conductor: Final[msgspec.msgpack.Decoder[FromConductor]] = msgspec.msgpack.Decoder(FromConductor)


def encode(message: FromWorker | FromConductor) -> bytes:
    return _encoder.encode(message)


def from_worker(payload: bytes) -> FromWorker:
    """Raises MessageError."""
    message: FromWorker = _decoded(_from_worker, payload)
    return message


def from_conductor(payload: bytes) -> FromConductor:
    """Raises MessageError."""
    message: FromConductor = _decoded(_from_conductor, payload)
    return message


def _decoded(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MessageError(f"no message of this protocol: {error}") from None
