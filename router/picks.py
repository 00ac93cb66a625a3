"""Placements that another data plane carries out: Envoy, HAProxy, or any proxy that asks where to send a request.

What is reserved must be given back, though such a proxy need not tell how a request ended. A pick ends as soon as
its end is seen or told; else when the predicted answer would be complete.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.placement import InstanceFailure, Placement, RejectedError, Usage
from router.addresses import Addresses

if TYPE_CHECKING:
    from router.line import Line
    from router.services import PlacementService

logger = structlog.get_logger("router")


class PickEnd(StrEnum):
    """How it was known that a picked request was over."""

    OBSERVED = "observed"  # its response was seen to its end
    STREAM = "stream"  # the gateway ended the stream about it together with the request
    PREDICTED = "predicted"  # nobody told: the predicted answer would be complete
    FAILED = "failed"  # it went to another instance, or to none
    CANCELLED = "cancelled"  # it ended before it was sent on


class Picks(Collector):
    """Those under way, and counters of all: by gateway, endpoint and the status that the gateway was told."""

    def __init__(self, placements: PlacementService, line: Line, clock: Callable[[], float]) -> None:
        self.made: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.ended = dict.fromkeys(PickEnd, 0)
        self.elsewhere = 0
        self.broken_messages = 0
        self.placements = placements
        self.line = line
        self.clock = clock
        self.addresses = Addresses(clock)
        self._open: set[Pick] = set()

    def begin(self, placement: Placement) -> Pick:
        """Of a placement that something is reserved for."""
        pick = Pick(self, placement)
        self._open.add(pick)
        return pick

    def closed(self, pick: Pick, end: PickEnd) -> None:
        self._open.discard(pick)
        self.ended[end] += 1

    def close(self) -> None:
        """Give back what is reserved."""
        for pick in list(self._open):
            pick.cancelled()

    def collect(self) -> Iterator[Metric]:
        made = CounterMetricFamily(
            "conductor_picks",
            "Requests that another data plane asked for an endpoint of, by the status it was told (200: picked).",
            labels=("gateway", "endpoint", "code"),
        )
        for (gateway, endpoint, code), count in self.made.items():
            made.add_metric((gateway, endpoint, str(code)), count)
        yield made
        ended = CounterMetricFamily(
            "conductor_picks_ended", "Picked requests that are over, by how that was known.", labels=("how",)
        )
        for end, count in self.ended.items():
            ended.add_metric((end.value,), count)
        yield ended
        yield GaugeMetricFamily("conductor_picks_open", "Picked requests under way.", len(self._open))
        yield CounterMetricFamily(
            "conductor_picks_elsewhere",
            "Picked requests that the gateway sent to another endpoint than the first it was told.",
            self.elsewhere,
        )
        yield CounterMetricFamily(
            "conductor_picks_broken_messages",
            "Messages of gateways that could not be understood.",
            self.broken_messages,
        )


def request_headers(placement: Placement, prefill_address: str | None) -> dict[str, str]:
    """What an engine, or the sidecar before it, is told beside the client's headers, and anybody may see."""
    headers: dict[str, str] = {}
    target = placement.decode
    if prefill_address is not None:
        headers["x-prefiller-host-port"] = prefill_address
    if target.ranks > 1:
        headers["x-data-parallel-rank"] = str(target.rank)
    return headers


class Pick:
    """One picked request until it is over; only the first call that ends it counts."""

    __slots__ = ("_begun_s", "_over", "_picks", "_timer", "placement")

    def __init__(self, picks: Picks, placement: Placement) -> None:
        self.placement = placement
        self._picks = picks
        self._begun_s = picks.clock()
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def predicted_s(self) -> float:
        """From the placement to the end of its answer."""
        placement = self.placement
        return placement.predicted_ttft_s + placement.predicted_tbt_s * placement.predicted_output_tokens

    @property
    def age_s(self) -> float:
        return self._picks.clock() - self._begun_s

    def ends_as_predicted(self) -> None:
        """Nobody will tell of its end."""
        if not self._over and self._timer is None:
            left_s = max(self.predicted_s - self.age_s, 0.0)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._predicted_end)

    def first_byte(self) -> None:
        if not self._over:
            self._tell(self._picks.placements.first_token)

    def finished(self, usage: Usage, how: PickEnd) -> None:
        if self._end(how):
            self._tell(self._picks.placements.finished, usage)

    def cancelled(self) -> None:
        if self._end(PickEnd.CANCELLED):
            self._tell(self._picks.placements.cancelled)

    def failed(self, failure: InstanceFailure) -> None:
        """The endpoint that was picked did not answer, or not with an answer."""
        if self._end(PickEnd.FAILED):
            self._tell(self._picks.placements.failed, failure)

    def _predicted_end(self) -> None:
        self.finished(Usage(), PickEnd.PREDICTED)

    def _end(self, how: PickEnd) -> bool:
        if self._over:
            return False
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._picks.closed(self, how)
        return True

    def _tell(self, report: Callable[..., None], *arguments: object) -> None:
        """A fault of the scheduler's must not cost other requests their picks."""
        try:
            report(self.placement.placement_id, self._picks.clock(), *arguments)
        except RejectedError:
            pass  # the request is on its way already
        except Exception:
            logger.exception("the scheduler failed", call=report.__name__)
        self._picks.line.pump()
