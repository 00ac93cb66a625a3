"""Requests to a store's HTTP API, with its errors in the words of executors."""

from __future__ import annotations

from typing import Any

import httpx

from conductor.actions import ExecutionError

TIMEOUT_S = 10.0
_RETRYABLE = (408, 425, 429, 500, 504)


async def ask(client: httpx.AsyncClient, method: str, url: str, **request: Any) -> dict[str, Any]:
    """The JSON object that a store answers.

    Raises ExecutionError: retryable when the store cannot be reached or has a passing trouble; 502 and 503 are
    how LMCache says that it cannot do it with the engines that it has now.
    """
    where = f"{method} {url}"
    try:
        response = await client.request(method, url, timeout=TIMEOUT_S, **request)
    except httpx.HTTPError as error:
        raise ExecutionError(f"{where}: {type(error).__name__}: {error}"[:300], retryable=True) from None
    if response.is_error:
        raise ExecutionError(
            f"{where} answered {response.status_code}: {response.text[:300]}",
            retryable=response.status_code in _RETRYABLE,
        )
    try:
        answer = response.json()
    except ValueError:
        raise ExecutionError(f"{where} answered no JSON: {response.text[:100]!r}") from None
    if not isinstance(answer, dict):
        raise ExecutionError(f"{where} answered no JSON object: {response.text[:100]!r}")
    return answer


def count(answer: dict[str, Any], name: str) -> int:
    """A number of an answer. Raises ExecutionError when it is missing."""
    value = answer.get(name)
    if not isinstance(value, int):
        raise ExecutionError(f"the store's answer has no number {name!r}: {str(answer)[:200]}")
    return value
