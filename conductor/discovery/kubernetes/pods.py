"""Pods, as the API server tells of them, as instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from conductor.configuration_faults import explain
from conductor.discovery.kubernetes.conventions import OWN, AnnotationError, Marks, read_marks
from conductor.discovery.roll import Listed
from conductor.discovery_config import ALL_NAMESPACES, PodsConfig
from conductor.instance_config import InstanceConfig

_HTTP_PORTS: Final = ("http", "https")
Pod = Mapping[str, Any]  # the JSON of a pod


def pod_id(pod: Pod, config: PodsConfig) -> str:
    """The id of its instance, or the beginning of the ids of several."""
    metadata = pod["metadata"]
    name = str(metadata["name"])
    return f"{name}.{metadata['namespace']}" if config.namespace == ALL_NAMESPACES else name


def instances_of(pod: Pod, config: PodsConfig) -> tuple[Listed, ...]:
    """Those in a pod that runs, or is about to; none when it is being deleted, which drains them.

    Raises AnnotationError for a pod that should have some and cannot.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP")
    if metadata.get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed") or not address:
        return ()
    marks = read_marks(metadata.get("labels") or {}, metadata.get("annotations") or {})
    if marks.left_out is not None:
        return ()
    name = pod_id(pod, config)
    ports = _ports(pod, marks, config)
    return tuple(
        Listed(
            _config_of(name if len(ports) == 1 else f"{name}-{port}", address, port, marks, config),
            life=str(metadata.get("uid", "")),
            withheld=_why_not_ready(status),
        )
        for port in ports
    )


def _config_of(instance_id: str, address: str, port: int, marks: Marks, config: PodsConfig) -> InstanceConfig:
    template = config.instance.model_dump(include=config.instance.model_fields_set)
    given = marks.conventional | template | marks.own
    host = f"[{address}]" if ":" in address else address
    scheme = marks.scheme or config.scheme
    try:
        made = InstanceConfig.model_validate({**given, "id": instance_id, "url": f"{scheme}://{host}:{port}"})
    except ValidationError as error:
        raise AnnotationError("; ".join(explain(error, InstanceConfig))) from None
    if made.kv_events is None:
        return made
    streams = [each.model_copy(update=_reachable(each.model_dump(), host)) for each in made.kv_events]
    return made.model_copy(update={"kv_events": streams})


def _reachable(stream: dict[str, str | None], host: str) -> dict[str, str]:
    """A publisher that binds to every address is reached at the pod's."""
    return {
        key: endpoint.replace("://*:", f"://{host}:")
        for key in ("endpoint", "replay_endpoint")
        if (endpoint := stream[key]) is not None
    }


def _ports(pod: Pod, marks: Marks, config: PodsConfig) -> list[int]:
    declared = {
        port.get("name") or str(port["containerPort"]): int(port["containerPort"])
        for container in pod.get("spec", {}).get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("protocol", "TCP") == "TCP"
    }
    if marks.port is not None:
        wanted = marks.port if isinstance(marks.port, list) else [marks.port]
    else:
        wanted = config.ports or [name for name in _HTTP_PORTS if name in declared][:1] or list(declared)[:1]
    if not wanted:
        raise AnnotationError(
            f"the pod declares no port; annotate it with {OWN}port, or set discovery.kubernetes.pods[].port"
        )
    return [_number(port, declared) for port in wanted]


def _number(port: Any, declared: Mapping[str, int]) -> int:
    if isinstance(port, str) and port in declared:
        return declared[port]
    if isinstance(port, int) and not isinstance(port, bool) and 0 < port <= 65_535:
        return port
    names = ", ".join(declared) or "none"
    raise AnnotationError(
        f"{OWN}port: {port!r} is neither a port number nor a port of the pod; it has {names}"
    )


def _why_not_ready(status: Mapping[str, Any]) -> str | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "Ready":
            if condition.get("status") == "True":
                return None
            told = condition.get("message") or condition.get("reason")
            return f"the pod is not ready: {told}" if told else "the pod is not ready"
    return "the pod is not ready yet"
