"""What pods are as instances: our annotations, the labels of other stacks, ports, readiness and ends."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_api import pod

from conductor.discovery.kubernetes.conventions import AnnotationError
from conductor.discovery.kubernetes.pods import instances_of
from conductor.discovery_config import PodsConfig
from conductor.instance_config import InstanceConfig
from conductor.placement import Role


def config(**fields: Any) -> PodsConfig:
    return PodsConfig.model_validate({"selector": "app=vllm", **fields})


def instance(described: dict[str, Any], **fields: Any) -> InstanceConfig:
    """The only one of a pod."""
    (listed,) = instances_of(described, config(**fields))
    return listed.config


def test_a_pod_is_an_instance_at_its_address() -> None:
    (listed,) = instances_of(pod("vllm-0", ip="10.4.0.7", uid="u1"), config())
    assert listed.config == InstanceConfig(id="vllm-0", url="http://10.4.0.7:8000")
    assert (listed.life, listed.withheld) == ("u1", None)
    assert instance(pod("vllm-0", ip="fd00::7")).url == "http://[fd00::7]:8000"
    assert instance(pod("vllm-0"), namespace="*").id == "vllm-0.llm"
    assert instance(pod("vllm-0"), scheme="https").url == "https://10.1.0.1:8000"


def test_own_annotations_are_fields_of_an_instance() -> None:
    annotations = {
        "conductor.role": "prefill",
        "conductor.instance_class": "llama-3.1-8b-h100",
        "conductor.ranks": "2",
        "conductor.kv_events": "[{endpoint: 'tcp://*:5557'}, {endpoint: 'tcp://*:5558', topic: kv}]",
        "conductor.location": "eu/a/r1/n7",
        "conductor.streams_layers": "true",
        "conductor.port": "9000",
        "conductor.scheme": "https",
    }
    made = instance(
        pod("vllm-0", ip="10.4.0.7", labels={"conductor.role": "decode"}, annotations=annotations)
    )
    assert made.url == "https://10.4.0.7:9000"
    assert (made.role, made.ranks, made.location, made.streams_layers) == (
        Role.PREFILL,
        2,
        "eu/a/r1/n7",
        True,
    )
    assert made.kv_events is not None
    assert [stream.endpoint for stream in made.kv_events] == ["tcp://10.4.0.7:5557", "tcp://10.4.0.7:5558"]
    assert instance(pod("vllm-0", labels={"conductor.role": "decode"})).role is Role.DECODE
    assert instances_of(pod("vllm-0", annotations={"conductor.ignore": "true"}), config()) == ()


def test_annotations_win_over_the_selectors_description_and_that_over_other_stacks_labels() -> None:
    labels = {"llm-d.ai/role": "decode", "llm-d.ai/engine-type": "sglang"}
    described = {"role": "prefill", "protocol": "trtllm", "speeds": {"chunk_tokens": 4096}}
    made = instance(pod("a", labels=labels), instance=described)
    assert (made.role, made.protocol, made.speeds.chunk_tokens) == (Role.PREFILL, "trtllm", 4096)
    made = instance(pod("a", labels=labels))
    assert (made.role, made.protocol) == (Role.DECODE, "sglang")
    annotated = pod("a", labels=labels, annotations={"conductor.role": "mixed"})
    assert instance(annotated, instance=described).role is Role.MIXED


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"llm-d.ai/role": "prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "decode"}, Role.DECODE),
        ({"llm-d.ai/role": "both"}, Role.MIXED),
        ({"llm-d.ai/role": "prefill-decode"}, Role.MIXED),
        ({"llm-d.ai/role": "encode-prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "encode"}, None),
        ({"llm-d.ai/inference-serving": "true"}, Role.MIXED),
        ({"model.aibrix.ai/name": "m", "role-name": "prefill"}, Role.PREFILL),
        ({"model.aibrix.ai/name": "m", "role-name": "decode"}, Role.DECODE),
        ({"model.aibrix.ai/name": "m", "role-name": "worker"}, Role.MIXED),
        ({"role-name": "prefill", "stormservice.orchestration.aibrix.ai/pod-group-index": "0"}, Role.PREFILL),
        ({"role-name": "prefill", "stormservice.orchestration.aibrix.ai/pod-group-index": "1"}, None),
        ({"leaderworkerset.sigs.k8s.io/worker-index": "0"}, Role.MIXED),
        ({"leaderworkerset.sigs.k8s.io/worker-index": "3"}, None),
    ],
)
def test_roles_of_other_stacks(labels: dict[str, str], role: Role | None) -> None:
    assert [each.config.role for each in instances_of(pod("a", labels=labels), config())] == (
        [] if role is None else [role]
    )


def test_what_aibrix_says_of_an_engine() -> None:
    labels = {
        "model.aibrix.ai/name": "qwen3-8b",
        "model.aibrix.ai/engine": "sglang",
        "model.aibrix.ai/port": "30000",
        "role-name": "prefill",
    }
    made = instance(pod("a", labels=labels, annotations={"model.aibrix.ai/sglang-bootstrap-port": "8997"}))
    assert (made.url, made.protocol, made.bootstrap_port) == ("http://10.1.0.1:30000", "sglang", 8997)


def test_a_selector_of_the_production_stack_gives_the_role() -> None:
    """Its label `model` names roles only to those who are told so."""
    ports = (("container-port", 8000), ("zmq-port", 55555), ("ucx-port", 9999))
    labels = {"model": "llama-prefill", "environment": "test", "release": "test"}
    made = instance(pod("a", labels=labels, ports=ports), instance={"role": "prefill"})
    assert (made.url, made.role) == ("http://10.1.0.1:8000", Role.PREFILL)


@pytest.mark.parametrize(
    ("ports", "configured", "annotated", "urls"),
    [
        ((("metrics", 9090), ("http", 8000)), None, None, ["vllm-0 8000"]),
        ((("serve", 7000), ("metrics", 9090)), None, None, ["vllm-0 7000"]),
        ((("http", 8000), ("engine", 8200)), "engine", None, ["vllm-0 8200"]),
        ((("http", 8000),), 8300, None, ["vllm-0 8300"]),
        ((("http", 8000),), 8300, "8400", ["vllm-0 8400"]),
        ((), 8300, None, ["vllm-0 8300"]),
        (
            (("rank0", 8000), ("rank1", 8001)),
            ["rank0", "rank1"],
            None,
            ["vllm-0-8000 8000", "vllm-0-8001 8001"],
        ),
        ((), None, "[8000, 8001]", ["vllm-0-8000 8000", "vllm-0-8001 8001"]),
    ],
)
def test_ports(ports: Any, configured: Any, annotated: str | None, urls: list[str]) -> None:
    annotations = {} if annotated is None else {"conductor.port": annotated}
    found = instances_of(pod("vllm-0", ports=ports, annotations=annotations), config(port=configured))
    assert [f"{each.config.id} {each.config.url.rpartition(':')[2]}" for each in found] == urls


def test_readiness_and_ends() -> None:
    (waiting,) = instances_of(pod("a", ready=False), config())
    assert waiting.withheld == "the pod is not ready: containers with unready status: [engine]"
    young = pod("a")
    young["status"]["conditions"] = []
    assert instances_of(young, config())[0].withheld == "the pod is not ready yet"
    assert instances_of(pod("a", ip=None, phase="Pending"), config()) == ()
    assert instances_of(pod("a", phase="Succeeded"), config()) == ()
    leaving = pod("a")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-01T11:00:30Z"
    assert instances_of(leaving, config()) == ()


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (
            {"annotations": {"conductor.rolle": "mixed"}},
            "conductor.rolle: unknown; known: conductor.block_size",
        ),
        (
            {"annotations": {"conductor.role": "both"}},
            "'role': Input should be 'prefill', 'decode' or 'mixed'",
        ),
        ({"annotations": {"conductor.id": "x"}}, "conductor.id: is the pod's own"),
        ({"annotations": {"conductor.api_key": "x"}}, "conductor.api_key: everybody who may read pods"),
        ({"annotations": {"conductor.kv_events": "["}}, "conductor.kv_events: '[' is not valid YAML"),
        ({"annotations": {"conductor.scheme": "ftp"}}, "conductor.scheme: 'ftp' must be http or https"),
        ({"annotations": {"conductor.port": "grpc"}}, "conductor.port: 'grpc' is neither a port number nor"),
        ({"annotations": {"conductor.port": "true"}}, "conductor.port: True is neither a port number nor"),
        ({"labels": {"llm-d.ai/role": "router"}}, "llm-d.ai/role: 'router' is none of prefill, decode"),
        ({"labels": {"model.aibrix.ai/port": "http"}}, "model.aibrix.ai/port: 'http' is no port number"),
        ({"ports": ()}, "the pod declares no port; annotate it with conductor.port"),
    ],
)
def test_what_cannot_be_used_is_named(described: dict[str, Any], said: str) -> None:
    with pytest.raises(AnnotationError) as error:
        instances_of(pod("a", **described), config())
    assert said in str(error.value)
