"""The front door's options in the configuration: what may be written, and what the router makes of it."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
import yaml
from prometheus_client import CollectorRegistry

from conductor.cli.front_door_options import cors_policy
from conductor.cli.tracing import start_tracing
from conductor.config import Config, load_config
from conductor.configuration_faults import ConfigError
from router import CorsPolicy


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "conductor.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("cors", "says"),
    [
        ({}, "'server.cors.origins' is required"),
        ({"origins": []}, "server.cors.origins"),
        ({"origins": ["chat.example.com"]}, "server.cors.origins.*like https://chat.example.com"),
        ({"origins": ["https://chat.example.com/"]}, "no path"),
        ({"origins": ["https://Chat.example.com"]}, "lower case"),
        ({"origins": ["https://*.example.com"]}, "must be"),
        ({"origins": ["*", "https://a.example"]}, "stands for every origin"),
        ({"origins": "*", "credentials": True}, "'server.cors'.*needs 'origins' to be listed"),
        ({"origins": "*", "methods": ["GET POST"]}, "server.cors.methods.0"),
        ({"origins": "*", "header": []}, "did you mean 'headers'"),
        ({"origins": "*", "max_age_s": -1}, "server.cors.max_age_s"),
    ],
)
def test_bad_cors_is_named(tmp_path: Path, cors: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(written(tmp_path, {"server": {"cors": cors}}))


def test_cors_as_the_router_takes_it(tmp_path: Path) -> None:
    assert cors_policy(load_config().server.cors) is None
    every = load_config(written(tmp_path, {"server": {"cors": {"origins": "*"}}}))
    assert cors_policy(every.server.cors) == CorsPolicy(None)
    some = {"origins": ["https://a.example", "http://localhost:3000"], "headers": "x-a", "credentials": True}
    listed = load_config(written(tmp_path, {"server": {"cors": some}}))
    assert cors_policy(listed.server.cors) == CorsPolicy(
        frozenset(("https://a.example", "http://localhost:3000")), headers=("x-a",), credentials=True
    )


@pytest.mark.parametrize(
    ("tracing", "says"),
    [
        ({"otlp_endpoint": "collector:4317"}, "tracing.otlp_endpoint.*like http://collector:4318"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio"),
        ({"ratio": 1}, "tracing.ratio"),
    ],
)
def test_bad_tracing_is_named(tmp_path: Path, tracing: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(written(tmp_path, {"tracing": tracing}))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
async def test_tracing_is_off(environment: dict[str, str]) -> None:
    async with AsyncExitStack() as stack:
        assert start_tracing(Config().tracing, environment, CollectorRegistry(), stack) is None


async def test_tracing_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = load_config(written(tmp_path, {"tracing": {"otlp_endpoint": "http://c:4318/"}}))
    async with AsyncExitStack() as stack:
        with pytest.raises(
            ConfigError, match=r"tracing.otlp_endpoint.*pip install 'kv-conductor\[tracing\]'"
        ):
            start_tracing(config.tracing, {}, CollectorRegistry(), stack)
        with structlog.testing.capture_logs() as lines:
            environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
            assert start_tracing(Config().tracing, environment, CollectorRegistry(), stack) is None
    assert "kv-conductor[tracing]" in lines[0]["event"]
