"""The Helm chart: objects that Kubernetes takes, a file that Conductor takes, and no key where it is seen."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from chart import CHART, EXAMPLES, ROOT, configuration, container, notes, render, variants

from conductor.cli.access import make_rest_ring
from conductor.config import Config, load_config

VARIANTS = variants()
KUBERNETES = ("1.25", "1.31", "1.37")
# Kinds of the Prometheus operator and of the Gateway API, not of Kubernetes.
OPERATORS_OWN = {"ServiceMonitor", "PrometheusRule", "InferencePool"}


def _engine_list(variant: str) -> str:
    """The JSON that the example's comment puts into the Secret."""
    lines = EXAMPLES[variant].read_text().splitlines()
    listed = "".join(line.removeprefix("#") for line in lines if line.startswith("#   "))
    return listed.replace("...", "engine-key")


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("CONDUCTOR_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lint_finds_nothing(variant: str) -> None:
    report = helm_python.lint(CHART, VARIANTS[variant], strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_takes_every_object(variant: str, version: str) -> None:
    for kind, each in render(VARIANTS[variant]).items():
        if kind not in OPERATORS_OWN:
            kubernetes_validate.validate(each, version, strict=True)


def test_everything_can_be_switched_on() -> None:
    assert set(render(VARIANTS["everything"])) == {
        "ConfigMap",
        "Dashboard",
        "Deployment",
        "HorizontalPodAutoscaler",
        "InferencePool",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PrometheusRule",
        "RedisService",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
        "ServiceMonitor",
        "StatefulSet",
    }
    assert "PersistentVolumeClaim" in render({"persistence": {"enabled": True}})
    assert "PersistentVolumeClaim" not in render({"persistence": {"enabled": True, "existingClaim": "mine"}})
    assert set(render({})) == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_conductor_takes_the_file(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = VARIANTS[variant]
    objects = render(values)
    for each in container(objects)["env"]:
        reference = each.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            assert reference["name"] == values["secret"]["name"]
            is_list = each["name"] == "CONDUCTOR_INSTANCES"
            monkeypatch.setenv(each["name"], _engine_list(variant) if is_list else f"value-of-{each['name']}")
    config = load_config(configuration(objects, tmp_path))
    assert config.server.host == "0.0.0.0"
    from_somewhere = [config.instances, config.emulation.cluster, config.discovery.brings_instances]
    assert [bool(each) for each in from_somewhere].count(True) == 1
    if values.get("secret", {}).get("adminTokenKey"):
        ring = make_rest_ring(config, os.environ)
        assert ring is not None
        assert config.server.admin_token is not None
        assert config.server.admin_token.get_secret_value() == "value-of-CONDUCTOR_SERVER__ADMIN_TOKEN"
    if values.get("secret", {}).get("instancesKey"):
        keys = [each.api_key and each.api_key.get_secret_value() for each in config.instances]
        assert keys == ["engine-key", "engine-key"]


def test_numbers_reach_the_process_as_they_are(tmp_path: Path) -> None:
    given = {
        "server": {"max_body_bytes": 1_000_000},
        "scheduling": {"record_max_bytes": 6_000_000_000},
        "instances": [
            {
                "id": "a",
                "url": "http://a:1",
                "speeds": {
                    "prefill_s_per_token_squared": 1.25e-11,
                    "tiers": {"host": {"bytes_per_s": 5.0e10, "latency_s": 2.0e-4}},
                },
            }
        ],
    }
    config = load_config(configuration(render({"config": given}), tmp_path))
    assert config.server.max_body_bytes == 1_000_000
    assert config.scheduling.record_max_bytes == 6_000_000_000
    speeds = config.instances[0].speeds
    assert speeds.prefill_s_per_token_squared == 1.25e-11
    assert speeds.tiers["host"].bytes_per_s == 5.0e10


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicaCount": 2}, "replicaCount"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"config": {"sever": {}}}, "sever"),
        ({"config": {"instances": [{"id": "a", "url": "http://a:1", "rolle": "prefill"}]}}, "rolle"),
        ({"config": {"instances": [{"id": "a"}]}}, "url"),
        ({"config": {"server": {"workers": 0}}}, "workers"),
        ({"service": {"port": "http"}}, "port"),
        ({"autoscaling": {"podMetrics": [{"name": "conductor_load", "averageValue": "1"}]}}, "podMetrics"),
        ({"secret": {"env": {"a b": "key"}}}, "a b"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any], named: str) -> None:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmValuesError, match=named):
        chart.validate_schema(chart.merge_values(values))
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_the_schema_has_the_present_configuration() -> None:
    spec = importlib.util.spec_from_file_location("chart_schema", ROOT / "scripts" / "chart_schema.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert script.with_configuration(schema) == schema, "run: python scripts/chart_schema.py"
    assert set(schema["properties"]["config"]["properties"]) == set(Config.model_fields)


def test_every_value_is_in_the_schema_and_in_the_readme() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    readme = (CHART / "README.md").read_text()
    for name, value in yaml.safe_load((CHART / "values.yaml").read_text()).items():
        assert name in schema
        assert f"`{name}" in readme, name
        if isinstance(value, dict) and "properties" in schema[name] and name != "config":
            assert set(value) == set(schema[name]["properties"])


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"config": {"server": {"admin_token": "s3cret"}}}, "secret.adminTokenKey"),
        ({"config": {"api_keys": [{"name": "chat", "key": "s3cret"}]}}, "key_env"),
        (
            {"config": {"instances": [{"id": "a", "url": "http://a:1", "api_key": "s3cret"}]}},
            "secret.instancesKey",
        ),
        ({"config": {"shared_state": {"url": "redis://:s3cret@r"}}}, "sharedState.urlKey"),
        ({"sharedState": {"enabled": True}}, "needs secret.name"),
        ({"sharedState": {"redis": {"enabled": True}}}, "needs sharedState.enabled"),
        (
            {"secret": {"name": "keys"}, "sharedState": {"enabled": True, "urlKey": "u"}},
            "secret.adminTokenKey",
        ),
        (
            {"secret": {"name": "keys", "adminTokenKey": "a"}, "sharedState": {"enabled": True}},
            "either urlKey",
        ),
        (
            {
                "secret": {"name": "keys", "adminTokenKey": "a"},
                "sharedState": {"enabled": True, "redis": {"enabled": True}},
            },
            "passwordKey is required",
        ),
        (
            {
                "config": {
                    "discovery": {
                        "kubernetes": {"pods": [{"selector": "a=b", "instance": {"api_key": "s3cret"}}]}
                    }
                }
            },
            "CONDUCTOR_DISCOVERY",
        ),
        ({"secret": {"adminTokenKey": "admin"}}, "secret.name is required"),
        (
            {
                "secret": {"name": "keys", "instancesKey": "list"},
                "config": {"instances": [{"id": "a", "url": "http://a:1"}]},
            },
            "exclude each other",
        ),
        ({"emulateWithoutInstances": ""}, "config.instances is empty"),
        ({"persistence": {"enabled": True}, "replicas": 2}, "replicas: 1"),
        ({"persistence": {"enabled": True}, "autoscaling": {"enabled": True}}, "without autoscaling"),
        ({"persistence": {"enabled": True}, "config": {"state_dir": "/x"}}, "exclude each other"),
        (
            {"endpointPicker": {"enabled": True}, "config": {"endpoint_picker": {"port": 1}}},
            "endpointPicker.port",
        ),
        ({"endpointPicker": {"inferencePool": {"enabled": True}}}, "needs endpointPicker.enabled"),
        (
            {"endpointPicker": {"enabled": True, "inferencePool": {"enabled": True}}},
            "matchLabels is required",
        ),
        (
            {"autoscaling": {"enabled": True, "targetCPUUtilizationPercentage": None}},
            "targetCPUUtilizationPercentage, podMetrics",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(helm_python.HelmError, match=remedy) as refused:
        render(values)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_are_references_to_the_secret(variant: str) -> None:
    objects = render(VARIANTS[variant])
    assert "Secret" not in objects
    secret = VARIANTS[variant].get("secret")
    if secret is None:
        return
    text = json.dumps([each for kind, each in objects.items() if kind not in ("Deployment", "StatefulSet")])
    assert secret["name"] not in text
    variables = {each["name"]: each for each in container(objects)["env"]}
    wanted = {
        "CONDUCTOR_SERVER__ADMIN_TOKEN": secret.get("adminTokenKey"),
        "CONDUCTOR_INSTANCES": secret.get("instancesKey"),
        **secret.get("env", {}),
    }
    for name, key in wanted.items():
        if key is not None:
            assert variables[name] == {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": secret["name"], "key": key}},
            }


def test_a_digest_of_a_key_is_no_secret() -> None:
    digest = hashlib.sha256(b"key").hexdigest()
    values = {"config": {"api_keys": [{"name": "chat", "key_sha256": digest}]}}
    assert digest in render(values)["ConfigMap"]["data"]["config.yaml"]


def test_a_changed_configuration_rolls() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = render(values)["Deployment"]["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"service": {"port": 81}})
    assert checksum({}) != checksum({"config": {"log": {"level": "debug"}}})


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pod_may_do_nothing_that_it_need_not(variant: str) -> None:
    objects = render(VARIANTS[variant])
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert objects["ServiceAccount"]["automountServiceAccountToken"] is False
    asks = "kubernetes" in VARIANTS[variant].get("config", {}).get("discovery", {})
    assert pod["automountServiceAccountToken"] is asks
    assert {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & set(objects) == (
        {"Role", "RoleBinding"} if asks else set()
    )
    assert pod["enableServiceLinks"] is False
    for each in [*pod["initContainers"], *pod["containers"]]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container(objects)["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("namespaces", "kinds"),
    [
        ([None], {"Role", "RoleBinding"}),
        ([None, "gpu"], {"Role", "RoleBinding", "Role of gpu", "RoleBinding of gpu"}),
        (["gpu"], {"Role of gpu", "RoleBinding of gpu"}),
        ([None, "*"], {"ClusterRole", "ClusterRoleBinding"}),
    ],
)
def test_pods_may_be_watched_where_they_are_looked_for(namespaces: list[str | None], kinds: set[str]) -> None:
    pods = [
        {"selector": "app=vllm"} | ({} if namespace is None else {"namespace": namespace})
        for namespace in namespaces
    ]
    config = {"discovery": {"kubernetes": {"pods": pods}}}
    objects = render({"config": config})
    assert {kind for kind in objects if "Role" in kind} == kinds
    for kind in kinds:
        each = objects[kind]
        if "Binding" in kind:
            assert each["subjects"] == [{"kind": "ServiceAccount", "name": "conductor", "namespace": "llm"}]
            assert each["roleRef"]["kind"] == kind.split()[0].removesuffix("Binding")
        else:
            assert each["rules"] == [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
            ]
    for values in (
        {"config": config, "rbac": {"create": False}},
        {"config": {"discovery": {"kubernetes": {"pods": pods, "kubeconfig": "/etc/kubeconfig"}}}},
    ):
        assert not [kind for kind in render(values) if "Role" in kind]


def test_nothing_is_emulated_where_engines_are_found() -> None:
    for source in ({"registration": {}}, {"file": {"path": "/etc/engines.yaml"}}):
        config = yaml.safe_load(render({"config": {"discovery": source}})["ConfigMap"]["data"]["config.yaml"])
        assert "emulation" not in config


def test_selectors_find_the_pods() -> None:
    objects = render(VARIANTS["everything"], name="west")
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    monitored = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= objects["Service"]["metadata"]["labels"].items()
    assert {each["metadata"]["name"] for each in objects.values()} == {
        "west-conductor",
        "west-conductor-dashboard",
        "west-conductor-redis",
    }


def test_replicas_find_redis_and_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"name": "keys", "adminTokenKey": "admin"}
    own = render(
        {"secret": secret, "sharedState": {"enabled": True, "redis": {"enabled": True, "passwordKey": "p"}}}
    )
    variables = {each["name"]: each for each in container(own)["env"]}
    url = variables["CONDUCTOR_SHARED_STATE__URL"]["value"]
    assert url == "redis://:$(REDIS_PASSWORD)@conductor-redis:6379/0"
    names = [each["name"] for each in container(own)["env"]]
    assert names.index("REDIS_PASSWORD") < names.index("CONDUCTOR_SHARED_STATE__URL")
    assert own["RedisService"]["metadata"]["name"] == "conductor-redis"
    pods = own["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert own["RedisService"]["spec"]["selector"].items() <= pods.items()
    assert not own["Service"]["spec"]["selector"].items() <= pods.items()
    values = {"REDIS_PASSWORD": "pw", "POD_IP": "10.0.0.9", "CONDUCTOR_SHARED_STATE__REPLICA": "pod-0"}
    for name, each in variables.items():
        if name.startswith("CONDUCTOR_") and "value" in each:
            text = each["value"]
            for inner, value in values.items():
                text = text.replace(f"$({inner})", value)
            monkeypatch.setenv(name, text)
    shared = load_config(configuration(own, tmp_path)).shared_state
    assert shared.url is not None
    assert shared.url.get_secret_value() == "redis://:pw@conductor-redis:6379/0"
    assert (shared.advertise_url, shared.namespace) == ("http://10.0.0.9:8000", "llm.conductor")
    there = render({"secret": secret, "sharedState": {"enabled": True, "urlKey": "redis-url"}})
    assert "StatefulSet" not in there and "RedisService" not in there
    variables = {each["name"]: each for each in container(there)["env"]}
    assert variables["CONDUCTOR_SHARED_STATE__URL"]["valueFrom"]["secretKeyRef"]["key"] == "redis-url"


def test_probes_follow_tls() -> None:
    tls = {"certificate": "/tls/tls.crt", "private_key": "/tls/tls.key"}
    plain, https, mutual = (
        container(render({"config": {"server": server}}))["readinessProbe"]
        for server in ({}, {"tls": tls}, {"tls": tls | {"client_ca": "/tls/ca.crt"}})
    )
    assert plain["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTP"}
    assert https["httpGet"]["scheme"] == "HTTPS"
    assert mutual["tcpSocket"] == {"port": "http"} and "httpGet" not in mutual


def test_the_grace_period_covers_the_streams() -> None:
    def grace_s(**server: float) -> int:
        pod = render({"config": {"server": server}})["Deployment"]["spec"]["template"]["spec"]
        return pod["terminationGracePeriodSeconds"]

    assert grace_s() == 30 + 20
    assert grace_s(shutdown_grace_s=90.5) == 91 + 20


def test_gateways_reach_the_picker(tmp_path: Path) -> None:
    objects = render(VARIANTS["everything"])
    picker = load_config(configuration(objects, tmp_path)).endpoint_picker
    assert (picker.host, picker.port, picker.tls) == ("0.0.0.0", 9002, "self_signed")
    ports = {each["name"]: each for each in objects["Service"]["spec"]["ports"]}
    inside = {each["name"]: each["containerPort"] for each in container(objects)["ports"]}
    assert inside[ports["grpc-picker"]["targetPort"]] == picker.port
    allowed = objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
    assert {"port": "grpc-picker", "protocol": "TCP"} in allowed
    pool = objects["InferencePool"]["spec"]
    assert pool["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    reference = pool["endpointPickerRef"]
    assert reference["name"] == objects["Service"]["metadata"]["name"]
    assert reference["port"]["number"] == ports["grpc-picker"]["port"]
    plain = render({"endpointPicker": {"enabled": True, "selfSigned": False}})
    assert load_config(configuration(plain, tmp_path)).endpoint_picker.tls is None
    assert load_config(configuration(render({}), tmp_path)).endpoint_picker.port is None


def test_notes_say_what_is_open() -> None:
    assert "emulates 2p2d" in notes({}) and "whole API" in notes({})
    example = notes(yaml.safe_load(EXAMPLES["vllm-prefill-decode"].read_text()))
    assert "emulates" not in example and "whole API" not in example


def test_chart_and_image_agree() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    pod = render({})["Deployment"]["spec"]["template"]["spec"]
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}" in dockerfile
    compiled = pod["initContainers"][0]["command"][2].removesuffix("/.")
    assert f"NUMBA_CACHE_DIR={compiled}" in dockerfile
    assert 'ENTRYPOINT ["conductor"]' in dockerfile


def test_the_gateway_example_fits_together(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "gateway-api"
    objects = render(yaml.safe_load((folder / "values.yaml").read_text()))
    applied = {each["kind"]: each for each in yaml.safe_load_all((folder / "vllm.yaml").read_text())}
    kubernetes_validate.validate(applied["Deployment"], KUBERNETES[-1], strict=True)
    (rule,) = applied["HTTPRoute"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    pool = objects["InferencePool"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert backend["group"] == pool["apiVersion"].split("/")[0]
    template = applied["Deployment"]["spec"]["template"]
    pods = template["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pods.items()
    kubernetes = load_config(configuration(objects, tmp_path)).discovery.kubernetes
    assert kubernetes is not None
    (found,) = kubernetes.pods
    assert found.selector in [f"{name}={value}" for name, value in pods.items()]
    ports = {each["name"]: each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports[found.port]}]
