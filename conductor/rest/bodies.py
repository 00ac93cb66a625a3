"""Request bodies: parsed whatever their content type says, and documented as FastAPI would have."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from conductor.configuration_faults import suggestion

Body = TypeVar("Body", bound=BaseModel)


def parsed(kind: type[Body], body: bytes) -> Body:
    """Parsed and checked in one pass: prompts are long, and parsing them is most of an answer's time.

    Raises RequestValidationError, which names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    raise RequestValidationError([_problem(kind, each["loc"], each) for each in problems])


def _problem(kind: type[BaseModel], loc: tuple[int | str, ...], found: Any) -> dict[str, Any]:
    """What is wrong between fields is said of one of them, whose name begins the message."""
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        message = f"is unknown{suggestion(loc, kind)}"
    field, colon, rest = message.partition(": ")
    if not loc and colon and field in kind.model_fields:
        loc, message = (field,), rest
    return {**found, "loc": ("body", *loc), "msg": message}


def invalid(field: str, message: str) -> RequestValidationError:
    """A field that is wrong for a reason that its type does not tell."""
    return RequestValidationError([{"type": "value_error", "loc": ("body", field), "msg": message}])


def documented_body(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that parses its body itself."""
    schema = kind.model_json_schema(by_alias=False)
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Without references, for these definitions are in no list of components."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        found = definitions[schema["$ref"].rpartition("/")[2]]
        others = {name: value for name, value in schema.items() if name != "$ref"}
        return _inlined({**found, **others}, definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items()}
