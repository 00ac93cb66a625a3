"""What became of placements lately: counts and sums of the last minutes, and since the start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import inf
from typing import Final

from conductor.explanation import PlacementRecord
from conductor.placement import Objectives, PlacementRequest
from conductor.rank import ReportedLoad
from conductor.time_spread import magnitude

_BUCKET_S: Final = 5.0
_BUCKETS: Final = 60
_PER_MINUTE: Final = 12
_MINUTES: Final = 360


@dataclass(slots=True)
class Tally:
    """Counts and sums over a time; seconds are summed over requests.

    A time is counted in the moment when it became known. TBT is a request's mean gap between tokens: single
    gaps are not seen here.
    """

    placed: int = 0
    refused: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    disaggregated: int = 0
    prefills_skipped: int = 0  # decode instances that compute what they lack themselves
    under_way: int = 0  # placements under way, summed over placements made
    held_s: float = 0.0  # arrival to placement
    prefill_s: float = 0.0  # predicted, of the placements made
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of these, as planned
    reusing: int = 0  # placements that plan to reuse anything
    finished_prompt_tokens: int = 0
    reported_prompt_tokens: int = 0  # of these, of requests for which the engine told what was cached
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_seen: int = 0
    ttft_met: int = 0
    ttft_s: float = 0.0
    ttft_apart_seen: int = 0  # of these, prefilled and decoded on different instances
    ttft_apart_s: float = 0.0
    tbt_seen: int = 0
    tbt_met: int = 0
    tbt_s: float = 0.0
    ttft_spread: Counter[int] = field(default_factory=Counter)  # by `time_spread.magnitude`
    tbt_spread: Counter[int] = field(default_factory=Counter)
    judged: int = 0  # finished, with a time to judge by
    good: int = 0  # of these, all objectives met
    hand_offs: int = 0  # that were seen: end of the prefill to the first token
    hand_off_s: float = 0.0
    hand_off_predicted_s: float = 0.0
    handed_prefill_s: float = 0.0  # predicted prefill of those, which their decode instance did not do
    preemptions: int = 0  # as engines count them

    def add(self, other: Tally) -> None:
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_COUNTERS: Final = ("ended", "ttft_spread", "tbt_spread")
_SUMS: Final = tuple(each.name for each in fields(Tally) if each.name not in _COUNTERS)


class Outcomes:
    """Tallies of five seconds each: five minutes of them are kept, then six hours by the minute, then one sum."""

    WINDOW_S: Final = _BUCKET_S * _BUCKETS
    HISTORY_S: Final = 60.0 * _MINUTES

    def __init__(self) -> None:
        self._older = Tally()
        self._minutes: deque[tuple[int, Tally]] = (
            deque()
        )  # before the buckets, which may begin within a minute
        self._buckets: deque[tuple[int, Tally]] = deque()
        self._latest = Tally()  # of the last bucket, and when that ends
        self._until_s = -inf

    def placed(self, record: PlacementRecord, under_way: int) -> None:
        """A placement was made; ``under_way`` counts it."""
        now_s = record.placed_s
        tally = self._latest if now_s < self._until_s else self._now(now_s)
        plan, tokens = record.placement.plan, record.placement.plan.tokens
        tally.placed += 1
        tally.under_way += under_way
        if record.decode is not record.prefill:
            tally.disaggregated += record.placement.disaggregated
        elif record.skips_prefill:
            tally.prefills_skipped += 1
        tally.held_s += record.held_s
        tally.prefill_s += plan.prefill_s
        tally.prompt_tokens += record.request.prompt_tokens
        if tokens > 0:
            tally.reused_tokens += tokens
            tally.reusing += 1

    def refused(self, now_s: float) -> None:
        """A request could not be placed."""
        self._now(now_s).refused += 1

    def reported(self, before: ReportedLoad | None, load: ReportedLoad) -> None:
        """Gauges of a rank that counts preemptions came; only the difference to those before counts."""
        if before is None or before.preemptions is None or load.preemptions is None:
            return
        if load.preemptions > before.preemptions:
            self._now(load.at_s).preemptions += load.preemptions - before.preemptions

    def ended(self, record: PlacementRecord, objectives_of: Callable[[PlacementRequest], Objectives]) -> None:
        """A placement ended, in whatever way; its outcome and times are in the record."""
        ended_s, usage = record.ended_s, record.usage
        assert ended_s is not None
        tally = self._latest if ended_s < self._until_s else self._now(ended_s)
        tally.ended[record.outcome] += 1
        output_tokens = None
        if usage is not None:
            output_tokens = usage.output_tokens
            tally.output_tokens += output_tokens or 0
            prompt_tokens = usage.prompt_tokens or record.request.prompt_tokens
            tally.finished_prompt_tokens += prompt_tokens
            if usage.cached_tokens is not None:
                tally.reported_prompt_tokens += prompt_tokens
                tally.cached_tokens += usage.cached_tokens
        if record.first_token_s is None or not record.request.streamed:
            return
        objectives = objectives_of(record.request)
        ttft_s = record.first_token_s - record.placed_s
        met = ttft_s <= objectives.ttft_s
        tally.ttft_seen += 1
        tally.ttft_met += met
        tally.ttft_s += ttft_s
        tally.ttft_spread[magnitude(ttft_s)] += 1
        if record.placement.disaggregated:
            tally.ttft_apart_seen += 1
            tally.ttft_apart_s += ttft_s
            self._hand_off(record, tally)
        if output_tokens is not None and output_tokens > 1:
            tbt_s = (ended_s - record.first_token_s) / (output_tokens - 1)
            tally.tbt_seen += 1
            tally.tbt_met += tbt_s <= objectives.tbt_s
            tally.tbt_s += tbt_s
            tally.tbt_spread[magnitude(tbt_s)] += 1
            met = met and tbt_s <= objectives.tbt_s
        if record.outcome == "finished":
            tally.judged += 1
            tally.good += met

    @staticmethod
    def _hand_off(record: PlacementRecord, tally: Tally) -> None:
        if record.prefill_finished_s is not None and record.first_token_s is not None:
            step_s = record.step_at_first_token_s or 0.0
            tally.hand_offs += 1
            tally.hand_off_s += max(record.first_token_s - record.prefill_finished_s - step_s, 0.0)
            tally.hand_off_predicted_s += record.hand_off_s
            tally.handed_prefill_s += record.placement.plan.prefill_s

    def total(self) -> Tally:
        """Since the start."""
        summed = Tally()
        for tally in (
            self._older,
            *(each for _, each in self._minutes),
            *(each for _, each in self._buckets),
        ):
            summed.add(tally)
        return summed

    def between(self, start_s: float, stop_s: float) -> Tally:
        """Of the buckets that begin in this time, as far back as they are kept."""
        summed = Tally()
        for number, tally in self._buckets:
            if start_s <= number * _BUCKET_S < stop_s:
                summed.add(tally)
        return summed

    def steps(self, now_s: float, step_s: float, count: int) -> list[tuple[float, Tally]]:
        """The last ``count`` steps, oldest first: when each begins, and what became known in it.

        Steps begin at multiples of ``step_s``: 5, or a multiple of 60 to go back further than five minutes. The
        last one is under way.
        """
        last = int(now_s // step_s)
        summed = {number: Tally() for number in range(last - count + 1, last + 1)}
        kept = [(number * 60.0, tally) for number, tally in self._minutes]
        kept += [(number * _BUCKET_S, tally) for number, tally in self._buckets]
        for start_s, tally in kept:
            step = summed.get(int(start_s // step_s))
            if step is not None:
                step.add(tally)
        return [(number * step_s, tally) for number, tally in summed.items()]

    def _age(self, number: int, tally: Tally) -> None:
        """A bucket is no longer kept for itself."""
        minute = number // _PER_MINUTE
        if not self._minutes or self._minutes[-1][0] < minute:
            self._minutes.append((minute, Tally()))
            while self._minutes[0][0] <= minute - _MINUTES:
                self._older.add(self._minutes.popleft()[1])
        self._minutes[-1][1].add(tally)

    def _now(self, now_s: float) -> Tally:
        # Times are those of one clock, but a report may have been read a little before it arrives.
        if now_s >= self._until_s:
            number = int(now_s // _BUCKET_S)
            buckets = self._buckets
            self._latest, self._until_s = Tally(), (number + 1) * _BUCKET_S
            buckets.append((number, self._latest))
            while buckets[0][0] <= number - _BUCKETS:
                self._age(*buckets.popleft())
        return self._latest


class Untold(Outcomes):
    """Counts nothing, where nobody asks: a simulation knows better what became of its requests."""

    def placed(self, record: PlacementRecord, under_way: int) -> None:
        pass

    def refused(self, now_s: float) -> None:
        pass

    def reported(self, before: ReportedLoad | None, load: ReportedLoad) -> None:
        pass

    def ended(self, record: PlacementRecord, objectives_of: Callable[[PlacementRequest], Objectives]) -> None:
        pass
