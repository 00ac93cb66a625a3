"""SGLang's prefill and decode servers (``--disaggregation-mode``)."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from conductor.placement import Target
from router.disaggregation.bodies import body_with, prompts_of
from router.disaggregation.protocol import HandoffError, JointHandoff, PrefillAnswer
from router.heads import host_in_url
from router.inference import InferenceRequest
from router.usage import usage_from_tail

_ROOMS: Final = (1 << 63) - (1 << 20)  # leaves the rooms behind each, which servers give to more answers
_TAIL_BYTES: Final = 4_096
_DETAIL_BYTES: Final = 300


class _Failure(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")


_failure = msgspec.json.Decoder(_Failure)


class Sglang:
    """Both servers get the same request at once, with a *room* at the prefill server's bootstrap server.

    The decode server waits in the room until the prompt's KV has come, and answers the client; the prefill
    server's answer is one token (as recorded with SGLang 0.5.23). The fields are ``bootstrap_host``,
    ``bootstrap_port`` and ``bootstrap_room``, 63 random bits; lists of them where there are several prompts.
    A prefill server of several data-parallel ranks serves a room on the rank that is its number modulo theirs.
    """

    name = "sglang"

    def begin(self, prefill: Target) -> SglangHandoff:
        return SglangHandoff(prefill)


class SglangHandoff(JointHandoff):
    """Of one request."""

    def __init__(self, prefill: Target) -> None:
        ranks = prefill.ranks
        self._host = host_in_url(prefill.host)
        self._port = prefill.bootstrap_port
        self._room = random.randrange(_ROOMS) // ranks * ranks + prefill.rank
        self._ranks = ranks

    def body(self, request: InferenceRequest, model: str) -> bytes:
        host, port, room = self._host, self._port, self._room
        prompts = prompts_of(request)
        if prompts is None:
            fields: dict[str, object] = {
                "bootstrap_host": host,
                "bootstrap_port": port,
                "bootstrap_room": room,
            }
        else:
            fields = {
                "bootstrap_host": [host] * prompts,
                "bootstrap_port": [port] * prompts,
                "bootstrap_room": [room + self._ranks * index for index in range(prompts)],
            }
        encoded = {name: msgspec.json.encode(value) for name, value in fields.items()}
        return body_with(request, model, encoded)

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        """A stream that begins with an error has the status of a success."""
        first = body.removeprefix(b"data:").partition(b"\n\n")[0] if body.startswith(b"data:") else body
        try:
            failure = _failure.decode(first)
        except msgspec.DecodeError as error:
            raise HandoffError(f"the prefill leg's answer cannot be read: {error}") from None
        if (said := bytes(failure.error)) != b"null":
            said = said[:_DETAIL_BYTES]
            raise HandoffError(f"the prefill leg answered an error: {said.decode('utf-8', 'replace')}")
        return PrefillAnswer(None, usage_from_tail(body[-_TAIL_BYTES:]).cached_tokens)
