"""Frames come out as they went in, however the stream is cut; what cannot be a frame is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.workers.frames import HEAD_BYTES, MAX_FRAME_BYTES, FrameError, FrameReader, frame

payloads = st.lists(st.binary(min_size=1, max_size=200), max_size=12)


@given(payloads, st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_any_cut_of_the_stream_gives_the_same_payloads(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, sent))
    reader, received, at = FrameReader(), [], 0
    for step in [*cuts, len(stream)]:
        received += reader.feed(stream[at : at + step])
        at += step
    assert received == sent


@given(payloads, st.integers(1, 40))
def test_a_stream_that_ends_early_gives_only_whole_payloads(sent: list[bytes], missing: int) -> None:
    stream = b"".join(map(frame, sent))
    received = FrameReader().feed(stream[: max(len(stream) - missing, 0)])
    assert received == sent[: len(received)]
    assert len(received) < len(sent) or not sent


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_lengths_that_no_frame_has(length: int) -> None:
    head = length.to_bytes(HEAD_BYTES, "little")
    with pytest.raises(FrameError, match=str(length)):
        FrameReader().feed(frame(b"x") + head)
    reader = FrameReader()
    assert reader.feed(head[:2]) == []
    with pytest.raises(FrameError):
        reader.feed(head[2:])


def test_an_empty_frame_is_not_sent() -> None:
    with pytest.raises(FrameError):
        frame(b"")
