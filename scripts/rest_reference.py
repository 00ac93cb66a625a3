"""Writes docs/rest_reference.md from the OpenAPI schema of a running `conductor serve`.

python scripts/rest_reference.py            # starts one over an emulated engine
python scripts/rest_reference.py URL        # asks one that runs
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "rest_reference.md"
START_WITHIN_S = 120.0
METHODS = ("get", "put", "post", "patch", "delete")
HEAD = """# REST reference

Written by `python scripts/rest_reference.py` from the OpenAPI schema of `conductor serve` (`/openapi.json`, shown
under `/docs`); a test holds that it is current. [api.md](api.md) is the guide. Fields that are objects are shown
with a dot, entries of lists with `[]`. Every error looks alike: `{"error": {"message", "type", "param", "code"}}`.
"""


def reference(schema: dict[str, Any]) -> str:
    """The whole page."""
    parts: dict[str, list[str]] = {}
    for path, operations in schema["paths"].items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                tag = (operation.get("tags") or ["other"])[0]
                parts.setdefault(tag, []).append("\n".join(_operation(schema, method, path, operation)))
    chapters = [f"## {tag}\n\n" + "\n".join(texts) for tag, texts in parts.items()]
    return HEAD + "\n" + "\n".join(chapters).rstrip() + "\n"


def _operation(schema: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    told = [operation.get("summary", ""), " ".join(operation.get("description", "").split())]
    yield ". ".join(each.rstrip(".") for each in told if each) + ".\n"
    rows = [
        (
            f"`{each['name']}`",
            each["in"],
            _kind(schema, each.get("schema", {})),
            _needed(each.get("required", False), each.get("schema", {})),
            each.get("description", ""),
        )
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        rows += [
            (
                f"`{name}`",
                "body",
                _kind(schema, field),
                _needed(required, field),
                field.get("description", ""),
            )
            for name, field, required in _fields(schema, body)
        ]
    yield from _table(("name", "in", "type", "default", ""), rows)
    answers = [
        (code, _told(answer), _shape(schema, answer))
        for code, answer in operation.get("responses", {}).items()
    ]
    if any(told or shape for _, told, shape in answers):
        yield from _table(("status", "", "answer"), answers)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield "| " + " | ".join(head) + " |"
        yield "|" + "---|" * len(head)
        for row in rows:
            yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"
        yield ""


def _told(answer: dict[str, Any]) -> str:
    return "" if answer["description"] == "Successful Response" else answer["description"]


def _shape(schema: dict[str, Any], answer: dict[str, Any]) -> str:
    """Names of an answer's fields; of errors nothing, for all are alike."""
    contents = answer.get("content", {})
    body = contents.get("application/json", {}).get("schema")
    if body is None:
        return ", ".join(f"`{each}`" for each in contents)
    if body.get("$ref", "").endswith(("/ErrorAnswer", "/HTTPValidationError")):
        return "error"
    return ", ".join(f"`{name}`" for name, _, _ in _fields(schema, body))


def _fields(
    schema: dict[str, Any], body: dict[str, Any], prefix: str = "", above: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Of an object and of those within it: the path of each, its schema, and whether it is required."""
    resolved, names = _resolved(schema, body)
    if set(names) & set(above):
        return  # a shape within itself
    required = resolved.get("required", [])
    for name, field in resolved.get("properties", {}).items():
        inner, brackets = _inner(schema, field)
        if _resolved(schema, inner)[0].get("properties"):
            yield from _fields(schema, inner, f"{prefix}{name}{brackets}.", (*above, *names))
        else:
            yield prefix + name, field, name in required


def _inner(schema: dict[str, Any], field: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What a list, a mapping or something that may be null is about."""
    field = _resolved(schema, field)[0] if "$ref" not in field else field
    options = [each for each in field.get("anyOf", []) if each.get("type") != "null"]
    if len(options) == 1:
        return _inner(schema, options[0])
    if field.get("type") == "array":
        inner, brackets = _inner(schema, field.get("items", {}))
        return inner, "[]" + brackets
    if isinstance(field.get("additionalProperties"), dict):
        inner, brackets = _inner(schema, field["additionalProperties"])
        return inner, "{}" + brackets
    return field, ""


def _resolved(schema: dict[str, Any], part: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Without a reference, and the name that it had."""
    if "$ref" not in part:
        return part, ()
    name = part["$ref"].rpartition("/")[2]
    found = schema["components"]["schemas"][name]
    return found, (name,)


def _kind(schema: dict[str, Any], field: dict[str, Any]) -> str:
    field = _resolved(schema, field)[0]
    if "anyOf" in field:
        kinds = [_kind(schema, each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) or "any"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_kind(schema, field.get('items', {}))}"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    return ", ".join([field.get("type", "any"), *limits])


def _needed(required: bool, field: dict[str, Any]) -> str:
    if required:
        return "*required*"
    default = field.get("default")
    return "" if default in (None, [], {}, "") else f"`{json.dumps(default)}`"


def _asked(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as answer:
        schema: dict[str, Any] = json.load(answer)
        return schema


def _served() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "conductor.cli", "serve", "--emulate", "1", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                return _asked(f"http://127.0.0.1:{port}")
            except urllib.error.URLError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


if __name__ == "__main__":
    REFERENCE.write_text(reference(_asked(sys.argv[1]) if len(sys.argv) > 1 else _served()))
