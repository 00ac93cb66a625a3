"""Instance classes from profile files: what was measured of one's own engines, in YAML or JSON.

A profile gives the fields of `InstanceClass` by their names. With ``extends`` it starts from a class of the
catalogue and gives only what differs; nested fields (``nic``, one of the ``tiers``) are merged too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cache_index import Tier
from conductor.catalogue.instance_classes import INSTANCE_CLASSES
from conductor.costs import InstanceClass, Speed

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0)]
_TierName = Literal["host", "disk", "pod", "remote"]

_REMEDY: Final = "give it, or name a class of the catalogue to start from, as in extends: llama-3.1-8b-h100"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Speed(_Section):
    bytes_per_s: _Positive
    latency_s: _NotNegative


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
    tiers: dict[_TierName, _Speed] = {}


def read_instance_class(path: Path) -> InstanceClass:
    """The instance class that the profile file ``path`` describes.

    Raises ValueError naming the file, the field and the remedy.
    """
    given = _read_mapping(path)
    started_from: dict[str, Any] = {}
    if "extends" in given:
        started_from = _content(_catalogued(path, given.pop("extends")))
        del started_from["name"]  # what is learned online is kept by name: another class needs another
    try:
        profile = _Profile.model_validate(_merged(started_from, given))
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in _explain(error))) from None
    constants = profile.model_dump(exclude={"nic", "tiers"})
    return InstanceClass(
        **constants,
        nic=_speed(profile.nic),
        tiers={tier: _speed(profile.tiers[name]) for tier, name in _TIERS.items() if name in profile.tiers},
    )


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


def _speed(section: _Speed) -> Speed:
    return Speed(bytes_per_s=section.bytes_per_s, latency_s=section.latency_s)


def _content(instance_class: InstanceClass) -> dict[str, Any]:
    content = asdict(instance_class)
    content["tiers"] = {_TIERS[tier]: speed for tier, speed in content["tiers"].items()}
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
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a mapping of the fields of an instance class, "
            f"not {type(content).__name__}; {_REMEDY}"
        )
    return content


def _catalogued(path: Path, name: object) -> InstanceClass:
    if not isinstance(name, str) or name not in INSTANCE_CLASSES:
        close = difflib.get_close_matches(str(name), INSTANCE_CLASSES, n=1)
        known = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(INSTANCE_CLASSES)}"
        raise ValueError(f"{path}: 'extends': unknown instance class {name!r}; {known}")
    return INSTANCE_CLASSES[name]


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        match problem["type"]:
            case "extra_forbidden":
                known = list((_Profile if len(problem["loc"]) == 1 else _Speed).model_fields)
                close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known fields here: {', '.join(known)}"
                lines.append(f"unknown field {field!r}; {hint}")
            case "missing":
                lines.append(f"{field!r} is required: {'name the class' if field == 'name' else _REMEDY}")
            case _:
                lines.append(f"{field!r}: {problem['msg']}, not {problem['input']!r}")
    return lines
