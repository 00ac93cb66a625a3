"""Engines by ``ip:port``, as other data planes name them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from conductor.placement import Target

logger = structlog.get_logger("router")

_REFRESH_S: Final = 30.0


class Addresses:
    """IP addresses of engines; host names are looked up, and again every half minute.

    Between two look-ups the last answer holds, also where a later one fails.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._literal: dict[str, str] = {}
        self._found: dict[str, tuple[str, float]] = {}  # by name: address, and when it was asked for
        self._asking: dict[str, asyncio.Task[str | None]] = {}

    def known(self, target: Target) -> str | None:
        """``ip:port``, with brackets around IPv6; None for a name that was not looked up yet."""
        ip = self._literal.get(target.host)
        if ip is None:
            try:
                ipaddress.ip_address(target.host)
            except ValueError:
                found = self._found.get(target.host)
                if found is None:
                    return None
                ip, asked_s = found
                if self._clock() > asked_s + _REFRESH_S and target.host not in self._asking:
                    self._ask(target)
            else:
                ip = self._literal[target.host] = target.host
        return f"[{ip}]:{target.port}" if ":" in ip else f"{ip}:{target.port}"

    async def of(self, target: Target) -> str | None:
        """The same, after a look-up where one is needed; None where the name has no address."""
        if self.known(target) is None:
            await asyncio.shield(self._asking.get(target.host) or self._ask(target))
        return self.known(target)

    async def outside(self, subset: frozenset[str], targets: Iterable[Target]) -> frozenset[str]:
        """Ids of the instances whose address is not in ``subset``."""
        left_out = []
        for target in targets:
            if (self.known(target) or await self.of(target)) not in subset:
                left_out.append(target.instance_id)
        return frozenset(left_out)

    def _ask(self, target: Target) -> asyncio.Task[str | None]:
        task = asyncio.get_running_loop().create_task(self._look_up(target.host, target.port))
        self._asking[target.host] = task
        return task

    async def _look_up(self, host: str, port: int) -> str | None:
        try:
            loop = asyncio.get_running_loop()
            answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            ip = str(answers[0][4][0])
        except OSError as error:
            logger.warning("an engine's host name has no address", host=host, error=str(error))
            return None
        finally:
            del self._asking[host]
        self._found[host] = (ip, self._clock())
        return ip
