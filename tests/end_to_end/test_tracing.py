"""`conductor serve` with a collector: the trace of a request handed from one instance to another."""

from pathlib import Path

import httpx
import openai
import pytest
import yaml
from front_door_process import front_door
from otlp_collector import otlp_collector
from waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_request_is_one_trace(tmp_path: Path, by_environment: bool) -> None:
    with otlp_collector() as collector:
        arguments, env = ["--emulate", "2p2d", "--emulate-speed", "20"], {}
        if by_environment:
            env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "the-door"}
        else:
            file = tmp_path / "conductor.yaml"
            tracing = {"otlp_endpoint": collector.url, "service_name": "the-door"}
            file.write_text(yaml.safe_dump({"tracing": tracing}))
            arguments += ["--config", str(file)]
        with front_door(tmp_path, *arguments, env=env) as door:
            client = openai.OpenAI(base_url=f"{door.url}/v1", api_key="-", max_retries=0)
            with (
                client,
                client.chat.completions.create(
                    model="emulated-8b",
                    messages=[{"role": "user", "content": "Tell me a story. " * 400}],
                    max_tokens=5,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers=PARENT,
                ) as stream,
            ):
                assert list(stream)
            assert door.stop() == 0, door.log.read_text()
        server = collector.one("POST /v1/chat/completions")
        assert (server.trace_id, server.parent_id) == (TRACE, SPAN)
        assert server.resource["service.name"] == "the-door"
        assert server.attributes["gen_ai.request.model"] == "emulated-8b"
        assert server.attributes["gen_ai.usage.output_tokens"] == 5
        assert server.attributes["conductor.predicted_ttft_s"] > 0
        prefill, decode = collector.one("prefill"), collector.one("decode")
        assert prefill.attributes["conductor.instance"] == server.attributes["conductor.prefill.instance"]
        assert decode.attributes["conductor.instance"] == server.attributes["conductor.decode.instance"]
        assert {span.parent_id for span in collector.spans if span is not server} == {server.span_id}
        assert collector.paths[0] == "/v1/traces"
        assert TRACE in door.log.read_text()


@pytest.mark.extended
def test_requests_of_all_workers_are_traced(tmp_path: Path) -> None:
    """Each worker exports its own spans: one trace a request, whichever process answered, none lost at the end."""
    file = tmp_path / "conductor.yaml"
    requests = 24
    with otlp_collector() as collector:
        tracing = {"otlp_endpoint": collector.url, "service_name": "the-door"}
        file.write_text(yaml.safe_dump({"tracing": tracing}))
        arguments = ("--emulate", "1p1d", "--emulate-speed", "20", "--workers", "2", "--config", str(file))
        with front_door(tmp_path, *arguments) as door:
            body = {"model": "emulated-8b", "prompt": list(range(100, 900)), "max_tokens": 3}
            processes = set()
            for number in range(requests):
                headers = {"traceparent": f"00-{number + 1:032x}-{SPAN}-01"}
                with httpx.Client(base_url=door.url, timeout=60, trust_env=False) as client:
                    asked = {**body, "prompt": [*body["prompt"], number + 1]}
                    answer = client.post("/v1/completions", json=asked, headers=headers)
                assert answer.status_code == 200
                processes.add(answer.headers["x-request-id"].split("-")[0])
            assert len(processes) == 2
            exported = "conductor_spans_exported_total"
            wait_for(lambda: door.samples().get(exported, 0.0) == len(collector.spans) >= 4 * requests)
            # What is on its way when they are stopped gets there, too.
            last = {"traceparent": f"00-{requests + 1:032x}-{SPAN}-01"}
            assert door.http.post("/v1/completions", json=body, headers=last).status_code == 200
            assert door.stop() == 0, door.log.read_text()
    servers = collector.named("POST /v1/completions")
    assert sorted(int(span.trace_id, 16) for span in servers) == list(range(1, requests + 2))
    assert {span.attributes["conductor.request_id"].split("-")[0] for span in servers} == processes
    assert {span.resource["service.name"] for span in collector.spans} == {"the-door"}
    for server in servers:
        assert server.parent_id == SPAN
        steps = [span for span in collector.spans if span.parent_id == server.span_id]
        names = [span.name for span in sorted(steps, key=lambda span: span.start_s)]
        assert names in (["tokenize", "place", "prefill", "decode"], ["tokenize", "place", "engine"])
        assert {span.trace_id for span in steps} == {server.trace_id}
        [place] = [span for span in steps if span.name == "place"]
        assert place.attributes["conductor.placement.id"] == server.attributes["conductor.placement.id"]
    assert any(span.name == "prefill" for span in collector.spans)
