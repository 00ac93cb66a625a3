"""Keys in the configuration: what may be written, and that nothing of it is shown."""

import hashlib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from conductor.cli import app
from conductor.cli.access import make_key_ring, make_rest_ring
from conductor.config import Config, load_config
from conductor.configuration_faults import ConfigError
from router import RequestError

SECRET = "sk-very-secret"


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "conductor.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([{"name": "a"}], "exactly one of key, key_env and key_sha256"),
        ([{"name": "a", "key": "x", "key_env": "Y"}], "exactly one of"),
        ([{"name": "a", "key": "two words"}], "api_keys.0.key.*printable ASCII"),
        ([{"name": "a", "key_sha256": "abc"}], "api_keys.0.key_sha256.*64 hexadecimal"),
        ([{"name": "a b", "key": "x"}], "api_keys.0.name"),
        ([{"name": "a", "key": "x"}, {"name": "a", "key": "y"}], "'a' is used more than once"),
        ([{"name": "a", "key": "x", "limits": {"requests_per_minute": 0}}], "requests_per_minute"),
        (
            [{"name": "a", "key": "x", "limits": {"request_per_minute": 9}}],
            "did you mean 'requests_per_minute'",
        ),
        ([{"name": "a", "key": "x", "models": []}], "api_keys.0.models"),
        ([{"name": "a", "key": "x", "priority": 9}], "api_keys.0.priority"),
    ],
)
def test_bad_keys_are_named(tmp_path: Path, keys: list[dict[str, object]], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        load_config(written(tmp_path, {"api_keys": keys}))
    assert "two words" not in str(raised.value)


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another").hexdigest()
    path = written(
        tmp_path,
        {
            "api_keys": [{"name": "a", "key": SECRET}, {"name": "b", "key_sha256": digest}],
            "instances": [{"id": "e", "url": "http://e:1", "api_key": SECRET}],
        },
    )
    shown = CliRunner().invoke(app, ["config", "--config", str(path)]).output
    assert "name: a" in shown
    config = load_config(path)
    for text in (shown, repr(config), str(config), repr(make_key_ring(config, {}))):
        assert SECRET not in text and digest not in text


def test_keys_come_from_the_file_the_environment_or_a_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"third").hexdigest()
    keys = [
        {"name": "a", "key": "first"},
        {"name": "b", "key_env": "B_KEY", "tenant": "t", "models": ["m"]},
        {"name": "c", "key_sha256": digest.upper(), "limits": {"concurrency": 3}},
    ]
    config = load_config(
        written(tmp_path, {"api_keys": keys, "models": [{"name": "m", "aliases": ["n"]}, {"name": "o"}]})
    )
    ring = make_key_ring(config, {"B_KEY": "second"})
    assert ring is not None
    found = {key: ring.identify([(b"x-api-key", key)])[0] for key in (b"first", b"second", b"third")}
    assert [(key.name, key.tenant) for key in found.values()] == [("a", "a"), ("b", "t"), ("c", "c")]
    assert found[b"second"].models == {"m", "n"}
    assert found[b"third"].limits.concurrency == 3
    with pytest.raises(RequestError):
        ring.identify([(b"x-api-key", b"fourth")])
    assert set(ring.tenants) == {"a", "t", "c"}


@pytest.mark.parametrize(("environment", "says"), [({}, "not set"), ({"B_KEY": "a b"}, "without spaces")])
def test_a_missing_variable_is_named(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    config = load_config(written(tmp_path, {"api_keys": [{"name": "b", "key_env": "B_KEY"}]}))
    with pytest.raises(ConfigError, match=f"'B_KEY', which is .*{says}"):
        make_key_ring(config, environment)


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    keys = [{"name": "a", "key": "x"}, {"name": "b", "key": "x"}]
    with pytest.raises(ConfigError, match="'a' and 'b' are the same"):
        make_key_ring(load_config(written(tmp_path, {"api_keys": keys})), {})


def test_without_keys_there_is_no_ring() -> None:
    assert make_key_ring(Config(), {}) is None


def test_the_admin_token(tmp_path: Path) -> None:
    token = "admin-token-1"
    path = written(tmp_path, {"server": {"admin_token": token}, "api_keys": [{"name": "a", "key": SECRET}]})
    config = load_config(path)
    rest, keys = make_rest_ring(config, {}), make_key_ring(config, {})
    assert rest is not None and keys is not None
    assert rest.identify([(b"x-api-key", token.encode())])[0].admin
    assert not rest.identify([(b"x-api-key", SECRET.encode())])[0].admin
    with pytest.raises(RequestError):
        keys.identify([(b"x-api-key", token.encode())])
    for text in (CliRunner().invoke(app, ["config", "--config", str(path)]).output, repr(config), repr(rest)):
        assert token not in text
    assert make_rest_ring(Config(), {}) is None
    for bad in ("two words", ""):
        with pytest.raises(ConfigError, match=r"'server.admin_token'.*printable ASCII"):
            load_config(written(tmp_path, {"server": {"admin_token": bad}}))


@pytest.mark.parametrize(
    "content",
    [
        f"server: {{admin_token: {SECRET}: [",
        f"server:\n  admin_token: {SECRET}\n bad",
        f"api_keys: [{{name: a, key: [{SECRET}]}}]",
        f"api_keys: [{{name: a, key: '{SECRET} with spaces'}}]",
        f"api_keys: [{{name: a, key_sha256: {SECRET}}}]",
        f"instances: [{{id: a, url: 'http://h:1', api_key: {{k: {SECRET}}}}}]",
        f"server: {{admin_token: [{SECRET}]}}",
    ],
)
def test_what_is_wrong_is_told_without_the_secret(tmp_path: Path, content: str) -> None:
    path = tmp_path / "conductor.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert SECRET not in str(error.value) and str(path) in str(error.value)
