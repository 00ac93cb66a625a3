"""`conductor serve` with a collector: the trace of a request handed from one instance to another."""

from pathlib import Path

import openai
import pytest
import yaml
from front_door_process import front_door
from otlp_collector import otlp_collector

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
