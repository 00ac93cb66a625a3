"""What a client is told whose request no instance answered, in OpenAI's error shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from conductor.placement import (
    FailureKind,
    InstanceFailure,
    ModelCard,
    PlacementError,
    RejectedError,
    TooLongError,
    UnknownModelError,
)
from router.errors import RequestError

_LISTED_MODELS = 20


class AnsweredError(PlacementError):
    """There is no placement, and what the client is told has been decided elsewhere."""

    def __init__(self, answer: RequestError) -> None:
        super().__init__(answer.message)
        self.answer = answer


def not_placed(
    error: PlacementError,
    model: str,
    served: Callable[[], Sequence[ModelCard]],
    tried: Sequence[InstanceFailure],
) -> RequestError:
    """There is no placement; ``tried`` are the attempts before it. An unknown model is told what is ``served``."""
    if isinstance(error, AnsweredError):
        return error.answer
    if isinstance(error, UnknownModelError):
        listed = _listed([card.model for card in served()])
        message = f"The model {model!r} is not served here. Served models: {listed}."
        return RequestError(404, message, param="model", code="model_not_found")
    if isinstance(error, RejectedError):
        return RequestError(
            429,
            f"The request was not admitted: {error}",
            kind="rate_limit_error",
            code=f"overloaded_{error.stage}",
            retry_after_s=max(math.ceil(error.retry_after_s), 1),
        )
    if isinstance(error, TooLongError):
        message = f"The request is too long: {error}. Send a shorter prompt."
        return RequestError(400, message, code="context_length_exceeded")
    message = f"No instance can take the request now: {error}"
    if tried:
        message = f"{message}. {_what_was_tried(tried)}"
    return RequestError(
        503, message, kind="service_unavailable", code="no_instance_available", retry_after_s=1
    )


def model_not_named(models: Sequence[str]) -> RequestError:
    """A request that need not name its model, where not exactly one is served."""
    if models:
        return RequestError(400, f"'model' is missing. Served models: {_listed(models)}.", param="model")
    message = "No instance is up yet, so no model is served. Try again shortly."
    return RequestError(
        503, message, kind="service_unavailable", code="no_instance_available", retry_after_s=1
    )


def given_up(tried: Sequence[InstanceFailure]) -> RequestError:
    """No attempts are left; the last one decides what kind of error it is."""
    if tried[-1].kind is FailureKind.TIMEOUT:
        status, kind, code = 504, "timeout_error", "engine_timeout"
    else:
        status, kind, code = 502, "upstream_error", "engine_failed"
    message = f"The request failed on every instance it was sent to. {_what_was_tried(tried)}"
    return RequestError(status, message, kind=kind, code=code)


def not_retried(tried: Sequence[InstanceFailure]) -> RequestError:
    """Attempts are left, but so many requests fail that one more would add to the harm."""
    error = given_up(tried)
    message = f"The request failed, and too many do to try each again. {_what_was_tried(tried)}"
    return RequestError(error.status, message, kind=error.kind, code="retry_budget_spent", retry_after_s=1)


def misconfigured(instance_id: str, reason: str) -> RequestError:
    """A retry would meet the same configuration."""
    message = f"Instance {instance_id!r} is misconfigured: {reason}."
    return RequestError(500, message, kind="server_error", code="configuration_error")


def _listed(models: Sequence[str]) -> str:
    names = sorted(models)
    listed = ", ".join(names[:_LISTED_MODELS]) or "none"
    return listed if len(names) <= _LISTED_MODELS else f"{listed}, and {len(names) - _LISTED_MODELS} more"


def _what_was_tried(tried: Sequence[InstanceFailure]) -> str:
    attempts = "; ".join(f"{failure.instance_id}: {failure.detail}" for failure in tried)
    return f"Tried {len(tried)}: {attempts}"
