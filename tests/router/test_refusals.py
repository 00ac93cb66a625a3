"""Errors of placement and of instances as the client sees them."""

from __future__ import annotations

import pytest

from conductor.placement import (
    FailureKind,
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    RejectedError,
    TooLongError,
    UnknownModelError,
)
from router.refusals import given_up, misconfigured, not_placed

REFUSED = InstanceFailure("a", FailureKind.UNREACHABLE, "connection refused")
SILENT = InstanceFailure("b", FailureKind.TIMEOUT, "no answer within 300 s")


def _served(count: int) -> list[ModelCard]:
    return [ModelCard(f"m{number:02}", None, 1) for number in reversed(range(count))]


@pytest.mark.parametrize(
    ("count", "listed"),
    [(0, "models: none."), (2, "models: m00, m01."), (22, "m18, m19, and 2 more.")],
)
def test_an_unknown_model_is_told_which_are_served(count: int, listed: str) -> None:
    error = not_placed(UnknownModelError("?"), "x", lambda: _served(count), [])
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert error.message.startswith("The model 'x' is not served here.")
    assert error.message.endswith(listed)


@pytest.mark.parametrize(("wait_s", "retry_after_s"), [(0.0, 1), (1.0, 1), (1.2, 2)])
def test_who_was_not_admitted_is_told_when_to_come_back(wait_s: float, retry_after_s: int) -> None:
    error = not_placed(RejectedError("too busy", "decode", wait_s), "m", lambda: [], [REFUSED])
    assert (error.status, error.kind, error.code) == (429, "rate_limit_error", "overloaded_decode")
    assert (error.message, error.retry_after_s) == ("The request was not admitted: too busy", retry_after_s)


def test_where_nobody_is_left_what_was_tried_is_told() -> None:
    none = NoInstanceError("none is up")
    first = not_placed(none, "m", lambda: [], [])
    assert (first.status, first.message) == (503, "No instance can take the request now: none is up")
    later = not_placed(none, "m", lambda: [], [REFUSED, SILENT])
    assert later.message.endswith("Tried 2: a: connection refused; b: no answer within 300 s")


def test_what_will_never_fit_is_not_to_be_tried_again() -> None:
    error = not_placed(TooLongError("it has 9 tokens"), "m", lambda: [], [])
    assert (error.status, error.code, error.retry_after_s) == (400, "context_length_exceeded", None)
    assert error.message == "The request is too long: it has 9 tokens. Send a shorter prompt."


def test_the_last_failure_names_the_kind() -> None:
    assert (given_up([REFUSED, SILENT]).status, given_up([REFUSED, SILENT]).code) == (504, "engine_timeout")
    assert (given_up([SILENT, REFUSED]).status, given_up([SILENT, REFUSED]).code) == (502, "engine_failed")
    assert "Tried 1: a: connection refused" in given_up([REFUSED]).message


def test_a_wrong_configuration_names_the_instance() -> None:
    error = misconfigured("p0", "unknown hand-off protocol 'x'")
    assert (error.status, error.code) == (500, "configuration_error")
    assert error.message == "Instance 'p0' is misconfigured: unknown hand-off protocol 'x'."
