"""Suspension of instances that answer their health check but fail requests: a circuit breaker for each.

*Closed* (``up``): requests go there, and what becomes of them is counted. *Open* (``suspended``): none do, for a
pause that doubles from one suspension to the next. *Half open* (``probing``): one request may try; its success
closes the circuit, its failure opens it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from conductor.cluster import Cluster, InstanceState
    from conductor.explanation import PlacementRecord

_BUCKETS: Final = 10


@dataclass(frozen=True, slots=True)
class SuspensionPolicy:
    """When an instance that answers its health check but fails requests stops being a candidate, and for how long.

    After ``after_failures`` in a row, or when at least ``failure_rate`` of the requests of the last ``window_s``
    failed and there were at least ``min_requests``. The first pause is ``pause_s``, each one that follows within
    ``longest_pause_s`` of the last is twice as long, up to ``longest_pause_s``.
    """

    after_failures: int = 3
    pause_s: float = 10.0
    longest_pause_s: float = 160.0
    failure_rate: float = 0.5
    min_requests: int = 20
    window_s: float = 30.0


@dataclass(slots=True)
class Circuit:
    """What became of one instance's requests lately, and how often it was suspended."""

    failed_in_a_row: int = 0
    suspended_until_s: float = 0.0
    pause_s: float = 0.0  # the last one
    reopened_before_s: float = -inf  # a suspension that begins before then lasts longer than the last
    probe: str | None = None  # the placement that tries it
    suspensions: int = 0
    _counts: deque[list[int]] = field(default_factory=deque)  # bucket, requests, failures of them

    def count(self, now_s: float, window_s: float, *, failed: bool) -> None:
        number = int(now_s * _BUCKETS / window_s)
        counts = self._counts
        if not counts or counts[-1][0] < number:
            counts.append([number, 0, 0])
            while counts[0][0] <= number - _BUCKETS:
                counts.popleft()
        counts[-1][1] += 1
        if failed:
            counts[-1][2] += 1
            self.failed_in_a_row += 1
        else:
            self.failed_in_a_row = 0

    def lately(self) -> tuple[int, int]:
        """Requests and failures of them, in the window that the last one was counted in."""
        return sum(each[1] for each in self._counts), sum(each[2] for each in self._counts)

    def forget(self) -> None:
        """Count anew."""
        self.failed_in_a_row = 0
        self._counts.clear()


class CircuitBreaker:
    """Changes the health of instances by what becomes of their requests. Not for those that are down or leave."""

    def __init__(self, cluster: Cluster, policy: SuspensionPolicy) -> None:
        self.policy = policy
        self._cluster = cluster
        self._probes: dict[str, list[InstanceState]] = {}

    def placed(self, record: PlacementRecord) -> None:
        """A placement was made: where an instance may be tried, this is the request that does."""
        placement = record.placement
        self._try(placement.prefill.instance_id, placement.placement_id)
        if placement.disaggregated:
            self._try(placement.decode.instance_id, placement.placement_id)

    def succeeded(self, instance_id: str, placement_id: str, now_s: float) -> None:
        """The instance has answered its part of a request."""
        instance = self._cluster.get(instance_id)
        if instance is None:
            return
        circuit = instance.circuit
        circuit.count(now_s, self.policy.window_s, failed=False)
        if instance.up:
            return
        instance.is_candidate(now_s)
        if circuit.probe == placement_id or instance.probing:
            circuit.probe = None
            circuit.forget()
            circuit.reopened_before_s = now_s + self.policy.longest_pause_s
            self._cluster.resume(instance, "works again after a suspension")

    def failed(self, instance_id: str, placement_id: str, now_s: float, detail: str) -> None:
        """It answered an error, or not in time."""
        instance = self._cluster.get(instance_id)
        if instance is None:
            return
        circuit = instance.circuit
        circuit.count(now_s, self.policy.window_s, failed=True)
        candidate = instance.is_candidate(now_s)
        if circuit.probe == placement_id or instance.probing:
            circuit.probe = None
            self._suspend(instance, f"failed again, last: {detail}", now_s)
        elif candidate and (reason := self._too_many(circuit)) is not None:
            self._suspend(instance, f"{reason}, last: {detail}", now_s)

    def ended(self, placement_id: str) -> None:
        """A placement is over: where it should have tried an instance and told nothing of it, another one may."""
        for instance in self._probes.pop(placement_id, ()):
            if instance.circuit.probe == placement_id:
                instance.circuit.probe = None
                self._cluster.let_one_try(instance)

    def _try(self, instance_id: str, placement_id: str) -> None:
        instance = self._cluster.get(instance_id)
        if instance is not None and instance.probing:
            instance.circuit.probe = placement_id
            self._probes.setdefault(placement_id, []).append(instance)
            self._cluster.suspend(instance, "one request tries whether it works again", inf)

    def _too_many(self, circuit: Circuit) -> str | None:
        policy = self.policy
        if circuit.failed_in_a_row >= policy.after_failures:
            return f"{circuit.failed_in_a_row} requests failed in a row"
        requests, failures = circuit.lately()
        if requests >= policy.min_requests and failures >= policy.failure_rate * requests:
            return f"{failures} of {requests} requests failed within {policy.window_s:g} s"
        return None

    def _suspend(self, instance: InstanceState, reason: str, now_s: float) -> None:
        circuit, policy = instance.circuit, self.policy
        longer = circuit.pause_s * 2 if now_s < circuit.reopened_before_s else policy.pause_s
        circuit.pause_s = min(longer, max(policy.longest_pause_s, policy.pause_s))
        circuit.reopened_before_s = now_s + circuit.pause_s + policy.longest_pause_s
        circuit.suspensions += 1
        circuit.forget()
        self._cluster.suspend(instance, f"for {circuit.pause_s:g} s: {reason}", now_s + circuit.pause_s)
