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
from conductor.catalogue import (
    GPUS,
    INSTANCE_CLASSES,
    LLAMA_8B_H100,
    MODELS,
    SGLANG,
    Deployment,
    KvPrecision,
    WeightPrecision,
    derive_instance_class,
    read_instance_class,
    write_instance_class,
)
from conductor.costs import Codec, Speed


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


def test_a_codec_is_written_and_read_back(tmp_path: Path) -> None:
    encoded = Speed(1e9, 0.1, Codec(3.5, 5e9, 2e10))
    written = replace(LLAMA_8B_H100, tiers={**LLAMA_8B_H100.tiers, Tier.REMOTE: encoded})
    for suffix in ("yaml", "json"):
        write_instance_class(tmp_path / f"encoding.{suffix}", written)
        assert read_instance_class(tmp_path / f"encoding.{suffix}") == written


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


DERIVED = {"model": "qwen3-32b", "gpu": "h200"}
STEPS = [
    {
        "sequences": batch,
        "context_tokens": batch * context,
        "seconds": 0.01 + 1e-5 * batch + 2e-8 * batch * context,
    }
    for batch, context in ((1, 1000), (16, 1000), (16, 8000), (64, 2000))
]
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
        (
            {**EXTENDED, "tiers": {"remote": {"codec": {"ratio": 0.5}}}},
            r"'tiers.remote.codec.ratio': .*greater than or equal to 1, not 0.5",
        ),
        (
            {**EXTENDED, "tiers": {"remote": {"codec": {"ratio": 2}}}},
            "'tiers.remote.codec.encode_bytes_per_s' is",
        ),
        (
            {**EXTENDED, "tiers": {"remote": {"codec": {"decode_bytes": 2}}}},
            "unknown field 'tiers.remote.codec.decode_bytes'; did you mean 'decode_bytes_per_s'",
        ),
        (
            {**EXTENDED, "tiers": {"remote": {"codecs": {}}}},
            "unknown field 'tiers.remote.codecs'; did you mean 'codec'",
        ),
        ({**EXTENDED, "decode_base": 1.0}, "unknown field 'decode_base'; did you mean 'decode_base_s'"),
        (
            {**EXTENDED, "zzz": 1.0},
            "unknown field 'zzz'; known fields here: extends, derive, measured, name, prefill_s",
        ),
        ({"extends": "llama-3.1-8b-h100"}, "'name' is required"),
        ({"name": "ours"}, "'layers' is required: give it, or name a class .*extends"),
        ({"name": "ours", "extends": "llama-3.1-8b-h10"}, "'extends': .*did you mean 'llama-3.1-8b-h100'"),
        ({"name": "ours", "extends": ["a"]}, "'extends': .*string"),
        ({"name": "ours", "extends": "zzz"}, "'extends': unknown instance class; known: llama"),
        ({**EXTENDED, "derive": {"model": "qwen3-32b", "gpu": "h200"}}, "'extends' and 'derive' both"),
        (
            {"name": "ours", "derive": {"model": "qwen", "gpu": "h200"}},
            "'derive.model': unknown model; known: ",
        ),
        ({"name": "ours", "derive": {"model": "qwen3-32b"}}, "'derive.gpu' is required"),
        ({"name": "ours", "derive": {**DERIVED, "weights": "fp7"}}, "'derive.weights': .*'fp8'"),
        (
            {"name": "ours", "derive": {**DERIVED, "gpus": 2}},
            "unknown field 'derive.gpus'; did you mean 'gpu'",
        ),
        (
            {"name": "ours", "derive": {**DERIVED, "gpu": "l40s"}},
            "'derive': qwen3-32b in bf16 .* does not fit",
        ),
        ({**EXTENDED, "measured": {"decode": STEPS[:2]}}, "'measured.decode': .*at least 3"),
        (
            {**EXTENDED, "measured": {"decode": [{"sequences": 1}]}},
            "'measured.decode.0.context_tokens' is required",
        ),
        ({**EXTENDED, "measured": {"prefil": []}}, "unknown field 'measured.prefil'; did you mean 'prefill'"),
        (
            {
                **EXTENDED,
                "measured": {"prefill": 3 * [{"prompt_tokens": 9, "cached_tokens": 9, "seconds": 1}]},
            },
            "'measured.prefill.0': cached_tokens must be fewer",
        ),
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


def test_the_documented_profiles(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "catalogue.md").read_text()
    blocks = page.split("### Profile files")[1].split("\n## ")[0].split("```yaml\n")[1:]
    examples = [block.split("```")[0] for block in blocks]
    ours, derived, measured = (
        read_instance_class(_write(tmp_path / f"{number}.yaml", example))
        for number, example in enumerate(examples)
    )
    assert ours.name == "ours-8b-h100"
    assert ours.nic == Speed(bytes_per_s=12.5e9, latency_s=LLAMA_8B_H100.nic.latency_s)
    assert ours.layers == LLAMA_8B_H100.layers
    assert derived.layers == MODELS["qwen3-32b"].layers
    assert measured.decode_base_s == pytest.approx(0.0066, rel=0.05)


def test_a_class_derived_from_a_model_a_gpu_and_an_engine(tmp_path: Path) -> None:
    section = {**DERIVED, "tensor_parallel": 2, "weights": "fp8", "kv": "fp8", "engine": "sglang"}
    path = _write(tmp_path / "ours.yaml", {"name": "ours", "derive": section, "kv_capacity_tokens": 500_000})
    deployment = Deployment(
        MODELS["qwen3-32b"], GPUS["h200"], 2, WeightPrecision.FP8, KvPrecision.FP8, SGLANG
    )
    expected = derive_instance_class("ours", deployment)
    assert read_instance_class(path) == replace(expected, kv_capacity_tokens=500_000)


def test_measured_times_replace_constants(tmp_path: Path) -> None:
    prefills = [
        {
            "prompt_tokens": n,
            "cached_tokens": p,
            "seconds": 0.02 + 1e-4 * (n - p) + 1e-9 * (n * n - p * p) + 1e-6 * p,
        }
        for n, p in ((1000, 0), (8000, 0), (8000, 4000), (32_000, 0), (32_000, 30_000))
    ]
    path = _write(tmp_path / "ours.yaml", {**EXTENDED, "measured": {"prefill": prefills, "decode": STEPS}})
    ours = read_instance_class(path)
    assert ours.prefill_base_s == pytest.approx(0.02)
    assert ours.prefill_s_per_token == pytest.approx(1e-4)
    assert ours.prefill_s_per_token_squared == pytest.approx(1e-9)
    assert ours.prefill_s_per_cached_token == pytest.approx(1e-6)
    assert ours.decode_base_s == pytest.approx(0.01)
    assert ours.decode_s_per_sequence == pytest.approx(1e-5)
    assert ours.decode_s_per_context_token == pytest.approx(2e-8)
    assert ours.tiers == LLAMA_8B_H100.tiers
    decode_only = read_instance_class(_write(path, {**EXTENDED, "measured": {"decode": STEPS}}))
    assert decode_only.prefill_s_per_token == LLAMA_8B_H100.prefill_s_per_token
    assert decode_only.decode_base_s == ours.decode_base_s
