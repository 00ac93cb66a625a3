"""The front door's options in the configuration: what may be written, and what the router makes of it."""

from pathlib import Path

import pytest
import yaml

from conductor.cli.front_door_options import cors_policy
from conductor.config import ConfigError, load_config
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
