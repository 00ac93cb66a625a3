"""Limits and deadlines of the front door."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Every value has a working default; the configuration model of the command line fills this in."""

    max_body_bytes: int = 64 * 1024 * 1024  # a larger request is answered with 413
    max_attempts: int = 3  # placements tried per request, the first one included
    retry_backoff_s: float = 0.02  # before the first retry; doubled each time, jittered by half
    retry_ratio: float = 0.2  # further attempts that requests of a model may cost, as a part of their number
    retry_burst: float = 10.0  # and as many at once
    hedge_quantile: float | None = None  # of times to the first byte, beyond which a second instance is asked
    hedge_least_s: float = 0.05  # and not before
    connect_timeout_s: float = 2.0
    bootstrap_timeout_s: float = 2.0  # of the server beside a prefill instance, which computes nothing
    prefill_timeout_s: float = 300.0  # whole prefill leg of a disaggregated request
    transfer_timeout_s: float = 30.0  # of legs sent together: from prefill's answer to a stream's first byte
    first_byte_timeout_s: float = 300.0  # decode leg, up to the first body byte
    stall_timeout_s: float = 300.0  # silence in the middle of a response, the engine's or the client's
    max_idle_connections: int = 256  # kept open per instance
    idle_timeout_s: float = 4.0  # below the 5 s after which vLLM closes an idle connection
    client_buffer_bytes: int = 256 * 1024  # unread by a slow client before its engine is paused
    max_collected_bytes: int = 16 * 1024 * 1024  # answer of a prefill leg, or body of an engine's error
    linger_s: float = 2.0  # how long an over-long upload is drained so that its 413 can be read
    keep_alive_timeout_s: int = 75
    shutdown_timeout_s: int = 30  # streams may finish for that long
    pass_tokens: frozenset[str] = frozenset()  # models whose engines get completion prompts as token ids
    log_requests: bool = True  # one line per request at level info; turn off where that is not shown
