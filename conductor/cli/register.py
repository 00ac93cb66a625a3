"""`conductor register`: beside an engine, tells conductors that it is there, for as long as it is."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Annotated, Any, Final
from urllib.parse import quote

import httpx
import structlog
import typer
import yaml
from pydantic import ValidationError

from conductor.cli.logs import configure_logs
from conductor.cli.stop_signals import on_stop_signal
from conductor.configuration_faults import ConfigError, explain, read_yaml
from conductor.instance_config import InstanceConfig

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 5.0
_ASK_AGAIN_S: Final = 0.5


class RefusedError(Exception):
    """A conductor answered that it will not have the instance, which asking again does not change."""


def register(
    instance_id: Annotated[
        str, typer.Argument(metavar="ID", help="The instance's id.", envvar="CONDUCTOR_INSTANCE_ID")
    ],
    engine_url: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE_URL",
            help="Where conductors reach the engine: http://host:port.",
            envvar="CONDUCTOR_ENGINE_URL",
        ),
    ],
    conductors: Annotated[
        list[str],
        typer.Option(
            "--url", help="A conductor's address; once for each that is to know.", envvar="CONDUCTOR_URL"
        ),
    ] = ["http://127.0.0.1:8000"],  # noqa: B006
    role: Annotated[str, typer.Option(help="prefill, decode or mixed.")] = "mixed",
    fields: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other key of an entry of `instances`, its value in YAML: --set ranks=2",
        ),
    ] = [],  # noqa: B006
    ttl_s: Annotated[
        float, typer.Option(min=1, max=3_600, help="Heartbeats come three times in so many seconds.")
    ] = 15.0,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0, help="At the end: wait that long for the engine's requests to finish; 0: do not."
        ),
    ] = 60.0,
    token: Annotated[
        str | None,
        typer.Option(
            help="A key with `registers: true`, where keys are used.", envvar="CONDUCTOR_REGISTRATION_KEY"
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Register an engine, keep it registered, and drain it on SIGTERM. For a sidecar, or a start script.

    conductor register vllm-0 http://10.0.0.7:8000 --url http://conductor --role prefill
    """
    configure_logs(log_level, "auto")
    for url in conductors:
        if not re.fullmatch(r"https?://[^\s]+", url):
            raise ConfigError(f"--url {url!r} must look like http://host:port or https://host:port")
    body = _body(instance_id, engine_url, role, fields)
    asyncio.run(_keep_registered(instance_id, body, conductors, ttl_s, drain_s, token))


def _body(instance_id: str, engine_url: str, role: str, fields: list[str]) -> dict[str, Any]:
    """What conductors are told. Raises ConfigError."""
    described: dict[str, Any] = {"role": role}
    for given in fields:
        name, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--set {given!r}: write KEY=VALUE, for example --set ranks=2")
        try:
            described[name] = read_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {given!r}: the value is not valid YAML") from None
    described |= {"id": instance_id, "url": engine_url}
    try:
        InstanceConfig.model_validate(described)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, InstanceConfig))) from None
    del described["id"]
    return described


async def _keep_registered(
    instance_id: str,
    body: dict[str, Any],
    conductors: list[str],
    ttl_s: float,
    drain_s: float,
    token: str | None,
) -> None:
    """Until a signal; then the instance is drained everywhere."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=max(1.0, ttl_s / 3)) as http:
        places = [
            _Registration(
                http, url, f"/v1/instances/{quote(instance_id, safe='')}", body, ttl_s, random.Random()
            )
            for url in conductors
        ]
        keeping = [asyncio.create_task(place.keep()) for place in places]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((*keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (*keeping, stopping):  # all of them: one that went on would register again
            task.cancel()
        ended = await asyncio.gather(*keeping, return_exceptions=True)
        refused = next((each for each in ended if isinstance(each, Exception)), None)
        await asyncio.gather(*(place.leave(drain_s if refused is None else 0.0) for place in places))
        if refused is not None:
            raise ConfigError(str(refused)) if isinstance(refused, RefusedError) else refused


class _Registration:
    """With one conductor."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        path: str,
        body: dict[str, Any],
        ttl_s: float,
        draw: random.Random,
    ) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._path = path
        self._body = body
        self._ttl_s = ttl_s
        self._draw = draw
        self._known = False
        self._asked = False  # to register it, which may have happened though no answer came

    async def keep(self) -> None:
        """Register, and again whenever the conductor does not know the instance. Raises RefusedError."""
        failures = 0
        while True:
            try:
                self._known = await (self._beat() if self._known else self._register())
                failures = 0
                pause_s = self._ttl_s / 3 if self._known else 0.0
            except httpx.HTTPError as error:
                failures += 1
                if failures == 1:
                    _log.warning("conductor cannot be told", url=self._url, reason=_reason(error))
                pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * self._draw.uniform(0.75, 1.0))

    async def leave(self, drain_s: float) -> None:
        """Take the instance out where it is registered, and wait until its requests have ended there."""
        if not self._asked:
            return
        parameters = {"registered": "true"}
        if drain_s > 0:
            parameters |= {"drain": "true", "deadline_s": str(drain_s)}
        try:
            answer = await self._http.delete(self._url + self._path, params=parameters)
            if answer.status_code in (404, 409):
                return  # it is gone already, or somebody else's by now
            answer.raise_for_status()
            _log.info("leaving", url=self._url, placements_under_way=answer.json()["placements_under_way"])
            async with asyncio.timeout(drain_s + 1.0):
                while (await self._http.get(self._url + self._path)).status_code != 404:
                    await asyncio.sleep(_ASK_AGAIN_S)
        except (httpx.HTTPError, TimeoutError) as error:
            _log.warning("left without the conductor's consent", url=self._url, reason=_reason(error))

    async def _register(self) -> bool:
        self._asked = True
        answer = await self._http.put(self._url + self._path, params={"ttl_s": self._ttl_s}, json=self._body)
        if answer.status_code in (401, 403, 404, 409, 422):
            self._asked = False
            raise RefusedError(f"{self._url} refuses the instance: {_told(answer)}")
        answer.raise_for_status()
        _log.info("registered", url=self._url, ttl_s=self._ttl_s)
        return True

    async def _beat(self) -> bool:
        answer = await self._http.post(f"{self._url}{self._path}/heartbeat")
        if answer.status_code == 404:
            _log.info("the conductor does not know the instance; it is registered again", url=self._url)
            return False
        answer.raise_for_status()
        return True


def _told(answer: httpx.Response) -> str:
    if answer.status_code in (401, 403):
        return "it takes a key with 'registers: true', or an administrator's: --token"
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text[:300]}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
