"""What is said at one end is understood at the other, and nothing else is."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cache_index import Holder, Tier
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementError,
    PlacementRequest,
    PlanSegment,
    PrefixPlan,
    RejectedError,
    Target,
    TokenSource,
    TooLongError,
    UnknownModelError,
    Usage,
)
from router.errors import RequestError
from router.refusals import AnsweredError
from router.workers.messages import (
    AskedPlacement,
    Failed,
    Finished,
    MadePlacement,
    MessageError,
    Place,
    Placed,
    Refused,
    encode,
    error_of,
    from_conductor,
    from_worker,
    refusal_of,
)

text = st.text(max_size=20)
maybe_text = st.none() | text
seconds = st.none() | st.floats(0, 1e9)
counts = st.none() | st.integers(0, 1 << 40)


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    tokens = np.array(draw(st.lists(st.integers(0, (1 << 32) - 1), max_size=40)), np.uint32)
    hashes = draw(st.none() | st.lists(st.integers(0, (1 << 64) - 1), max_size=5))
    return PlacementRequest(
        request_id=draw(text),
        model=draw(text),
        tokens=tokens[:: draw(st.sampled_from([1, 2, -1]))],
        prompt_tokens=draw(st.integers(0, 1 << 30)),
        token_source=draw(st.sampled_from(TokenSource)),
        token_fallback=draw(maybe_text),
        streamed=draw(st.booleans()),
        max_output_tokens=draw(counts),
        cache_salt=draw(maybe_text),
        tenant=draw(text),
        cache_tenant=draw(text),
        route=draw(text),
        session=draw(maybe_text),
        priority=draw(st.integers(-8, 8)),
        arrived_s=draw(seconds),
        ttft_objective_s=draw(seconds),
        tbt_objective_s=draw(seconds),
        hashes=None if hashes is None else np.array(hashes, np.uint64),
        hashes_block_size=draw(counts),
        excluded=draw(st.frozensets(text, max_size=3)),
        retry_of=draw(maybe_text),
        hedge_of=draw(maybe_text),
    )


targets = st.builds(
    Target,
    instance_id=text,
    url=text,
    host=text,
    port=st.integers(0, 65_535),
    rank=st.integers(0, 64),
    ranks=st.integers(1, 64),
    protocol=text,
    api_key=maybe_text,
)
segment = PlanSegment(0, 64, Holder("a", 1), Tier.HOST)
placements = st.builds(
    Placement,
    placement_id=text,
    request_id=text,
    model=text,
    prefill=targets,
    decode=targets,
    overlap_tokens=st.integers(0, 1 << 30),
    plan=st.builds(
        PrefixPlan,
        tokens=st.integers(0, 1 << 30),
        segments=st.sampled_from([(), (segment,)]),
        fetch_s=st.floats(0, 1e9),
        prefill_s=st.floats(0, 1e9),
    ),
    predicted_ttft_s=st.floats(0, 1e9),
    predicted_tbt_s=st.floats(0, 1e9),
)


@given(requests(), st.integers(0, 1 << 40), st.booleans())
def test_requests_arrive_as_they_were(request_: PlacementRequest, ticket: int, anywhere: bool) -> None:
    message = from_worker(encode(Place(ticket, AskedPlacement.of(request_), anywhere, 7)))
    assert isinstance(message, Place)
    assert (message.ticket, message.anywhere, message.grant) == (ticket, anywhere, 7)
    arrived = message.request.request()
    for name in PlacementRequest.__struct_fields__:
        before, after = getattr(request_, name), getattr(arrived, name)
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype
            assert before.tolist() == after.tolist()
            assert after.flags.writeable and after.flags.aligned
        else:
            assert before == after, name


@given(placements)
def test_placements_arrive_without_the_segments_of_their_plans(placement: Placement) -> None:
    message = from_conductor(encode(Placed(3, MadePlacement.of(placement), "")))
    assert isinstance(message, Placed)
    expected = replace(placement, plan=replace(placement.plan, segments=()))
    assert message.placement.placement() == expected


@pytest.mark.parametrize(
    "error",
    [
        NoInstanceError("none is up"),
        TooLongError("too long"),
        RejectedError("full", "decode", 1.5),
        UnknownModelError("which?"),
        AnsweredError(
            RequestError(
                429, "slow down", kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=3
            )
        ),
    ],
)
def test_refusals_arrive_as_the_errors_they_were(error: PlacementError) -> None:
    served = [ModelCard("m", 4096, 2, None, ("a", "b"))]
    message = from_conductor(encode(Refused(9, refusal_of(error, lambda: served), "x")))
    assert isinstance(message, Refused)
    arrived = error_of(message.refusal)
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    for name in ("stage", "retry_after_s"):
        assert getattr(arrived, name, None) == getattr(error, name, None)
    if isinstance(error, AnsweredError) and isinstance(arrived, AnsweredError):
        assert vars(arrived.answer) == vars(error.answer)
    if isinstance(error, UnknownModelError):
        assert message.refusal.served == served


def test_reports_arrive_with_their_reasons() -> None:
    failure = InstanceFailure("e0", FailureKind.TIMEOUT, "silent")
    for sent in (Failed("p-1", failure), Finished("p-2", Usage(1, None, 3))):
        assert from_worker(encode(sent)) == sent


@given(st.binary(max_size=60))
def test_noise_is_no_message(payload: bytes) -> None:
    for read in (from_worker, from_conductor):
        try:
            message = read(payload)
        except MessageError:
            continue
        assert read(encode(message)) == message


@given(requests(), st.data())
def test_a_damaged_message_is_refused_or_is_another_message(
    request_: PlacementRequest, data: st.DataObject
) -> None:
    payload = bytearray(encode(Place(1, AskedPlacement.of(request_), False, 0)))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    try:
        message = from_worker(bytes(payload))
        if isinstance(message, Place):
            message.request.request()
    except MessageError:
        pass


@pytest.mark.parametrize(
    "document",
    [[99], [3, 1], [1, "zero", 5], [8, "p", "more"], {}, [3, 1, [None] * 21, False, 0], "Hello", [1.5]],
)
def test_messages_of_the_wrong_shape(document: object) -> None:
    with pytest.raises(MessageError):
        from_worker(msgspec.msgpack.encode(document))


def test_half_a_token_is_no_token() -> None:
    asked = AskedPlacement.of(PlacementRequest("r", "m", np.arange(2, dtype=np.uint32), 2))
    asked.tokens = memoryview(b"12345")
    with pytest.raises(MessageError, match="request r"):
        asked.request()


def test_a_worker_cannot_fix_the_prefill_rank() -> None:
    asked = PlacementRequest("r", "m", np.empty(0, np.uint32), 1, prefill_on=Holder("a", 0))
    with pytest.raises(ValueError, match="prefill_on"):
        AskedPlacement.of(asked)
