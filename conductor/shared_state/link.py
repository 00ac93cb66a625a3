"""The connection to Redis: every call has a deadline, and fails with one kind of error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError


class LinkError(Exception):
    """Redis did not do it; the message never has the password."""


def host_of(url: str) -> str:
    """What of a URL may be shown."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}{parts.path.rstrip('/')}"


class RedisLink:
    """One connection, made when it is needed and again after every failure. Belongs to one event loop."""

    def __init__(self, url: str, namespace: str, timeout_s: float) -> None:
        """Raises ValueError for a URL that is none."""
        self.host = host_of(url)
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    def key(self, name: str) -> str:
        """Of this namespace; all of one slot."""
        return f"{{{self._namespace}}}:{name}"

    async def run(self, script: str, keys: Sequence[str], *arguments: bytes | str | int) -> Any:
        """Have a script run with the keys of these names. Raises LinkError, at the latest when its time is up."""
        names = [self.key(name) for name in keys]
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                call = self._client.eval(script, len(names), *names, *arguments)
                return await cast("Any", call)
        except (RedisError, OSError, TimeoutError) as error:
            await self._hang_up()
            raise LinkError(f"{type(error).__name__}: {error}".rstrip(": ")[:200]) from None

    async def close(self) -> None:
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()

    async def _hang_up(self) -> None:
        """An answer that comes late must not be taken for the next one's."""
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._client.connection_pool.disconnect(inuse_connections=True)
