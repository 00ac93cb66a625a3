"""What somebody should look at now: what is broken, what is doubtful, and what limits the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cache_index import StreamStats
from conductor.cluster import Health
from conductor.diagnosis import ENOUGH, diagnose
from conductor.overview import snapshot
from conductor.scheduler import Scheduler

ATTAINED: Final = 0.9  # of the requests should meet an objective
REFUSED: Final = 0.01  # of the requests asked for, more should not be turned away
FAILED: Final = 0.05  # of the placements that end, more should not fail
_NAMED: Final = 8


class Severity(StrEnum):
    CRITICAL = "critical"  # requests fail, or cannot be served
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """``says`` is one sentence, ``remedy`` what to do or where to look; ``instances`` are those it is about."""

    severity: Severity
    kind: str
    says: str
    remedy: str
    instances: tuple[str, ...] = ()


def problems(
    scheduler: Scheduler, streams: Iterable[StreamStats], now_s: float, window_s: float
) -> list[Problem]:
    """All that hold now, critical ones first. Rates are those of the last ``window_s`` seconds."""
    found = [
        *_readiness(scheduler, now_s),
        *_health(scheduler),
        *_rates(scheduler, now_s, window_s),
        *_limits(scheduler, now_s, window_s),
        *_index(scheduler, streams),
    ]
    return sorted(found, key=lambda problem: problem.severity is not Severity.CRITICAL)


def _readiness(scheduler: Scheduler, now_s: float) -> Iterator[Problem]:
    reason = scheduler.why_not_ready(now_s)
    if reason is not None:
        yield Problem(
            Severity.CRITICAL, "not ready", reason, "start the engines, or look at why they are away"
        )


_HEALTH: Final = {
    Health.DOWN: ("down", "look at the engine's own log; it is probed again and again"),
    Health.SUSPENDED: (
        "suspended",
        "its health check answers, but requests fail: look at the engine's own log",
    ),
    Health.WITHHELD: ("withheld", "whoever lists it says so: GET /v1/discovery names the source"),
    Health.PROBING: ("probing", "the next request decides whether it takes others again"),
}


def _health(scheduler: Scheduler) -> Iterator[Problem]:
    """Instances that are in the same state for the same reason are one problem."""
    alike: dict[tuple[Health, str], list[str]] = {}
    for instance in scheduler.cluster:
        if instance.health in _HEALTH:
            alike.setdefault((instance.health, instance.health_reason), []).append(instance.instance_id)
    for (health, reason), names in alike.items():
        word, remedy = _HEALTH[health]
        says = f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {word}: {reason}"
        yield Problem(Severity.WARNING, word, says, remedy, tuple(names))


def _rates(scheduler: Scheduler, now_s: float, window_s: float) -> Iterator[Problem]:
    tally = scheduler.outcomes.between(now_s - window_s, now_s + 1.0)
    asked, ended = tally.placed + tally.refused, sum(tally.ended.values())
    if tally.refused >= ENOUGH and tally.refused > REFUSED * asked:
        yield Problem(
            Severity.CRITICAL,
            "refused",
            f"{tally.refused} of {asked} placements asked for in the last {window_s:.0f} s were refused",
            "add instances, or look at what limits the cluster and at the rules of admission",
        )
    failed = tally.ended["failed"]
    if ended >= ENOUGH and failed > FAILED * ended:
        yield Problem(
            Severity.CRITICAL,
            "failing",
            f"{failed} of {ended} placements that ended in the last {window_s:.0f} s failed",
            "look at the failed placements: each tells the instance and what it answered",
        )
    for name, met, seen in (
        ("TTFT", tally.ttft_met, tally.ttft_seen),
        ("TBT", tally.tbt_met, tally.tbt_seen),
    ):
        if seen >= ENOUGH and met < ATTAINED * seen:
            yield Problem(
                Severity.WARNING,
                f"{name} objective",
                f"{met / seen:.0%} of the requests of the last {window_s:.0f} s meet their {name} objective",
                "look at what limits the cluster",
            )


def _limits(scheduler: Scheduler, now_s: float, window_s: float) -> Iterator[Problem]:
    found = diagnose(snapshot(scheduler, now_s, window_s))
    first = next((finding for finding in found.findings if finding.limits), None)
    if first is not None:
        yield Problem(Severity.WARNING, f"limited by {first.cause}", found.summary, first.remedy)


def _index(scheduler: Scheduler, streams: Iterable[StreamStats]) -> Iterator[Problem]:
    cold = sorted({stream.holder.instance_id for stream in streams if stream.state == "cold"})
    if cold:
        yield Problem(
            Severity.WARNING,
            "events missed",
            f"what {_listed(cold)} {'has' if len(cold) == 1 else 'have'} cached is not wholly known: KV events "
            "were missed",
            "give the engines a replay_endpoint; what is missing comes back as blocks are stored again",
            tuple(cold),
        )
    dropped = scheduler.index.stats().dropped_residencies
    if dropped:
        yield Problem(
            Severity.WARNING,
            "index full",
            f"the index has forgotten {dropped:,} residencies since it was started, for want of room",
            "raise index.max_blocks",
        )


def _listed(names: list[str]) -> str:
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} others"
