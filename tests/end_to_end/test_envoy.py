"""The real Envoy in front of emulated engines, asking the picker for every request's endpoint."""

import json
import os
import signal
import socket
import ssl
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from certificates import Authority
from envoy_process import cluster_of, envoy, filter_of, filters_of
from front_door_process import FrontDoor, conductor_command, free_port, front_door

from router.ext_proc.messages import HealthCheckRequest, HealthCheckResponse
from simulator.emulator.tokens import TOKENIZER_FOLDER

MODEL = "emulated-8b"
DUPLEX = {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
MODES = {
    "buffered": {},
    "duplex": DUPLEX,
    "duplex, response trailers": {**DUPLEX, "response_trailer_mode": "SEND"},
    "everything": {
        **DUPLEX,
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
}
ENDED = "conductor_picks_ended_total"


class Cluster:
    """A conductor with a picker over emulated engines, which another process owns and outlives it."""

    def __init__(self, owner: FrontDoor, door: FrontDoor, port: int) -> None:
        self.owner = owner
        self.door = door
        self.port = port
        self.engines = {name: each["url"] for name, each in owner.instances().items()}

    @property
    def urls(self) -> list[str]:
        return list(self.engines.values())

    def ended(self, how: str) -> float:
        return self.door.samples()[f'{ENDED}{{how="{how}"}}']

    def wait_for_the_end(self) -> None:
        """Of every request: what it computed is cached, and nothing waits behind it."""
        self.door.wait_until(
            lambda: self.door.samples()["conductor_picks_open"] == 0, "the end of every pick"
        )

    def placed(self, request_id: str) -> dict[str, Any]:
        """What is known of a request, by what Envoy named it."""
        placements = self.door.get("/v1/placements")["placements"]
        (found,) = [each for each in placements if each["request_id"] == request_id]
        return self.door.get(f"/v1/placements/{found['placement_id']}")


def settings(folder: Path, owner: FrontDoor, port: int, **more: Any) -> str:
    file = folder / f"conductor-{port}.json"
    engines = [{"id": name, "url": each["url"]} for name, each in owner.instances().items()]
    file.write_text(
        json.dumps(
            {
                "endpoint_picker": {"port": port},
                "instances": engines,
                "models": [{"name": MODEL, "tokenizer": str(TOKENIZER_FOLDER), "aliases": ["chat"]}],
                **more,
            }
        )
    )
    return str(file)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    folder = tmp_path_factory.mktemp("engines")
    with front_door(folder, "--emulate", "3") as door:
        yield door


@pytest.fixture(scope="module")
def cluster(owner: FrontDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("picker"), free_port()
    with front_door(folder, "--config", settings(folder, owner, port)) as door:
        yield Cluster(owner, door, port)


def with_modes(modes: dict[str, str], **options: Any) -> Any:
    def change(document: dict[str, Any]) -> None:
        processing = filter_of(document, "ext_proc")
        processing["processing_mode"].update(modes)
        processing.update(options)

    return change


def chat(*turns: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": MODEL, "messages": messages, "max_tokens": 12, **fields}


def fresh(size: int = 4_000) -> str:
    """Text that nobody has asked about."""
    return (uuid.uuid4().hex + " and some more of it ") * (size // 53)


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES.keys())
def test_a_conversation_stays_where_its_prefix_is(
    cluster: Cluster, tmp_path: Path, modes: dict[str, str]
) -> None:
    with envoy(tmp_path, cluster.urls, cluster.port, with_modes(modes, failure_mode_allow=False)) as gateway:
        seen = set()
        for _ in range(3):
            question = fresh()
            first = gateway.http.post("/v1/chat/completions", json=chat(question))
            assert first.status_code == 200, first.text
            answer = first.json()["choices"][0]["message"]["content"]
            cluster.wait_for_the_end()
            second = gateway.http.post("/v1/chat/completions", json=chat(question, answer, "And then?"))
            assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_000
            before, now = (cluster.placed(each.headers["x-request-id"]) for each in (first, second))
            assert now["prefill_instance"] == before["prefill_instance"]
            assert now["token_source"] == "local"
            assert now["overlap_tokens"] > 1_000
            seen.add(now["prefill_instance"])
        with gateway.http.stream("POST", "/v1/chat/completions", json=chat(fresh(), stream=True)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert stream.status_code == 200
        assert lines[-1] == "data: [DONE]" and len(lines) > 5
        assert gateway.http.get("/v1/models").json()["data"][0]["id"] == MODEL
    cluster.door.wait_until(
        lambda: cluster.door.samples()["conductor_picks_open"] == 0, "the end of every pick"
    )


def test_how_the_end_of_a_request_is_known(cluster: Cluster, tmp_path: Path) -> None:
    """The table of docs/gateways.md."""
    ends = {"buffered": "stream", "duplex, response trailers": "stream", "everything": "observed"}
    for name, how in ends.items():
        with envoy(tmp_path, cluster.urls, cluster.port, with_modes(MODES[name])) as gateway:
            before = cluster.ended(how)
            asked = chat(
                fresh(), max_tokens=40, ignore_eos=True, stream=True, stream_options={"include_usage": True}
            )
            answer = gateway.http.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200
            cluster.door.wait_until(lambda before=before, how=how: cluster.ended(how) == before + 1, name)
            if how == "observed":
                observed = cluster.placed(answer.headers["x-request-id"])["observed"]
                assert observed["output_tokens"] == 40
                assert answer.headers["x-conductor-placement-id"]
    with envoy(tmp_path, cluster.urls, cluster.port, with_modes(MODES["duplex"])) as gateway:
        before = cluster.ended("predicted")
        for _ in range(4):
            assert gateway.http.post("/v1/chat/completions", json=chat(fresh(20_000))).status_code == 200
        cluster.door.wait_until(lambda: cluster.ended("predicted") > before, "an end by prediction")


def test_a_client_that_leaves_ends_its_pick(cluster: Cluster, tmp_path: Path) -> None:
    with envoy(tmp_path, cluster.urls, cluster.port) as gateway:
        before = cluster.ended("stream")
        asked = chat(fresh(), stream=True, max_tokens=20_000)
        cluster.wait_for_the_end()
        with gateway.http.stream("POST", "/v1/chat/completions", json=asked) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()  # which end the stream when nobody names them any longer
            next(lines)
            assert cluster.door.samples()["conductor_picks_open"] == 1
        cluster.door.wait_until(lambda: cluster.ended("stream") == before + 1, "the end of the pick")


@pytest.mark.parametrize("modes", [{}, DUPLEX], ids=["buffered", "duplex"])
def test_long_bodies_and_aliases(cluster: Cluster, tmp_path: Path, modes: dict[str, str]) -> None:
    with envoy(tmp_path, cluster.urls, cluster.port, with_modes(modes, failure_mode_allow=False)) as gateway:
        tokens = [i % 500 for i in range(60_000)]
        asked = {"model": MODEL, "prompt": tokens, "max_tokens": 2, "user": "x" * 250_000}
        assert len(json.dumps(asked)) > 500_000
        answer = gateway.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
        assert cluster.placed(answer.headers["x-request-id"])["token_source"] == "client"
        asked = {"model": MODEL, "prompt": "short", "max_tokens": 2, "user": "x" * 5_000_000}
        assert gateway.http.post("/v1/completions", json=asked).status_code == 200
        answer = gateway.http.post("/v1/chat/completions", json=chat("hello", model="chat"))
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == MODEL


def hinted(subset: list[str]) -> Any:
    """Metadata as a gateway with endpoints of its own sets it."""

    def change(document: dict[str, Any]) -> None:
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        value = {"x-gateway-destination-endpoint-subset": subset}
        entry = {"metadata_namespace": "envoy.lb.subset_hint", "value": value}
        filters_of(document).insert(0, {"name": "hint", "typed_config": {"@type": kind, "metadata": [entry]}})

    return change


def test_only_the_gateways_own_endpoints_are_picked(cluster: Cluster, tmp_path: Path) -> None:
    name, url = list(cluster.engines.items())[1]
    with envoy(tmp_path, cluster.urls, cluster.port, hinted([url.removeprefix("http://")])) as gateway:
        for _ in range(4):
            answer = gateway.http.post("/v1/chat/completions", json=chat(fresh()))
            assert cluster.placed(answer.headers["x-request-id"])["prefill_instance"] == name
    with envoy(tmp_path, cluster.urls, cluster.port, hinted(["10.9.9.9:80"])) as gateway:
        answer = gateway.http.post("/v1/chat/completions", json=chat("hello"))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_instance_available"
        assert answer.headers["retry-after"] == "1"


def test_who_would_be_late_is_shed_and_the_rest_is_told_what_is_wrong(
    owner: FrontDoor, tmp_path: Path
) -> None:
    port = free_port()
    config = settings(tmp_path, owner, port, scheduling={"admission": {"rule": "early"}})
    with (
        front_door(tmp_path, "--config", config) as door,
        envoy(tmp_path, Cluster(owner, door, port).urls, port) as gateway,
    ):
        hurry = {"x-llm-d-slo-ttft-ms": "0.1"}
        answer = gateway.http.post("/v1/chat/completions", json=chat(fresh()), headers=hurry)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "overloaded_prefill"
        assert int(answer.headers["retry-after"]) >= 1
        answer = gateway.http.post("/v1/chat/completions", content=b"{")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        answer = gateway.http.post("/v1/chat/completions", json=chat("hello", model="other"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        answer = gateway.http.post("/v1/messages", json=chat("hello", model="other"))
        assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.extended
def test_an_engine_that_dies_and_then_the_picker(tmp_path: Path) -> None:
    port = free_port()
    emulation = tmp_path / "engines.json"
    emulation.write_text(json.dumps({"emulation": {"cluster": "3", "restart_after_s": 600}}))
    with front_door(tmp_path, "--config", str(emulation)) as owner:
        slow = {"health": {"interval_s": 600}}  # what is down is learned from requests
        config = settings(tmp_path, owner, port, **slow)
        with front_door(tmp_path, "--config", config) as door:
            cluster = Cluster(owner, door, port)
            with envoy(tmp_path, cluster.urls, port, with_modes({"response_header_mode": "SEND"})) as gateway:
                question = fresh()
                first = gateway.http.post("/v1/chat/completions", json=chat(question))
                gone = first.headers["x-conductor-decode-instance"]
                cluster.wait_for_the_end()
                os.kill(owner.engine_pids()[gone], signal.SIGKILL)
                second = gateway.http.post("/v1/chat/completions", json=chat(question))
                assert second.status_code == 200, second.text
                assert second.headers["x-conductor-decode-instance"] != gone
                assert door.samples()["conductor_picks_elsewhere_total"] == 1
                placements = door.get("/v1/placements")["placements"]
                assert [each["outcome"] for each in placements[:2]][1] == "failed"
                assert placements[1]["prefill_instance"] == gone
                assert door.stop() == 0
                for _ in range(20):  # Envoy balances by itself, and goes past the dead engine
                    answer = gateway.http.post("/v1/chat/completions", json=chat(fresh()))
                    assert answer.status_code == 200, answer.text


@pytest.mark.extended
def test_responses_under_way_outlive_the_picker(owner: FrontDoor, tmp_path: Path) -> None:
    port = free_port()
    with front_door(tmp_path, "--config", settings(tmp_path, owner, port)) as door:
        urls = Cluster(owner, door, port).urls
        with envoy(tmp_path, urls, port, with_modes({}, failure_mode_allow=False)) as gateway:
            asked = chat(fresh(), stream=True, max_tokens=400, ignore_eos=True)
            with gateway.http.stream("POST", "/v1/chat/completions", json=asked) as stream:
                lines = stream.iter_lines()
                next(lines)
                assert door.samples()["conductor_picks_open"] == 1
                assert door.stop() == 0
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and len(rest) > 50


def test_without_a_picker_a_gateway_may_also_refuse(cluster: Cluster, tmp_path: Path) -> None:
    with envoy(tmp_path, cluster.urls, free_port(), with_modes({}, failure_mode_allow=False)) as gateway:
        assert gateway.http.post("/v1/chat/completions", json=chat("hello")).status_code >= 500


def health(channel: grpc.Channel, service: str) -> int:
    ask = channel.unary_unary("/grpc.health.v1.Health/Check")
    told = ask(HealthCheckRequest(service=service).SerializeToString(), timeout=10)
    return int(HealthCheckResponse.FromString(told).status)


def test_health_and_messages_that_are_none(cluster: Cluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.port}") as channel:
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert health(channel, service) == 1
        with pytest.raises(grpc.RpcError) as refused:
            health(channel, "other")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        with pytest.raises(grpc.RpcError) as refused:
            list(process(iter([b"\xff\xff\xff"]), timeout=10))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no ProcessingRequest" in refused.value.details()
        assert cluster.door.samples()["conductor_picks_broken_messages_total"] >= 1
        assert health(channel, "readiness") == 1


def over_tls(document: dict[str, Any], trusted: Path | None = None) -> None:
    context: dict[str, Any] = {"common_tls_context": {"alpn_protocols": ["h2"]}}
    if trusted is not None:
        context["common_tls_context"]["validation_context"] = {"trusted_ca": {"filename": str(trusted)}}
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    cluster_of(document, "conductor")["transport_socket"] = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {"@type": kind, **context},
    }
    filter_of(document, "ext_proc")["failure_mode_allow"] = False


@pytest.mark.extended
@pytest.mark.parametrize("own", [True, False], ids=["self-signed", "files"])
def test_tls(owner: FrontDoor, tmp_path: Path, own: bool) -> None:
    port = free_port()
    authority = Authority(tmp_path)
    identity = authority.issue("picker")
    files = {"certificate": str(identity.certificate), "private_key": str(identity.private_key)}
    picker = {"port": port, "tls": "self_signed" if own else files}
    with front_door(tmp_path, "--config", settings(tmp_path, owner, port, endpoint_picker=picker)) as door:
        urls = Cluster(owner, door, port).urls
        trusted = None if own else authority.file
        with envoy(tmp_path, urls, port, lambda document: over_tls(document, trusted)) as gateway:
            assert gateway.http.post("/v1/chat/completions", json=chat("hello")).status_code == 200
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)


@pytest.mark.extended
def test_what_cannot_be_listened_with_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mixed = {
        "certificate": str(authority.issue("a").certificate),
        "private_key": str(authority.issue("b").private_key),
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for picker, named in (
            ({"port": port}, "endpoint_picker.port: cannot listen"),
            ({"port": free_port(), "tls": mixed}, "endpoint_picker.tls.private_key"),
        ):
            file = tmp_path / "conductor.json"
            config = {"endpoint_picker": picker, "server": {"port": 0}, "emulation": {"cluster": "1"}}
            file.write_text(json.dumps(config))
            ended = subprocess.run(
                conductor_command("serve", "--config", str(file)), capture_output=True, text=True, timeout=60
            )
            assert ended.returncode != 0
            assert named in ended.stderr
            assert "Traceback" not in ended.stderr
