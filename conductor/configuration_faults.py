"""What is wrong with a file that people write, said so that they can mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError


class ConfigError(Exception):
    """The configuration cannot be used; the message names the key and the remedy."""


def read_yaml(text: str) -> Any:
    """Raises yaml.YAMLError, which the library does not for every text that is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("lists and mappings lie too deeply in each other") from None
    except Exception:  # whatever making a date, a number or a truth value of it raised
        raise yaml.YAMLError(
            "a value cannot be read as what it looks like, such as a date in a 13th month; put it in quotes"
        ) from None


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each problem, with the path of its key; unknown keys come with the one that may be meant."""
    return [text for _, text in explain_each(error, model)]


def explain_each(error: ValidationError, model: type[BaseModel]) -> list[tuple[tuple[int | str, ...], str]]:
    """As `explain`, each problem with the place of its key."""
    found = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            text = f"unknown key {key!r}{suggestion(problem['loc'], model)}"
        elif problem["type"] == "missing":
            text = f"{key!r} is required"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            text = f"{key!r}: {message}" if key else message
        found.append((problem["loc"], text))
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def suggestion(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """For an unknown key: the one that may be meant, or all that are known beside it."""
    section: type[BaseModel] = model
    for part in location[:-1]:
        field = section.model_fields.get(str(part))
        if field is not None:
            section = _model_in(field.annotation) or section
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys here: {', '.join(known)}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation such as ``list[Model] | None`` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)
