"""The part of Kubernetes' API that is asked, through its asynchronous client (`kv-conductor[kubernetes]`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson

from conductor.configuration_faults import ConfigError
from conductor.discovery_config import ALL_NAMESPACES, KubernetesConfig

_OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PAGE: Final = 500
_CONNECT_S: Final = 10.0
_LIST_S: Final = 60.0
_SILENCE_S: Final = 30.0  # by which a watch may outlast the time that was asked for


class ApiError(Exception):
    """The API server cannot be reached, or refuses; the message says what to do where that is known."""


class GoneError(ApiError):
    """What was asked to be continued is too old to be: everything has to be listed anew."""


@dataclass(frozen=True, slots=True)
class PodEvent:
    """``kind`` is ADDED, MODIFIED, DELETED or BOOKMARK, whose ``pod`` has nothing but the version."""

    kind: str
    pod: dict[str, Any]

    @property
    def version(self) -> str:
        return str(self.pod["metadata"]["resourceVersion"])


class PodApi:
    """Lists and watches pods. An asynchronous context."""

    def __init__(self, client: Any, core: Any, own_namespace: str) -> None:
        self._client = client
        self._core = core
        self._own_namespace = own_namespace

    @classmethod
    async def connect(cls, config: KubernetesConfig) -> Self:
        """Nothing is asked yet. Raises ConfigError."""
        try:
            from kubernetes_asyncio import client
            from kubernetes_asyncio import config as ways
        except ImportError:
            raise ConfigError(
                "discovery.kubernetes: needs the Kubernetes client: pip install 'kv-conductor[kubernetes]'"
            ) from None
        way = client.Configuration()
        try:
            if config.kubeconfig is None:
                ways.load_incluster_config(client_configuration=way)  # type: ignore[no-untyped-call]
                namespace = _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else "default"
            else:
                await ways.load_kube_config(
                    config_file=str(config.kubeconfig), context=config.context, client_configuration=way
                )
                contexts, active = ways.list_kube_config_contexts(str(config.kubeconfig))
                chosen = next((each for each in contexts if each["name"] == config.context), active)
                namespace = ((chosen or {}).get("context") or {}).get("namespace") or "default"
        except (ways.ConfigException, OSError) as error:
            where = "kubeconfig" if config.kubeconfig is not None else "the service account"
            raise ConfigError(
                f"discovery.kubernetes: {where} cannot be used: {error}; run in a pod with a service account's "
                "token, or give a kubeconfig"
            ) from None
        api_client = client.ApiClient(configuration=way)
        return cls(api_client, client.CoreV1Api(api_client), namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    def namespace_of(self, namespace: str | None) -> str:
        """As configured, for people."""
        return namespace or self._own_namespace

    async def list_pods(self, namespace: str | None, selector: str) -> tuple[list[dict[str, Any]], str]:
        """All pods, and the version from which on they can be watched. Raises ApiError."""
        pods: list[dict[str, Any]] = []
        more = ""
        while True:
            response = await self._ask(
                namespace, label_selector=selector, limit=_PAGE, _request_timeout=_LIST_S, **_unless(more)
            )
            async with response:
                page = orjson.loads(await _body(response))
            pods += page.get("items") or []
            more = page["metadata"].get("continue") or ""
            if not more:
                return pods, str(page["metadata"]["resourceVersion"])

    async def watch_pods(
        self, namespace: str | None, selector: str, version: str, *, within_s: int
    ) -> AsyncIterator[PodEvent]:
        """Changes since ``version``, for so long. The first item is a bookmark of it: the server has answered.

        Raises ApiError.
        """
        response = await self._ask(
            namespace,
            label_selector=selector,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=within_s,
            _request_timeout=(_CONNECT_S, within_s + _SILENCE_S),
        )
        async with response:
            yield PodEvent("BOOKMARK", {"metadata": {"resourceVersion": version}})
            while line := await _line(response):
                event = _decoded(line)
                if event["type"] == "ERROR":
                    raise _refusal(int(event["object"].get("code") or 500), event["object"])
                yield PodEvent(event["type"], event["object"])

    async def _ask(self, namespace: str | None, **arguments: Any) -> aiohttp.ClientResponse:
        """Raises ApiError for whatever is no 200."""
        try:
            if namespace == ALL_NAMESPACES:
                raw = await self._core.list_pod_for_all_namespaces(_preload_content=False, **arguments)
            else:
                raw = await self._core.list_namespaced_pod(
                    self.namespace_of(namespace), _preload_content=False, **arguments
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(f"cannot be reached: {str(error) or type(error).__name__}") from None
        response: aiohttp.ClientResponse = raw
        if response.status == 200:
            return response
        async with response:
            told = await _body(response)
        try:
            status = orjson.loads(told)
        except orjson.JSONDecodeError:
            status = {"message": told[:200].decode(errors="replace")}
        raise _refusal(response.status, status if isinstance(status, dict) else {})


def _unless(more: str) -> dict[str, str]:
    return {"_continue": more} if more else {}


def _refusal(code: int, status: dict[str, Any]) -> ApiError:
    told = status.get("message") or status.get("reason") or "no reason given"
    if code == 410:
        return GoneError(f"answered 410: {told}")
    remedy = ""
    if code in (401, 403):
        remedy = "; the service account needs get, list and watch of pods (the chart's rbac.create)"
    return ApiError(f"answered {code}: {told}{remedy}")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ApiError(f"broke off: {str(error) or type(error).__name__}") from None


async def _line(response: aiohttp.ClientResponse) -> bytes:
    """Empty at the end."""
    try:
        return await response.content.readline()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ApiError(f"broke off: {str(error) or type(error).__name__}") from None


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(line)
        event["type"], event["object"]["kind"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ApiError(f"sent what is no watch event: {line[:100]!r}") from None
    decoded: dict[str, Any] = event
    return decoded
