"""Synthetic workloads: sessions of several kinds, placed in time.

Every kind is a function from a random generator to sessions; `generate` draws sessions until it has enough
requests and spreads their beginnings, so that times of a session's own (answers, users, tools) stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.workloads.mooncake import assumed_answer_s
from simulator.workloads.prefix_names import PrefixNames
from simulator.workloads.records import MOONCAKE_BLOCK_TOKENS, TraceRecord
from simulator.workloads.session_kinds import (
    Session,
    agent_sessions,
    api_sessions,
    chat_sessions,
    coding_sessions,
    long_sessions,
    rag_sessions,
)
from simulator.workloads.starts import Seconds, burst_starts, poisson_starts

_Sessions = Callable[[np.random.Generator, PrefixNames, int], Iterator[Session]]
_Starts = Callable[[np.random.Generator, Seconds, float], list[float]]


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    description: str
    sessions: _Sessions
    starts: _Starts = poisson_starts


WORKLOAD_KINDS: Final[dict[str, WorkloadKind]] = {
    "chat": WorkloadKind("conversations of some turns, one short system prompt", chat_sessions),
    "coding": WorkloadKind(
        "a coding assistant: tools, 40K tokens of files, 3.5K more a turn", coding_sessions
    ),
    "agent": WorkloadKind("tool loops: a context that grows by tool results, seconds apart", agent_sessions),
    "rag": WorkloadKind("questions about shared documents of 4K to 32K tokens", rag_sessions),
    "api": WorkloadKind("single requests behind the system prompts of twenty applications", api_sessions),
    "burst": WorkloadKind("as api, with most requests in bursts of five seconds", api_sessions, burst_starts),
    "long": WorkloadKind(
        "one-shot documents of 128K to 1M tokens that nobody asks about again", long_sessions
    ),
}


def generate(kind: str, requests: int, requests_per_s: float, seed: int) -> list[TraceRecord]:
    """``requests`` records in order of arrival, in 512-token blocks, the same for the same arguments.

    All lie within ``requests / requests_per_s`` seconds, or within the longest session where that is longer: a
    session's own times are never shortened to reach a rate. Arrivals of later turns assume `assumed_answer_s`
    for the answers before them. Raises ValueError for an unknown kind, and for numbers that are not positive.
    """
    if kind not in WORKLOAD_KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(WORKLOAD_KINDS)}")
    if requests < 1 or not 0 < requests_per_s < np.inf:
        raise ValueError("requests and requests_per_s must be positive")
    chosen = WORKLOAD_KINDS[kind]
    source = np.random.Generator(np.random.PCG64(seed))
    names = PrefixNames(MOONCAKE_BLOCK_TOKENS)
    sessions = _sessions_of(chosen.sessions(source, names, requests), requests)
    durations_s = np.array([_duration_s(session) for session in sessions])
    window_s = max(requests / requests_per_s, float(durations_s.max()))
    starts_s = chosen.starts(source, durations_s, window_s)
    records = [
        record
        for number, (session, start_s) in enumerate(zip(sessions, starts_s, strict=True))
        for record in _placed(session, start_s, f"{kind}-{number}")
    ]
    return sorted(records, key=lambda record: record.arrival_s)


def _sessions_of(drawn: Iterator[Session], requests: int) -> list[Session]:
    sessions: list[Session] = []
    missing = requests
    while missing > 0:
        session = next(drawn)[:missing]
        sessions.append(session)
        missing -= len(session)
    return sessions


def _duration_s(session: Session) -> float:
    return sum(turn.delay_s for turn in session[1:]) + sum(
        assumed_answer_s(turn.output_tokens) for turn in session[:-1]
    )


def _placed(session: Session, start_s: float, session_id: str) -> Iterator[TraceRecord]:
    # Whole milliseconds, as files have them: writing and reading a trace changes nothing.
    arrival_s = start_s
    for number, turn in enumerate(session):
        arrival_s += turn.delay_s if number else 0.0
        yield TraceRecord(
            *(round(arrival_s, 3), turn.input_tokens, turn.output_tokens, turn.hash_ids, session_id),
            delay_s=round(turn.delay_s, 3) if number else None,
        )
        arrival_s += assumed_answer_s(turn.output_tokens)
