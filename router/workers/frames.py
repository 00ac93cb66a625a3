"""Frames on a stream of bytes: four bytes of length, little-endian, then so many bytes of payload."""

from __future__ import annotations

from typing import Final

HEAD_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 1 << 28  # a prompt of 60 million tokens; more is a broken stream


class FrameError(Exception):
    """The stream cannot be what it should be; nothing after this point can be read."""


def frame(payload: bytes) -> bytes:
    """Raises FrameError when the payload is too long to be read at the other end."""
    if not 0 < len(payload) <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(payload)} bytes cannot be sent: 1 to {MAX_FRAME_BYTES} bytes can")
    return len(payload).to_bytes(HEAD_BYTES, "little") + payload


class FrameReader:
    """Cuts what arrives into payloads, wherever reads begin and end."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. Raises FrameError for a length that no frame has."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < HEAD_BYTES or len(rest) < HEAD_BYTES + _length(rest, 0):
                return []  # one long frame in many reads is copied once
            data = bytes(rest)
            rest.clear()
        payloads = []
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES:
            stop = at + HEAD_BYTES + _length(data, at)
            if stop > end:
                break
            payloads.append(data[at + HEAD_BYTES : stop])
            at = stop
        rest += data[at:]
        return payloads


def _length(data: bytes | bytearray, at: int) -> int:
    length = int.from_bytes(data[at : at + HEAD_BYTES], "little")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame says that it has {length} bytes; 1 to {MAX_FRAME_BYTES} are possible")
    return length
