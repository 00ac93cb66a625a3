"""What labels and annotations of a pod say of the engine in it: our own, and those of other stacks.

Ours are `conductor.` and a key of an entry of `instances`. The others, with their sources:

- llm-d: `llm-d.ai/role` (llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/filter/bylabel/roles.go, read
  in 2026) and `llm-d.ai/engine-type` (labels of its guides);
- AIBrix: `role-name` and `stormservice.orchestration.aibrix.ai/pod-group-index`, which is 0 where the HTTP server
  is, and `model.aibrix.ai/sglang-bootstrap-port` (vllm-project/aibrix,
  pkg/plugins/gateway/algorithms/pd_disaggregation.go), `model.aibrix.ai/port` and `model.aibrix.ai/engine`
  (pkg/constants/model.go);
- LeaderWorkerSet: `leaderworkerset.sigs.k8s.io/worker-index`, which is 0 for the leader
  (lws.sigs.k8s.io, labels and annotations);
- vLLM's production-stack has a label `model`, whose values its router is told to be prefill or decode engines
  (`--prefill-model-labels`): so it is a selector here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from conductor.configuration_faults import read_yaml
from conductor.instance_config import InstanceConfig

OWN: Final = "conductor."
_OF_THE_POD: Final = frozenset(("id", "url"))
_ABOUT_THE_POD: Final = frozenset(("port", "scheme", "ignore"))
_FIELDS: Final = frozenset(InstanceConfig.model_fields) - _OF_THE_POD - {"api_key"}
_LLM_D_ROLES: Final = {
    "prefill": "prefill",
    "decode": "decode",
    "prefill-decode": "mixed",
    "both": "mixed",
    "encode-prefill": "prefill",
    "encode-prefill-decode": "mixed",
}
_PROTOCOLS: Final = {"vllm": "vllm-nixl", "sglang": "sglang", "trtllm": "trtllm", "tensorrt-llm": "trtllm"}


class AnnotationError(Exception):
    """A label or annotation that cannot be used; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Marks:
    """``own`` and ``conventional`` are fields of an instance by name, as our and as others' labels give them.

    ``port`` and ``scheme`` are None where nothing is said. ``left_out`` is why the pod is no instance.
    """

    own: dict[str, Any]
    conventional: dict[str, Any]
    port: Any = None
    scheme: str | None = None
    left_out: str | None = None


def read_marks(labels: Mapping[str, str], annotations: Mapping[str, str]) -> Marks:
    """An annotation wins over a label of the same name. Raises AnnotationError."""
    own: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for name, text in {**labels, **annotations}.items():
        if name.startswith(OWN):
            key = name.removeprefix(OWN)
            if key not in _FIELDS and key not in _ABOUT_THE_POD:
                raise AnnotationError(f"{name}: {_why_not(key)}")
            try:
                value = read_yaml(text)
            except yaml.YAMLError:
                raise AnnotationError(f"{name}: {text!r} is not valid YAML") from None
            (about if key in _ABOUT_THE_POD else own)[key] = value
    if about.get("scheme") not in (None, "http", "https"):
        raise AnnotationError(f"{OWN}scheme: {about['scheme']!r} must be http or https")
    left_out = f"{OWN}ignore" if about.get("ignore") else None
    conventional: dict[str, Any] = {}
    port: Any = about.get("port")
    for convention in (_llm_d, _aibrix, _leader_worker_set):
        found = convention({**annotations, **labels})
        conventional = found.conventional | conventional
        left_out = left_out or found.left_out
        port = found.port if port is None else port
    return Marks(own, conventional, port, about.get("scheme"), left_out)


def _why_not(key: str) -> str:
    if key in _OF_THE_POD:
        return "is the pod's own; leave it out"
    if key == "api_key":
        return "everybody who may read pods would read it; give it in discovery.kubernetes.pods[].instance"
    return f"unknown; known: {', '.join(sorted(OWN + each for each in _FIELDS | _ABOUT_THE_POD))}"


def _llm_d(marks: Mapping[str, str]) -> Marks:
    fields: dict[str, Any] = {}
    role = marks.get("llm-d.ai/role")
    if role == "encode":
        return Marks({}, {}, left_out="llm-d.ai/role: encode, which takes no prompts")
    if role is not None:
        if role not in _LLM_D_ROLES:
            raise AnnotationError(f"llm-d.ai/role: {role!r} is none of {', '.join(_LLM_D_ROLES)}, encode")
        fields["role"] = _LLM_D_ROLES[role]
    if (protocol := _PROTOCOLS.get(marks.get("llm-d.ai/engine-type", ""))) is not None:
        fields["protocol"] = protocol
    return Marks({}, fields)


def _aibrix(marks: Mapping[str, str]) -> Marks:
    fields: dict[str, Any] = {}
    group = marks.get("stormservice.orchestration.aibrix.ai/pod-group-index", "0")
    if group != "0":
        return Marks({}, {}, left_out=f"pod {group} of its group: the first has the HTTP server")
    if (role := marks.get("role-name")) in ("prefill", "decode"):
        fields["role"] = role
    if (protocol := _PROTOCOLS.get(marks.get("model.aibrix.ai/engine", ""))) is not None:
        fields["protocol"] = protocol
    if (bootstrap := marks.get("model.aibrix.ai/sglang-bootstrap-port")) is not None:
        fields["bootstrap_port"] = _number("model.aibrix.ai/sglang-bootstrap-port", bootstrap)
    port = marks.get("model.aibrix.ai/port")
    return Marks({}, fields, None if port is None else _number("model.aibrix.ai/port", port))


def _leader_worker_set(marks: Mapping[str, str]) -> Marks:
    worker = marks.get("leaderworkerset.sigs.k8s.io/worker-index", "0")
    if worker != "0":
        return Marks({}, {}, left_out=f"worker {worker} of a LeaderWorkerSet: its leader has the HTTP server")
    return Marks({}, {})


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise AnnotationError(f"{name}: {text!r} is no port number")
    return int(text)
