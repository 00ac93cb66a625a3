"""Small questions to engines over kept connections: whether they live, what they serve, their gauges.

aiohttp, for httpx takes several times its CPU, and every engine is asked twice an interval.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

Headers = Mapping[str, str]


class ProbeError(Exception):
    """An engine answered a probe with something unusable, or not at all; the message says what."""


class UnreachableError(ProbeError):
    """Nothing accepts connections where the engine should be."""


class NoAnswerError(ProbeError):
    """An engine that may live did not answer in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``headers`` are looked up whatever their case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class EngineClient:
    """``timeout_s`` is for a whole answer; None for ``tls``: certificates that the system trusts.

    To be made, used and closed in one event loop.
    """

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding",),  # an engine has better things to do than to pack it
        )

    async def ask(
        self, url: str, path: str, headers: Headers | None = None, *, method: str = "GET"
    ) -> Answer:
        """Raises ProbeError, and the two kinds of it, when there is no answer."""
        try:
            async with self._session.request(
                method, f"{url}{path}", headers=headers, allow_redirects=False
            ) as response:
                return Answer(response.status, response.headers, await response.read())
        except TimeoutError:
            raise NoAnswerError(f"{method} {path} was not answered within {self._timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(f"cannot connect: {error.os_error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ProbeError(f"{method} {path} failed: {type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._session.close()
