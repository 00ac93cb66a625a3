"""Prometheus metrics of placements: their outcomes, what limits the cluster, reservations and recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.diagnosis import Cause, diagnose
from conductor.journal_writer import JournalWriter
from conductor.overview import snapshot
from conductor.rest.reservations import Reservations
from conductor.scheduler import Scheduler

_DIAGNOSED_S = 120.0


class PlacementCollector(Collector):
    """Read from live state when scraped."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        reservations: Reservations | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._reservations = reservations
        self._journal = journal

    def collect(self) -> Iterator[Metric]:
        yield from self._outcomes()
        yield from self._limits()
        yield from self._learned()
        if self._reservations is not None:
            yield GaugeMetricFamily(
                "conductor_rest_reservations",
                "Placements made over REST, not ended",
                len(self._reservations),
            )
            yield CounterMetricFamily(
                "conductor_rest_reservations_expired",
                "Placements made over REST of which nothing was heard",
                self._reservations.expired,
            )
        if self._journal is not None:
            yield from _recording(self._journal)

    def _outcomes(self) -> Iterator[Metric]:
        total = self._scheduler.outcomes.total()
        ended = CounterMetricFamily(
            "conductor_placements_ended", "Placements by how they ended", labels=["outcome"]
        )
        for outcome, count in total.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        for name, text, value in (
            ("placements_refused", "Requests that could not be placed", total.refused),
            (
                "prefills_skipped",
                "Placements whose decode instance computes the rest itself",
                total.prefills_skipped,
            ),
            ("ttft_observed", "Requests whose time to first token was seen", total.ttft_seen),
            ("ttft_objective_met", "Of these, within their objective", total.ttft_met),
            ("tbt_observed", "Requests whose mean gap between tokens was seen", total.tbt_seen),
            ("tbt_objective_met", "Of these, within their objective", total.tbt_met),
            ("judged_requests", "Finished requests with a time to judge by", total.judged),
            ("good_requests", "Of these, with all objectives met", total.good),
            ("placed_prompt_tokens", "Prompt tokens of the placements made", total.prompt_tokens),
            ("planned_reuse_tokens", "Of these, reused, loaded or fetched as planned", total.reused_tokens),
            (
                "reported_prompt_tokens",
                "Prompt tokens of requests whose cached tokens were told",
                total.reported_prompt_tokens,
            ),
            ("reported_cached_tokens", "Cached tokens as engines told them", total.cached_tokens),
            ("engine_preemptions", "Preemptions as engines told them", total.preemptions),
            ("hand_offs", "Hand-offs whose time was seen", total.hand_offs),
            ("hand_off_seconds", "Time of these", total.hand_off_s),
            ("held_seconds", "Time from arrival to placement", total.held_s),
        ):
            yield CounterMetricFamily(f"conductor_{name}", text, value)

    def _limits(self) -> Iterator[Metric]:
        found = diagnose(snapshot(self._scheduler, self._clock(), _DIAGNOSED_S))
        limited = GaugeMetricFamily(
            "conductor_limited_by", "1 for what limits the cluster (GET /v1/diagnosis)", labels=["cause"]
        )
        for cause in Cause:
            limited.add_metric([str(cause)], float(cause is found.limit))
        yield limited

    def _learned(self) -> Iterator[Metric]:
        labels = ["instance_class"]
        decode = GaugeMetricFamily(
            "conductor_decode_scale", "Learned correction of predicted decode steps", labels=labels
        )
        seen = CounterMetricFamily(
            "conductor_calibration_observations", "Times learned from", labels=[*labels, "of"]
        )
        for name, calibration in self._scheduler.calibrations.items():
            decode.add_metric([name], calibration.decode.factor)
            seen.add_metric([name, "prefill"], calibration.prefill.observations)
            seen.add_metric([name, "decode"], calibration.decode.observations)
        yield decode
        yield seen


def _recording(journal: JournalWriter) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "conductor_recording", "1 while decisions are recorded", float(journal.ended is None)
    )
    yield CounterMetricFamily("conductor_recorded_events", "Events written to the recording", journal.frames)
    yield CounterMetricFamily("conductor_recorded_bytes", "Size of the recording", journal.bytes)
    yield CounterMetricFamily(
        "conductor_record_dropped_events", "Events that the recording does not have", journal.dropped
    )
