"""`conductor serve` over engines that nobody has listed: from a file, by registration, from Kubernetes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from front_door_process import FrontDoor, conductor_command, free_port, front_door
from kubernetes_api import pod, threaded_kubernetes_api


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of three mixed engines that are emulated."""
    log = tmp_path_factory.mktemp("engines") / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            conductor_command("emulate", "3", "--base-port", "0", "--speed", "10"),
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        lines = []
        while len(lines) < 10:
            lines.append(process.stdout.readline())
            assert lines[-1], log.read_text()
        try:
            yield [each["url"] for each in yaml.safe_load(b"".join(lines))["instances"]]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
            process.stdout.close()


def start_register(door: FrontDoor, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            conductor_command("register", *arguments, "--url", door.url, "--ttl-s", "1.5"),
            stdout=output,
            stderr=output,
        )


def healths(door: FrontDoor) -> dict[str, str]:
    return {instance_id: each["health"] for instance_id, each in door.instances().items()}


def sources(door: FrontDoor) -> dict[str, Any]:
    return {each["source"]: each for each in door.get("/v1/discovery")["sources"]}


def test_every_source_brings_instances_and_takes_them_away(tmp_path: Path, engines: list[str]) -> None:
    listed = tmp_path / "instances.yaml"
    listed.write_text(f"instances:\n  - {{id: by-file, url: '{engines[0]}'}}\n")
    with threaded_kubernetes_api() as kubernetes:
        port = int(engines[1].rpartition(":")[2])
        kubernetes.do(
            lambda api: api.put(pod("by-pod", ip="127.0.0.1", annotations={"conductor.port": str(port)}))
        )
        config = {
            "discovery": {
                "drain_s": 20,
                "file": {"path": str(listed), "check_s": 0.1},
                "registration": {"forget_after_s": 1},
                "kubernetes": {
                    "kubeconfig": str(kubernetes.api.kubeconfig(tmp_path)),
                    "pods": [{"selector": "app=vllm"}],
                },
            }
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        with front_door(tmp_path, "--config", str(tmp_path / "config.yaml")) as door:
            door.wait_until(lambda: healths(door) == {"by-file": "up", "by-pod": "up"}, "two instances up")
            sidecar = start_register(
                door, tmp_path / "register.log", "by-itself", engines[2], "--set", "ranks=1"
            )
            try:
                door.wait_until(lambda: healths(door).get("by-itself") == "up", "registration")
                assert {i: each["source"] for i, each in door.instances().items()} == {
                    "by-file": "file",
                    "by-pod": "kubernetes",
                    "by-itself": "registration",
                }
                body = {"model": "emulated-8b", "prompt": list(range(200)), "max_tokens": 4}
                assert door.http.post("/v1/completions", json=body).status_code == 200
                samples = door.samples()
                for source in ("file", "registration", "kubernetes"):
                    labels = f'{{source="{source}"}}'
                    assert samples[f"conductor_discovery_instances{labels}"] == 1
                    assert samples[f"conductor_discovery_source_up{labels}"] == 1
                    stamp = samples[f"conductor_discovery_last_sync_timestamp_seconds{labels}"]
                    assert abs(stamp - time.time()) < 60
                # A broken file, a pod that is not ready, an annotation that is wrong.
                listed.write_text("instances:\n  - {id: by-file, url: x}\n")
                door.wait_until(lambda: sources(door)["file"]["error"] is not None, "the file's error")
                assert "line 2: 'instances.0.url'" in sources(door)["file"]["error"]
                kubernetes.do(
                    lambda api: api.change(
                        "by-pod", conditions=[{"type": "Ready", "status": "False", "reason": "Probe"}]
                    )
                )
                door.wait_until(lambda: healths(door)["by-pod"] == "withheld", "withholding")
                assert door.samples()['conductor_instance_up{instance="by-pod",role="mixed"}'] == 0
                kubernetes.do(lambda api: api.put(pod("bad", annotations={"conductor.role": "x"})))
                door.wait_until(lambda: "bad" in sources(door)["kubernetes"]["refused"], "the refusal")
                # All but one leave, each in its way.
                kubernetes.do(lambda api: api.begin_deletion("by-pod"))
                door.wait_until(lambda: "by-pod" not in healths(door), "the end of the pod")
                sidecar.send_signal(signal.SIGTERM)
                assert sidecar.wait(timeout=20) == 0
                assert "rror" not in (tmp_path / "register.log").read_text()
                assert set(healths(door)) == {"by-file"}
                assert door.http.post("/v1/completions", json=body).status_code == 200
            finally:
                sidecar.kill()
                sidecar.wait()


@pytest.mark.extended
def test_registrations_outlive_a_restart_and_a_killed_sidecar_leaves(
    tmp_path: Path, engines: list[str]
) -> None:
    port = free_port()
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"server": {"port": port}, "discovery": {"registration": {"forget_after_s": 1}}})
    )

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "serve.log").open("ab") as output:
            return subprocess.Popen(
                conductor_command("serve", "--config", str(tmp_path / "config.yaml")),
                stdout=output,
                stderr=output,
            )

    process = start()
    door = FrontDoor(process, f"http://127.0.0.1:{port}", tmp_path / "serve.log")
    sidecar = start_register(door, tmp_path / "register.log", "e-0", engines[0])

    def is_up() -> bool:
        try:
            return healths(door) == {"e-0": "up"}
        except (httpx.TransportError, AssertionError):
            return False

    try:
        door.wait_until(is_up, "registration", within_s=60)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process = start()
        door.wait_until(is_up, "registration again", within_s=60)
        os.kill(sidecar.pid, signal.SIGKILL)
        door.wait_until(lambda: healths(door)["e-0"] == "withheld", "withholding")
        door.wait_until(lambda: healths(door) == {}, "the end of the registration")
    finally:
        sidecar.kill()
        sidecar.wait()
        door.http.close()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@pytest.mark.extended
def test_a_refused_registration_ends_the_command(tmp_path: Path, engines: list[str]) -> None:
    config = {"instances": [{"id": "here", "url": engines[0]}]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with front_door(tmp_path, "--config", str(tmp_path / "config.yaml")) as door:
        done = subprocess.run(
            conductor_command("register", "here", engines[1], "--url", door.url),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 2
        assert "refuses the instance: the id 'here' is taken" in done.stderr
        assert healths(door) == {"here": "up"}
