"""One configuration model: precedence, and errors that name key and remedy."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from conductor.config import Config, load_config
from conductor.configuration_faults import ConfigError
from conductor.instance_config import InstanceConfig
from conductor.membership import instance_of
from conductor.placement import Role

EXAMPLE = """
server:
  port: 9000
scheduling:
  policy: round_robin
models:
  - name: llama
    aliases: [gpt-4]
instances:
  - id: p0
    url: http://10.0.0.1:8000/
    role: prefill
  - {id: d0, url: "http://10.0.0.2:8000", role: decode, block_size: 32}
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, EXAMPLE))
    assert config.server.port == 9000
    assert config.scheduling.policy == "round_robin"
    assert [i.role for i in config.instances] == [Role.PREFILL, Role.DECODE]
    assert config.instances[0].url == "http://10.0.0.1:8000"
    assert config.instances[1].block_size == 32


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path, EXAMPLE)
    assert load_config().server.port == 8000
    monkeypatch.setenv("CONDUCTOR_SERVER__PORT", "9001")
    config = load_config(path)
    assert config.server.port == 9001
    assert config.scheduling.policy == "round_robin", "other keys of the file stay"
    assert load_config(path, {"server": {"port": 9002}}).server.port == 9002


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {prot: 1}", "unknown key 'server.prot'; did you mean 'port'"),
        ("serving: {}", "unknown key 'serving'; did you mean 'server'"),
        ("zzz: 1", "known keys here: server, routing"),
        ("instances: [{id: a}]", "'instances.0.url' is required"),
        ("instances: [{id: a, url: 'http://x:1', rol: mixed}]", "'instances.0.rol'; did you mean 'role'"),
        ("instances: [{id: a, url: 'ftp://x'}]", "must look like http://host:port or https://host:port"),
        ("instances: [{id: a, url: 'http://x'}, {id: a, url: 'http://y'}]", "'a' is used more than once"),
        ("scheduling: {policy: best}", "unknown policy 'best'; known: slo"),
        ("instances: [{id: a, url: 'http://x', instance_class: b}]", "known: llama-3.1-8b-h100"),
        (
            "instances: [{id: a, url: 'http://x', ranks: 2, kv_events: [{endpoint: 'tcp://x:1'}]}]",
            "give one a rank",
        ),
        ("instances: [{id: a, url: 'http://x'}]\nshared_pools: [{id: a}]", "the id 'a' is taken"),
        ("shared_pools: [{id: a, members: []}]", "'shared_pools.0.members'"),
        ("shared_pools: [{id: a, bytes_per_s: 0}]", "'shared_pools.0.bytes_per_s'"),
        (
            "shared_pools: [{id: a, mooncake: {endpoint: 'tcp://x:1', modle: m}}]",
            "'shared_pools.0.mooncake.modle'; did you mean 'model'",
        ),
        ("server: {port: 70000}", "'server.port'"),
        ("emulation: {cluster: 2p}", "'2p' is no cluster shape"),
        ("emulation: {cluster: 600p401d}", "'600p401d' are too many: each emulated engine is a process"),
        ("emulation: {cluster: 4p4d, base_port: 65505}", "last would be 65536; begin lower"),
        ("- a", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("instances: [{id: 2026-13-01}]", "put it in quotes"),
        ("a: " + "[" * 5_000, "too deeply"),
    ],
)
def test_errors_name_file_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\x91instances")
    with pytest.raises(ConfigError, match=r"cannot read .*cluster\.yaml: it is no text in UTF-8"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def _keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        nested = [
            a
            for a in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if hasattr(a, "model_fields")
        ]
        is_list = str(field.annotation).startswith("list")
        if nested and name not in ("kv_events", "instance"):
            keys += _keys(nested[0], f"{prefix}{name}{'[]' if is_list else ''}.")
        else:
            keys.append(prefix + name)
    return keys


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    missing = [key for key in _keys(Config) if f"`{key}`" not in text]
    assert not missing


def test_the_bootstrap_port_of_an_instance_is_known_where_it_is_placed() -> None:
    config = InstanceConfig.model_validate({"id": "a", "url": "http://x:1", "bootstrap_port": 5801})
    assert instance_of(config).ranks[0].target.bootstrap_port == 5801
