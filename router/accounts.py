"""What a key has used of its limits: requests and tokens of the last minute, and requests in progress.

Allowances refill continuously, up to a minute's worth. Tokens are taken when a request is admitted, by its prompt,
and settled when it ends, by what it really used: an allowance may be overdrawn by answers, and is paid back before
the next request is admitted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from router.errors import RequestError


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


UNLIMITED = KeyLimits()


@dataclass(slots=True)
class TenantCounts:
    """Of all keys of a tenant; ``refused`` by the limit that was reached."""

    requests: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by status
    prompt_tokens: int = 0
    output_tokens: int = 0
    active: int = 0
    refused: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("requests", "tokens", "concurrency"), 0)
    )


class Allowance:
    """So much a minute; starts full."""

    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s: float | None = None

    def left(self, now_s: float) -> float:
        """Negative while it is overdrawn."""
        if self._at_s is not None and now_s > self._at_s:
            self._level = min(self.limit, self._level + (now_s - self._at_s) * self.limit / 60)
        self._at_s = now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """A negative ``amount`` gives back."""
        self._level = min(self.limit, self.left(now_s) - amount)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much is left; 0 when it is."""
        return max(0.0, (amount - self.left(now_s)) * 60 / self.limit)


class Account:
    """Of one key. ``enter`` and ``leave`` bracket each request."""

    def __init__(self, name: str, limits: KeyLimits, tenant: TenantCounts) -> None:
        self.tenant = tenant
        self.name = name
        self._concurrency = limits.concurrency
        self._requests = _allowance(limits.requests_per_minute)
        self._tokens = _allowance(limits.tokens_per_minute)
        self._active = 0

    def enter(self, now_s: float) -> Grant:
        """Count a request in. Raises RequestError (429), and then nothing is counted."""
        if self._concurrency is not None and self._active >= self._concurrency:
            raise self._refusal("concurrency", f"{self._concurrency} requests at a time", 1.0)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now_s)
            if wait_s > 0:
                raise self._refusal("requests", f"{self._requests.limit} requests per minute", wait_s)
            self._requests.take(1, now_s)
        self._active += 1
        self.tenant.active += 1
        return Grant(self)

    def take_tokens(self, tokens: int, now_s: float) -> None:
        """Raises RequestError (429), and then nothing is taken."""
        allowance = self._tokens
        if allowance is None:
            return
        if tokens > allowance.limit:
            message = (
                f"The prompt has {tokens} tokens; the key {self.name!r} is limited to {allowance.limit} tokens "
                "per minute. Shorten the prompt."
            )
            self.tenant.refused["tokens"] += 1
            raise RequestError(429, message, kind="rate_limit_error", code="prompt_exceeds_limit")
        wait_s = allowance.wait_s(tokens, now_s)
        if wait_s > 0:
            raise self._refusal("tokens", f"{allowance.limit} tokens per minute", wait_s)
        allowance.take(tokens, now_s)

    def settle_tokens(self, tokens: int, now_s: float) -> None:
        """Take more than was taken at admission, or give back where it is negative."""
        if self._tokens is not None and tokens:
            self._tokens.take(tokens, now_s)

    def leave(self) -> None:
        self._active -= 1
        self.tenant.active -= 1

    def fields(self, now_s: float) -> str:
        """The ``x-ratelimit-*`` lines of a response, as OpenAI names them."""
        lines = ""
        for name, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if allowance is not None:
                lines += (
                    f"x-ratelimit-limit-{name}: {allowance.limit}\r\n"
                    f"x-ratelimit-remaining-{name}: {max(0, math.floor(allowance.left(now_s)))}\r\n"
                    f"x-ratelimit-reset-{name}: {_span(allowance.wait_s(allowance.limit, now_s))}\r\n"
                )
        return lines

    def _refusal(self, limit: str, rule: str, wait_s: float) -> RequestError:
        self.tenant.refused[limit] += 1
        return RequestError(
            429,
            f"The key {self.name!r} is limited to {rule}. Try again in {_span(wait_s)}.",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=max(math.ceil(wait_s), 1),
        )


class Grant:
    """One request's part of its account, until it ends. ``number`` names one that another process keeps."""

    __slots__ = ("_account", "_ended", "_tokens")

    number: int = 0

    def __init__(self, account: Account) -> None:
        self._account = account
        self._tokens = 0
        self._ended = False

    def take_tokens(self, prompt_tokens: int, now_s: float) -> None:
        """Raises RequestError (429)."""
        self._account.take_tokens(prompt_tokens, now_s)
        self._tokens = prompt_tokens

    def end(
        self, now_s: float, *, failed: bool, prompt_tokens: int | None, output_tokens: int | None
    ) -> None:
        """The request is over; what it ``failed`` to get costs no tokens. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        account, tenant = self._account, self._account.tenant
        account.leave()
        prompt = self._tokens if prompt_tokens is None or not self._tokens else prompt_tokens
        used = (0, 0) if failed else (prompt, output_tokens or 0)
        account.settle_tokens(sum(used) - self._tokens, now_s)
        tenant.prompt_tokens += used[0]
        tenant.output_tokens += used[1]


def _allowance(limit: int | None) -> Allowance | None:
    return None if limit is None else Allowance(limit)


def _span(seconds: float) -> str:
    """``250ms``, ``1.5s``, ``6m0s``: as OpenAI writes spans of time."""
    milliseconds = math.ceil(seconds * 1e3)
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1e3:g}s" if minutes else f"{rest / 1e3:g}s"
