"""Where instances come from besides the list in the configuration: its part `discovery`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from conductor.instance_config import InstanceConfig

_Positive = Annotated[float, Field(gt=0)]
_Port = Annotated[int, Field(ge=1, le=65535)]
_PortName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$")]
ALL_NAMESPACES = "*"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InstanceFileConfig(_Section):
    """A file of instances that is read again when it changes."""

    path: Annotated[Path, Field(description="YAML or JSON file with `instances:`, as in the configuration.")]
    check_s: Annotated[_Positive, Field(description="Seconds between two looks at it.")] = 1.0


class RegistrationConfig(_Section):
    """Instances that register themselves (`conductor register`). Any may; given, it says that some will."""

    forget_after_s: Annotated[
        _Positive,
        Field(
            description="Seconds after its last heartbeat's time to live at which a silent instance leaves."
        ),
    ] = 60.0


class PodTemplate(InstanceConfig):
    """What the pods of one selector have in common, as an entry of `instances` without `id` and `url`."""

    id: str = ""
    url: str = ""

    @model_validator(mode="before")
    @classmethod
    def _without_identity(cls, given: Any) -> Any:
        for name in ("id", "url"):
            if isinstance(given, dict) and name in given:
                raise ValueError(f"{name!r} is the pod's own; leave it out")
        return given


class PodsConfig(_Section):
    """Pods of one label selector."""

    selector: Annotated[
        str,
        Field(
            min_length=1, description="Label selector, such as `app=vllm-prefill`; the API server reads it."
        ),
    ]
    namespace: Annotated[
        str | None,
        Field(min_length=1, description="Of the pods; `*` for all. Without it Conductor's own."),
    ] = None
    port: Annotated[
        _Port | _PortName | list[_Port | _PortName] | None,
        Field(
            description="Number or name of the port that serves HTTP; several where a pod runs several engines. "
            "Without it as the pod's annotations and labels say, else its port named `http`, else its first."
        ),
    ] = None
    scheme: Annotated[Literal["http", "https"], Field(description="How the engines are asked.")] = "http"
    instance: Annotated[
        PodTemplate, Field(description="Any key of an entry of `instances`; the pod's own annotations win.")
    ] = PodTemplate()

    @field_validator("port")
    @classmethod
    def _some_port(cls, port: Any) -> Any:
        if isinstance(port, list) and (not port or len(set(port)) < len(port)):
            raise ValueError("list each port once, and at least one; leave it out to take the pod's own")
        return port

    @property
    def ports(self) -> list[int | str]:
        """Empty where the pod tells."""
        if self.port is None:
            return []
        return list(self.port) if isinstance(self.port, list) else [self.port]


class KubernetesConfig(_Section):
    """Pods of a Kubernetes cluster."""

    pods: Annotated[list[PodsConfig], Field(min_length=1, description="Which pods are instances.")]
    kubeconfig: Annotated[
        Path | None,
        Field(description="File with the way to the API server; without it the pod's own service account."),
    ] = None
    context: Annotated[str | None, Field(description="Of the kubeconfig; its current one.")] = None

    @model_validator(mode="after")
    def _context_of_a_file(self) -> KubernetesConfig:
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("'context' needs the 'kubeconfig' that it is in")
        return self


class DiscoveryConfig(_Section):
    """Sources of instances besides the list `instances`."""

    drain_s: Annotated[
        _Positive,
        Field(description="An instance that its source no longer lists may finish its requests for so long."),
    ] = 600.0
    file: InstanceFileConfig | None = None
    registration: RegistrationConfig | None = None
    kubernetes: KubernetesConfig | None = None

    @property
    def brings_instances(self) -> bool:
        """Whether instances may come that nobody has listed."""
        return any(source is not None for source in (self.file, self.registration, self.kubernetes))
