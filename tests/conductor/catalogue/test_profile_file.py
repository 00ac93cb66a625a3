"""Profile files: every class of the catalogue survives one, and mistakes are named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cache_index import Tier
from conductor.catalogue import INSTANCE_CLASSES, LLAMA_8B_H100, read_instance_class, write_instance_class
from conductor.costs import Speed


def _write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("name", ["llama-3.1-8b-h100", "llama3-70b-8xa800", "deepseek-v3-8xh200"])
def test_what_is_written_is_read_back(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"profile.{suffix}"
    write_instance_class(path, INSTANCE_CLASSES[name])
    assert read_instance_class(path) == INSTANCE_CLASSES[name]


@given(
    st.floats(1e-12, 1e3),
    st.floats(0, 1e3),
    st.dictionaries(st.sampled_from([Tier.HOST, Tier.DISK, Tier.POD, Tier.REMOTE]), st.floats(1.0, 1e13)),
)
def test_any_constants_survive(
    tmp_path_factory: pytest.TempPathFactory, slope: float, base: float, tiers: dict[Tier, float]
) -> None:
    written = replace(
        LLAMA_8B_H100,
        prefill_s_per_token=slope,
        prefill_base_s=base,
        tiers={tier: Speed(rate, base) for tier, rate in tiers.items()},
    )
    for suffix in ("yaml", "json"):
        path = tmp_path_factory.mktemp("profiles") / f"any.{suffix}"
        write_instance_class(path, written)
        assert read_instance_class(path) == written


def test_extending_a_class_gives_only_what_differs(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "ours.yaml",
        """
        name: ours
        extends: llama-3.1-8b-h100
        decode_base_s: 7e-3      # YAML takes a number without a point for text
        kv_capacity_tokens: 300000
        nic: {bytes_per_s: 12.5e+9}
        tiers:
          host: {latency_s: 0.0005}
        """,
    )
    host = LLAMA_8B_H100.tiers[Tier.HOST]
    assert read_instance_class(path) == replace(
        LLAMA_8B_H100,
        name="ours",
        decode_base_s=7e-3,
        kv_capacity_tokens=300_000,
        nic=replace(LLAMA_8B_H100.nic, bytes_per_s=12.5e9),
        tiers={**LLAMA_8B_H100.tiers, Tier.HOST: replace(host, latency_s=5e-4)},
    )


EXTENDED = {"name": "ours", "extends": "llama-3.1-8b-h100"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({**EXTENDED, "decode_base_s": 0}, "'decode_base_s': Input should be greater than 0, not 0"),
        ({**EXTENDED, "prefill_base_s": -1.0}, "'prefill_base_s': .*greater than or equal to 0, not -1"),
        ({**EXTENDED, "layers": 2.5}, "'layers': .*integer"),
        ({**EXTENDED, "prefill_s_per_token": float("inf")}, "'prefill_s_per_token': .*finite"),
        ({**EXTENDED, "nic": {"bytes_per_s": "fast"}}, "'nic.bytes_per_s': .*number.*'fast'"),
        ({**EXTENDED, "nic": 25e9}, "'nic': "),
        ({**EXTENDED, "tiers": {"tape": {"bytes_per_s": 1, "latency_s": 9}}}, "'tiers.tape': .*'host'"),
        (
            {**EXTENDED, "tiers": {"host": {"bytes": 1}}},
            "unknown field 'tiers.host.bytes'; did you mean 'bytes_per_s'",
        ),
        ({**EXTENDED, "decode_base": 1.0}, "unknown field 'decode_base'; did you mean 'decode_base_s'"),
        ({**EXTENDED, "zzz": 1.0}, "unknown field 'zzz'; known fields here: name, prefill_s_per_token"),
        ({"extends": "llama-3.1-8b-h100"}, "'name' is required"),
        ({"name": "ours"}, "'layers' is required: give it, or name a class .*extends"),
        ({"name": "ours", "extends": "llama-3.1-8b-h10"}, "'extends': .*did you mean 'llama-3.1-8b-h100'"),
        ({"name": "ours", "extends": ["a"]}, "'extends': unknown instance class .*known: "),
        (["name"], "must hold a mapping .*not list"),
        ("", "must hold a mapping .*not NoneType"),
        ("name: [", "is not valid YAML"),
    ],
)
def test_mistakes_are_named(content: Any, complaint: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "ours.yaml", content)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_instance_class(path)
    assert str(path) in str(caught.value)


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    path = _write(tmp_path / "ours.yaml", {**EXTENDED, "layers": 0, "chunk_tokens": "many"})
    with pytest.raises(ValueError, match=r"(?s)'layers'.*'chunk_tokens'"):
        read_instance_class(path)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the profile .*absent.yaml: No such file"):
        read_instance_class(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read the profile"):
        read_instance_class(binary)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(EXTENDED)[:-1])
    with pytest.raises(ValueError, match=r"broken.json is not valid JSON"):
        read_instance_class(broken)


def test_the_documented_profile(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "catalogue.md").read_text()
    example = page.split("### Profile files")[1].split("```yaml\n")[1].split("```")[0]
    ours = read_instance_class(_write(tmp_path / "ours.yaml", example))
    assert ours.name == "ours-8b-h100"
    assert ours.nic == Speed(bytes_per_s=12.5e9, latency_s=LLAMA_8B_H100.nic.latency_s)
    assert ours.layers == LLAMA_8B_H100.layers
