"""Suspension of instances that answer their health check but fail requests: a circuit breaker for each.

*Closed* (``up``): requests go there, and what becomes of them is counted. *Open* (``suspended``): none do, for a
pause that doubles from one suspension to the next. *Half open* (``probing``): one request may try; its success
closes the circuit, its failure opens it again.
"""

from __future__ import annotations

from math import inf

from conductor.circuit import Circuit, SuspensionPolicy
from conductor.cluster import MAY_TRY, Cluster, Health, InstanceState
from conductor.explanation import PlacementRecord


class CircuitBreaker:
    """Changes the health of instances by what becomes of their requests. Not for those that are down or leave."""

    def __init__(self, cluster: Cluster, policy: SuspensionPolicy) -> None:
        self.policy = policy
        self._cluster = cluster
        self.probes: dict[str, list[InstanceState]] = {}  # by placement

    def placed(self, record: PlacementRecord) -> None:
        """A placement was made from a roster with instances that may be tried: this is the request that does."""
        placement = record.placement
        instance = self._cluster.get(placement.prefill.instance_id)
        if instance is not None and instance.health is Health.PROBING:
            self._try(instance, placement.placement_id)
        if record.decode is not record.prefill:
            instance = self._cluster.get(placement.decode.instance_id)
            if instance is not None and instance.health is Health.PROBING:
                self._try(instance, placement.placement_id)

    def succeeded(self, instance_id: str, placement_id: str, now_s: float) -> None:
        """The instance has answered its part of a request."""
        instance = self._cluster.get(instance_id)
        if instance is not None:
            self.answered(instance, placement_id, now_s)

    def answered(self, instance: InstanceState, placement_id: str, now_s: float) -> None:
        """As `succeeded`."""
        circuit = instance.circuit
        circuit.count(now_s, self.policy.window_s, failed=False)
        if instance.health is Health.UP:
            return
        instance.is_candidate(now_s)
        if circuit.probe == placement_id or instance.health is Health.PROBING:
            circuit.probe = None
            circuit.forget()
            circuit.reopened_before_s = now_s + self.policy.longest_pause_s
            if instance.health in (Health.SUSPENDED, Health.PROBING):
                self._cluster.set_health(instance, Health.UP, "works again after a suspension")

    def failed(self, instance_id: str, placement_id: str, now_s: float, detail: str) -> None:
        """It answered an error, or not in time."""
        instance = self._cluster.get(instance_id)
        if instance is None:
            return
        circuit = instance.circuit
        circuit.count(now_s, self.policy.window_s, failed=True)
        candidate = instance.is_candidate(now_s)
        if circuit.probe == placement_id or instance.health is Health.PROBING:
            circuit.probe = None
            self._suspend(instance, f"failed again, last: {detail}", now_s)
        elif candidate and (reason := self._too_many(circuit)) is not None:
            self._suspend(instance, f"{reason}, last: {detail}", now_s)

    def ended(self, placement_id: str) -> None:
        """A placement is over: where it is one of ``probes`` and told nothing, another one may try."""
        for instance in self.probes.pop(placement_id, ()):
            if instance.circuit.probe == placement_id:
                instance.circuit.probe = None
                if instance.health is Health.SUSPENDED:
                    self._cluster.set_health(instance, Health.PROBING, MAY_TRY)

    def _try(self, instance: InstanceState, placement_id: str) -> None:
        instance.circuit.probe = placement_id
        self.probes.setdefault(placement_id, []).append(instance)
        instance.circuit.suspended_until_s = inf
        self._cluster.set_health(instance, Health.SUSPENDED, "one request tries whether it works again")

    def _too_many(self, circuit: Circuit) -> str | None:
        policy = self.policy
        if circuit.failed_in_a_row >= policy.after_failures:
            return f"{circuit.failed_in_a_row} requests failed in a row"
        requests, failures = circuit.lately()
        if requests >= policy.min_requests and failures >= policy.failure_rate * requests:
            return f"{failures} of {requests} requests failed within {policy.window_s:g} s"
        return None

    def _suspend(self, instance: InstanceState, reason: str, now_s: float) -> None:
        if instance.draining or instance.withheld is not None:
            return  # it gets no requests anyway, and after a suspension it would
        circuit, policy = instance.circuit, self.policy
        longer = circuit.pause_s * 2 if now_s < circuit.reopened_before_s else policy.pause_s
        circuit.pause_s = min(longer, max(policy.longest_pause_s, policy.pause_s))
        circuit.reopened_before_s = now_s + circuit.pause_s + policy.longest_pause_s
        circuit.suspensions += 1
        circuit.forget()
        circuit.suspended_until_s = now_s + circuit.pause_s
        self._cluster.set_health(instance, Health.SUSPENDED, f"for {circuit.pause_s:g} s: {reason}")
