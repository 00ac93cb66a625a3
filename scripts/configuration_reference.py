"""Writes docs/configuration_reference.md: every key of the configuration, as its models have it.

    python scripts/configuration_reference.py

Types, defaults, limits and units come from the models. A key's meaning is its row in docs/configuration.md, the
guide that is written by hand, or else its field's description.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel, SecretStr  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

from conductor.config import Config  # noqa: E402

GUIDE = ROOT / "docs" / "configuration.md"
REFERENCE = ROOT / "docs" / "configuration_reference.md"
LEAVES = ("kv_events", "instance")  # explained as a whole
UNITS = {  # by the end of a name
    "bytes_per_s": "bytes/s",
    "_s_per_token_squared": "s/token²",
    "_s_per_token": "s/token",
    "_s_per_cached_token": "s/token",
    "_s_per_sequence": "s",
    "_s_per_context_token": "s/token",
    "_bytes_per_token": "bytes/token",
    "_per_minute": "1/min",
    "_blocks": "blocks",
    "_tokens": "tokens",
    "bytes": "bytes",
    "_s": "s",
}
LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "min_length": "length ≥", "max_length": "length ≤"}
HEAD = """# Configuration reference

Written by `python scripts/configuration_reference.py` from the models of `conductor/config.py`; a test holds that
it is current. [configuration.md](configuration.md) is the guide: precedence, TLS, hand-off protocols, errors.

A key `a.b` is `a: {b: ...}` in the file and `CONDUCTOR_A__B` in the environment; lists and mappings are given there
as JSON. `[]` is each entry of a list, `{}` each entry of a mapping. *Required* is within its entry or section.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """``section`` is the first part of its name."""

    name: str
    kind: str
    default: str
    unit: str
    meaning: str

    @property
    def section(self) -> str:
        return re.split(r"[.\[{]", self.name)[0]


def keys(guide: dict[str, str], section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """In the order of the models; ``guide`` has meanings by key."""
    for name, field in section.model_fields.items():
        nested, brackets = nested_model(field.annotation)
        if nested is not None and name not in LEAVES:
            yield from keys(guide, nested, f"{prefix}{name}{brackets}.")
            continue
        key = prefix + name
        meaning = guide.get(key.replace("{}", "")) or field.description or ""
        yield Key(key, kind_of(field), default_of(field), unit_of(name), meaning)


def nested_model(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model that an annotation is about, and the brackets that its key takes."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    brackets = {list: "[]", dict: "{}"}.get(get_origin(annotation), "")
    for each in get_args(annotation):
        found, inner = nested_model(each)
        if found is not None:
            return found, brackets + inner
    return None, ""


def kind_of(field: FieldInfo) -> str:
    """The type in words of YAML, with its limits."""
    return ", ".join([words_of(field.annotation), *limits_of(field.metadata)])


def limits_of(metadata: Iterable[Any]) -> list[str]:
    return [
        f"{sign} {getattr(limit, name):,}".replace(",", " ")
        for limit in metadata
        for name, sign in LIMITS.items()
        if getattr(limit, name, None) is not None
    ]


def words_of(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        about = [limit for each in arguments[1:] for limit in getattr(each, "metadata", [each])]
        return ", ".join([words_of(arguments[0]), *limits_of(about)])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words_of(each) for each in arguments if each is not type(None)))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is list:
        return f"list of {words_of(arguments[0])}"
    if origin is dict:
        return f"mapping to {words_of(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{each.value}`" for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    named = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return {**named, SecretStr: "secret", Any: "any"}.get(annotation, getattr(annotation, "__name__", "any"))


def default_of(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "*required*"
    if default is None or default == [] or default == {} or default == "" or isinstance(default, BaseModel):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"`{default.value if isinstance(default, enum.Enum) else default}`"


def unit_of(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def meanings(guide: str) -> dict[str, str]:
    """The last cell of every row of the guide's tables, by the key in the first; its own anchors become links."""
    found = {}
    for row in re.findall(r"^\| `([^`]+)` \|.*?\| (.*) \|$", guide, re.MULTILINE):
        found[row[0]] = row[1].rsplit(" | ", 1)[-1].replace("](#", "](configuration.md#")
    return found


def reference() -> str:
    """The whole page."""
    lines = [HEAD]
    last = ""
    for key in keys(meanings(GUIDE.read_text())):
        if key.section != last:
            last = key.section
            lines += [f"## {last}\n", "| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
        cells = (f"`{key.name}`", key.kind, key.default, key.unit, key.meaning)
        lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    text = "\n".join(lines)
    return re.sub(r"\|\n\n(?=\|)", "|\n", text).rstrip() + "\n"


if __name__ == "__main__":
    REFERENCE.write_text(reference())
