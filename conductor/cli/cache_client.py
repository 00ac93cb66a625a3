"""Asking a running conductor about its caches: the calls of `conductor cache`, and their errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import orjson

_TIMEOUT_S = 30.0
_POLL_S = 0.1
_TIERS = ("device", "host", "disk", "pod", "remote")


class CacheCommandError(Exception):
    """What is wrong with what was asked for, or with the server that was asked."""


class ConductorClient:
    """A running conductor. Methods raise CacheCommandError."""

    def __init__(self, url: str, token: str | None, *, timeout_s: float = _TIMEOUT_S) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._url = url.rstrip("/")
        self._http = httpx.Client(timeout=timeout_s, headers=headers)

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        return self._call("GET", path, params={name: v for name, v in params.items() if v is not None})

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, json=body)

    def token_ids(self, model: str, text: str) -> list[int]:
        """As an engine of the model makes them of a text."""
        tokens = self.post("/tokenize", {"model": model, "prompt": text}).get("tokens")
        if not isinstance(tokens, list):
            raise CacheCommandError(f"{self._url}/tokenize answered no tokens; give the prompt with --tokens")
        return tokens

    def first_model(self) -> str:
        listed = self.get("/v1/models").get("data") or []
        if not listed:
            raise CacheCommandError(f"nothing is served at {self._url}; name a model with --model")
        return str(listed[0]["id"])

    def ended(self, action: dict[str, Any]) -> dict[str, Any]:
        """Wait until an action has ended, which it does at its deadline."""
        while action["state"] in ("planned", "running"):
            time.sleep(_POLL_S)
            action = self.get(f"/v1/actions/{action['id']}")
        return action

    def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        url = self._url + path
        try:
            response = self._http.request(method, url, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CacheCommandError(
                f"cannot reach {self._url}: {error}; is `conductor serve` running there? (--url)"
            ) from None
        if response.status_code in (401, 403):
            raise CacheCommandError(
                f"{url} takes an administrator's key: --token, or CONDUCTOR_SERVER__ADMIN_TOKEN"
            )
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_error or not isinstance(answer, dict):
            told = answer.get("error", {}).get("message") if isinstance(answer, dict) else None
            raise CacheCommandError(f"{url} answered {response.status_code}: {told or response.text[:300]}")
        return answer


def parse_place(written: str, option: str) -> dict[str, Any]:
    """``INSTANCE/TIER`` or ``INSTANCE/TIER/RANK`` as the API takes it. Raises CacheCommandError."""
    instance, slash, rest = written.partition("/")
    tier, _, rank = rest.partition("/")
    if not instance or not slash or tier not in _TIERS or (rank and not rank.isdecimal()):
        raise CacheCommandError(
            f"{option} {written!r}: write INSTANCE/TIER, for example prefill-0/host; tiers: {', '.join(_TIERS)}"
        )
    return {"instance": instance, "tier": tier, "rank": int(rank or 0)}


def parse_prompt(text: str | None, file: Path | None, tokens: str | None) -> dict[str, Any]:
    """The field of an order that holds the prompt; empty without one. Raises CacheCommandError."""
    given = [name for name, value in (("--text", text), ("--file", file), ("--tokens", tokens)) if value]
    if len(given) > 1:
        raise CacheCommandError(f"{' and '.join(given)}: give the prompt once")
    try:
        if file is not None:
            text = file.read_text()
        if tokens is not None:
            return {"token_ids": _token_ids(tokens)}
    except (OSError, UnicodeDecodeError) as error:
        raise CacheCommandError(f"cannot read the prompt: {error}") from None
    return {} if not text else {"text": text}


def _token_ids(written: str) -> list[int]:
    listed = Path(written[1:]).read_bytes() if written.startswith("@") else f"[{written.strip('[]')}]"
    try:
        ids = orjson.loads(listed)
    except orjson.JSONDecodeError:
        ids = None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < 2**32 for i in ids):
        raise CacheCommandError(
            f"--tokens {written[:40]!r}: write token ids as 1,2,3, or @FILE with a JSON list of them"
        )
    return ids
