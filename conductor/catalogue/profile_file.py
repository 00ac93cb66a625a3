"""Instance classes from profile files: what was measured of one's own engines, in YAML or JSON.

A profile gives the fields of `InstanceClass` by their names. With ``extends`` it starts from a class of the
catalogue, with ``derive`` from what the roofline says of a model, GPUs and an engine, and gives only what differs;
nested fields (``nic``, one of the ``tiers``) are merged too. Times under ``measured`` replace the constants of
prefill and of decode by those that fit them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cache_index import Tier
from conductor.catalogue.attention import KvPrecision
from conductor.catalogue.derivation import derive_instance_class
from conductor.catalogue.engines import ENGINES, VLLM
from conductor.catalogue.gpus import GPUS
from conductor.catalogue.instance_classes import INSTANCE_CLASSES
from conductor.catalogue.measured_times import PrefillTime, StepTime, with_measured_times
from conductor.catalogue.models import MODELS, WeightPrecision
from conductor.catalogue.roofline import Deployment
from conductor.codec_config import CodecConfig
from conductor.configuration_faults import read_yaml
from conductor.costs import InstanceClass, Speed

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0)]
_TierName = Literal["host", "disk", "pod", "remote"]


_REMEDY: Final = "give it, or name a class of the catalogue to start from, as in extends: llama-3.1-8b-h100"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Derive(_Section):
    """A `Deployment` by the catalogue's names."""

    model: str
    gpu: str
    tensor_parallel: _Count = 1
    weights: WeightPrecision = WeightPrecision.BF16
    kv: KvPrecision = KvPrecision.BF16
    engine: str = VLLM.name

    @field_validator("model", "gpu", "engine")
    @classmethod
    def _catalogued(cls, name: str, field: ValidationInfo) -> str:
        known = {"model": tuple(MODELS), "gpu": tuple(GPUS), "engine": tuple(ENGINES)}[str(field.field_name)]
        if name not in known:
            raise ValueError(f"unknown {field.field_name}; known: {', '.join(known)}")
        return name


class _Prefill(_Section):
    prompt_tokens: _Count
    cached_tokens: Annotated[int, Field(ge=0)] = 0
    seconds: _Positive

    @model_validator(mode="after")
    def _cached_part(self) -> _Prefill:
        if self.cached_tokens >= self.prompt_tokens:
            raise ValueError("cached_tokens must be fewer than prompt_tokens")
        return self


class _Step(_Section):
    sequences: _Count
    context_tokens: _Count
    seconds: _Positive


class _Measured(_Section):
    """Times to fit constants to; three or more of a kind."""

    prefill: Annotated[list[_Prefill], Field(min_length=3)] | None = None
    decode: Annotated[list[_Step], Field(min_length=3)] | None = None


class _Start(_Section):
    """What a profile starts from, and what is fitted; at most one of ``extends`` and ``derive``."""

    extends: str | None = None
    derive: _Derive | None = None
    measured: _Measured = _Measured()

    @field_validator("extends")
    @classmethod
    def _known_class(cls, name: str) -> str:
        if name not in INSTANCE_CLASSES:
            close = difflib.get_close_matches(name, INSTANCE_CLASSES, n=1)
            known = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(INSTANCE_CLASSES)}"
            raise ValueError(f"unknown instance class; {known}")
        return name

    @model_validator(mode="after")
    def _one_start(self) -> _Start:
        if self.extends is not None and self.derive is not None:
            raise ValueError("'extends' and 'derive' both say what to start from; give one of them")
        return self


class _Speed(_Section):
    bytes_per_s: _Positive
    latency_s: _NotNegative

    def speed(self) -> Speed:
        return Speed(self.bytes_per_s, self.latency_s)


class _TierSpeed(_Speed):
    codec: CodecConfig | None = None

    def speed(self) -> Speed:
        return Speed(self.bytes_per_s, self.latency_s, None if self.codec is None else self.codec.codec())


class _Profile(_Section):
    """The fields of `InstanceClass`, which says what they mean."""

    name: Annotated[str, Field(min_length=1)]
    prefill_s_per_token: _Positive
    prefill_s_per_token_squared: _NotNegative
    prefill_base_s: _NotNegative
    prefill_s_per_cached_token: _NotNegative
    decode_base_s: _Positive
    decode_s_per_sequence: _NotNegative
    decode_s_per_context_token: _NotNegative
    kv_bytes_per_token: _Positive
    layers: _Count
    chunk_tokens: _Count
    kv_capacity_tokens: _Count
    nic: _Speed
    tiers: dict[_TierName, _TierSpeed] = {}


def read_instance_class(path: Path) -> InstanceClass:
    """The instance class that the profile file ``path`` describes.

    Raises ValueError naming the file, the field and the remedy.
    """
    given = _read_mapping(path)
    try:
        start = _Start.model_validate({key: given.pop(key) for key in _Start.model_fields if key in given})
        profile = _Profile.model_validate(_merged(_started_from(path, start), given))
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in _explain(error))) from None
    constants = profile.model_dump(exclude={"nic", "tiers"})
    read = InstanceClass(
        **constants,
        nic=profile.nic.speed(),
        tiers={tier: profile.tiers[name].speed() for tier, name in _TIERS.items() if name in profile.tiers},
    )
    return with_measured_times(
        read,
        [PrefillTime(**time.model_dump()) for time in start.measured.prefill or ()],
        [StepTime(**time.model_dump()) for time in start.measured.decode or ()],
    )


def _started_from(path: Path, start: _Start) -> dict[str, Any]:
    if start.extends is not None:
        content = _content(INSTANCE_CLASSES[start.extends])
    elif start.derive is not None:
        given = start.derive
        deployment = Deployment(
            MODELS[given.model],
            GPUS[given.gpu],
            given.tensor_parallel,
            given.weights,
            given.kv,
            ENGINES[given.engine],
        )
        try:
            content = _content(derive_instance_class("derived", deployment))
        except ValueError as error:  # the weights do not fit
            raise ValueError(f"{path}: 'derive': {error}") from None
    else:
        return {}
    del content["name"]  # what is learned online is kept by name: another class needs another
    return content


def write_instance_class(path: Path, instance_class: InstanceClass) -> None:
    """Write all fields to ``path``, as JSON if its name ends so, else as YAML; `read_instance_class` reads it.

    Raises OSError when the file cannot be written.
    """
    content = _content(instance_class)
    as_json = path.suffix == ".json"
    path.write_text(
        json.dumps(content, indent=2) + "\n" if as_json else yaml.safe_dump(content, sort_keys=False)
    )


_TIERS: Final[dict[Tier, _TierName]] = {
    Tier.HOST: "host",
    Tier.DISK: "disk",
    Tier.POD: "pod",
    Tier.REMOTE: "remote",
}


def _content(instance_class: InstanceClass) -> dict[str, Any]:
    content = asdict(instance_class)
    content["tiers"] = {_TIERS[tier]: speed for tier, speed in content["tiers"].items()}
    for speed in (content["nic"], *content["tiers"].values()):
        if speed["codec"] is None:
            del speed["codec"]
    return content


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both_nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_nested else value
    return merged


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"cannot read the profile {path}: {reason}") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a mapping of the fields of an instance class, "
            f"not {type(content).__name__}; {_REMEDY}"
        )
    return content


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        match problem["type"]:
            case "extra_forbidden":
                known = _known_fields(problem["loc"])
                close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known fields here: {', '.join(known)}"
                lines.append(f"unknown field {field!r}; {hint}")
            case "missing":
                remedy = {"name": ": name the class"}.get(field, f": {_REMEDY}" if "." not in field else "")
                lines.append(f"{field!r} is required{remedy}")
            case "value_error":
                said = problem["msg"].removeprefix("Value error, ")
                lines.append(f"{field!r}: {said}" if field else said)
            case _:
                lines.append(f"{field!r}: {problem['msg']}, not {problem['input']!r}")
    return lines


def _known_fields(location: tuple[int | str, ...]) -> list[str]:
    """Of the section in which the last part of ``location`` stands."""
    if len(location) == 1:
        return [*_Start.model_fields, *_Profile.model_fields]
    sections: dict[str, type[BaseModel]] = {
        "derive": _Derive,
        "prefill": _Prefill,
        "decode": _Step,
        "measured": _Measured,
        "codec": CodecConfig,
        "tiers": _TierSpeed,
    }
    return list(
        next((sections[str(p)] for p in reversed(location[:-1]) if p in sections), _Speed).model_fields
    )
